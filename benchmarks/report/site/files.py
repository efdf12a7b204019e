"""Files beside a README that its page shows or links to, copied beside the page."""

import shutil
from pathlib import Path

from PIL import Image

from benchmarks.report.site.folders import unique

TEXTS = (".csv", ".json", ".txt")
PICTURES = (".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp")
LARGE = 300_000  # bytes
WIDTH = 1600  # pixels; twice as many as a page shows


def copy_text(path: Path, source: Path, target: Path) -> str | None:
    """Copy a text from one folder to another; its name there, or None if it is none of that folder."""
    return _copy(path, source, target) if path.suffix in TEXTS else None


def copy_picture(path: Path, source: Path, target: Path) -> str | None:
    """Copy a picture from one folder to another; its name there, or None if it is none of that folder.

    Large ones lose what nobody sees at the width of a page.
    """
    if path.suffix.lower() not in PICTURES:
        return None
    name = _copy(path, source, target)
    if name is None or path.suffix == ".svg" or path.stat().st_size <= LARGE:
        return name
    smaller = (target / name).with_suffix(".webp")
    try:
        with Image.open(path) as picture:
            picture.thumbnail((WIDTH, 16 * WIDTH))
            picture.convert("RGBA").save(smaller, quality=85)
    except (OSError, ValueError, Image.DecompressionBombError):
        return name  # the browser may know better
    return smaller.name


def _copy(path: Path, source: Path, target: Path) -> str | None:
    if not (path.is_file() and path.is_relative_to(source)):
        return None
    name = unique("-".join(path.relative_to(source).parts), ())
    if not (target / name).exists():
        shutil.copyfile(path, target / name)
    return name
