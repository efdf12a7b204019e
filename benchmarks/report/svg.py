"""Figures as SVG: a file of their own, or a part of a page that takes its colours from there."""

import io
import re
from html import escape

import matplotlib as mpl

from benchmarks.report.drawing import STYLE, Plot

NO_METADATA: dict[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # so that bytes repeat


def standalone(plot: Plot) -> str:
    """A whole SVG file, transparent, black on whatever it is put on."""
    text = io.StringIO()
    with mpl.rc_context(STYLE):
        plot.figure.savefig(text, format="svg", transparent=True, metadata=NO_METADATA)
    return text.getvalue()


def inline(plot: Plot, content: str) -> str:
    """The ``<svg>`` element for a page: the text's colour for black, ids of its own, a title.

    Args:
        plot: What is shown.
        content: ``standalone(plot)``.
    """
    element = content[content.index("<svg ") :]
    element = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{plot.name}-", element)
    element = element.replace("#000000", "currentColor")
    # Text without a fill of its own is black, which the page's colour has to replace.
    root = f'<svg role="img" aria-labelledby="{plot.name}-title" fill="currentColor" '
    said = plot.caption if plot.server is None else f"{plot.caption} {plot.server.sentence()}"
    title = f'<title id="{plot.name}-title">{escape(said)}</title>'
    start = element.index(">") + 1
    return root + element[len("<svg ") : start] + title + element[start:]
