"""All plots of a leaderboard, and their SVG: a file of their own, or a part of a page that has its colours."""

import io
import re
from html import escape

import matplotlib as mpl

from fedmjp.benchmarks.leaderboard.entries import Board
from fedmjp.benchmarks.report.curves import plot_mask_ratios, plot_trade_off, plot_upload_counts
from fedmjp.benchmarks.report.distributions import plot_distributions
from fedmjp.benchmarks.report.drawing import NARROW_INCHES, STYLE, Plot
from fedmjp.benchmarks.report.tables import list_servers

NO_METADATA: dict[str, None] = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # so that bytes repeat


def plots(board: Board) -> list[Plot]:
    """Draw all plots that the board has the numbers for: across servers, then one server after the other.

    Args:
        board: The board.
    """
    board = board.revealing("pictures")
    with mpl.rc_context(STYLE):
        within = [
            plot
            for index, server in enumerate(list_servers(board), start=1)
            for draw in (plot_distributions, plot_trade_off, plot_mask_ratios)
            for plot in draw(board, server, f"threat-{index}")
        ]
        return [*plot_upload_counts(board), *within]


def write_svg(plot: Plot) -> str:
    """Write a plot as a whole SVG file, transparent, black on whatever it is put on.

    Args:
        plot: The plot.
    """
    text = io.StringIO()
    with mpl.rc_context(STYLE):
        plot.figure.savefig(text, format="svg", transparent=True, metadata=NO_METADATA)
    return text.getvalue()


def embed_svg(plot: Plot, content: str) -> str:
    """Write a plot as an ``<svg>`` element for a page, with the text's colour for black, own ids and a title.

    Styles become attributes, which a page's content-security policy allows. Attributes' numbers keep one decimal, and
    ids stay where something refers to them. The class says how far the page may let it shrink.

    Args:
        plot: The plot.
        content: What ``standalone`` wrote of it.
    """
    element = content[content.index("<svg ") :]
    element = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", element, flags=re.S)
    element = re.sub(r' style="([^"]*)"', lambda matched: _attributes(matched[1]), element)
    element = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d)\d+", r"\1", tag[0]), element)
    element = re.sub(r"\s+", " ", element).replace("> <", "><")
    used = set(re.findall(r"#([\w.-]+)", element))
    element = re.sub(r' id="([^"]*)"', lambda matched: matched[0] if matched[1] in used else "", element)
    element = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{plot.name}-", element)
    element = element.replace("#000000", "currentColor")
    # Text without a fill of its own is black, which the page's colour has to replace.
    drawn = 'fill="currentColor" stroke-linejoin="round" stroke-linecap="butt"'
    kind = "plot-wide" if plot.figure.get_figwidth() > NARROW_INCHES else "plot"
    root = f'<svg class="{kind}" role="img" aria-labelledby="{plot.name}-title" {drawn} '
    caption = plot.caption if plot.server is None else f"{plot.caption} {plot.server.sentence()}"
    title = f'<title id="{plot.name}-title">{escape(caption)}</title>'
    start = element.index(">") + 1
    return root + element[len("<svg ") : start] + title + element[start:]


def _attributes(style: str) -> str:
    """Turn a style such as ``fill: none; stroke-width: 2`` into attributes; the font is the page's."""
    pairs = (part.split(":", 1) for part in style.split(";") if ":" in part)
    return "".join(f' {name.strip()}="{value.strip()}"' for name, value in pairs if name.strip() != "font-family")
