"""SVG pictures that may be shown from a stranger's folder: shapes and text alone, nothing that runs or loads."""

import re
from pathlib import Path
from xml.parsers import expat

from fedmjp.files import read_file

LARGEST = 10_000_000  # bytes
SVG, XLINK, BETWEEN = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", " "
SHAPES = frozenset(
    {
        "svg", "g", "defs", "symbol", "use", "path", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text",
        "tspan", "title", "desc", "metadata", "style", "clipPath", "mask", "pattern", "marker", "linearGradient",
        "radialGradient", "stop", "image",
    }
)  # fmt: skip
# Namespaces of what drawing programs say of a picture; browsers make nothing of it.
INERT = (
    "http://www.w3.org/1999/02/22-rdf-syntax-ns#", "http://creativecommons.org/ns#", "http://purl.org/dc/elements/1.1/",
)  # fmt: skip
LEADS_OUT = re.compile(r"url\s*\(\s*['\"]?(?!#)|@import|\\|expression", re.IGNORECASE)


class _LiveError(Exception):
    """Content that a browser would run or load."""


def is_still(path: Path) -> bool:
    """Tell whether an SVG file holds shapes and text alone.

    Args:
        path: Of the file; what is no SVG is not still.
    """
    parser = expat.ParserCreate(namespace_separator=BETWEEN)
    parser.StartElementHandler = _require_shape
    parser.CharacterDataHandler = _require_inside
    parser.EntityDeclHandler = parser.ProcessingInstructionHandler = _refuse
    try:
        parser.Parse(read_file(path, LARGEST).decode(), True)
    except (OSError, UnicodeDecodeError, expat.ExpatError, _LiveError):
        return False
    return True


def _require_shape(name: str, attributes: dict[str, str]) -> None:
    namespace, _, element = name.rpartition(BETWEEN)
    if namespace not in INERT and (namespace != SVG or element not in SHAPES):
        raise _LiveError(name)
    for attribute, value in attributes.items():
        if attribute in ("href", f"{XLINK}{BETWEEN}href") and not value.startswith(("#", "data:image/png;base64,")):
            raise _LiveError(attribute)
        if attribute.lower().startswith("on"):
            raise _LiveError(attribute)
        if not attribute.endswith("href"):
            _require_inside(value)


def _require_inside(text: str) -> None:
    if LEADS_OUT.search(text):
        raise _LiveError(text[:20])


def _refuse(*_: object) -> None:
    raise _LiveError
