"""A leaderboard as files: page, tables, plots."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from fedmjp.benchmarks.folder.output import write_text
from fedmjp.benchmarks.leaderboard.entries import Board
from fedmjp.benchmarks.report.page import Gallery, page
from fedmjp.benchmarks.report.plots import plots, write_svg
from fedmjp.benchmarks.report.tables import Report
from fedmjp.benchmarks.report.texts import csv_text, latex_text, markdown_text
from fedmjp.files import require_no_link

Format = Literal["html", "md", "csv", "json", "latex"]
FORMATS: tuple[Format, ...] = get_args(Format)
LINKED: tuple[Format, ...] = ("csv", "json")  # what the page links to
_TEXTS: dict[Format, tuple[str, Callable[[Report], str]]] = {
    "md": ("md", markdown_text),
    "csv": ("csv", csv_text),
    "json": ("json", lambda report: report.board.model_dump_json(indent=2) + "\n"),
    "latex": ("tex", latex_text),
}


def publish(board: Board, folder: Path, *, formats: Sequence[Format], pictures: Gallery | None) -> list[Path]:
    """Write a leaderboard into a folder, each file whole or not at all.

    Args:
        board: The leaderboard.
        folder: An existing folder.
        formats: Formats; ``html`` brings along CSV, JSON, and the plots as files in ``plots/``.
        pictures: Kept pictures by the entry's id; None for a page that says why it has none.

    Returns:
        The files that were written.

    Raises:
        OutputError: If the folder of plots is a link.
    """
    report, files = Report(board), dict[str, str]()
    for name in dict.fromkeys([*formats, *(LINKED if "html" in formats else ())]):
        if name == "html":
            figures = plots(board.reproduced)
            drawn = {plot.name: write_svg(plot) for plot in figures}
            require_no_link(folder / "plots")
            (folder / "plots").mkdir(exist_ok=True)
            files["leaderboard.html"] = page(report, pictures, drawn, figures)
            files |= {f"plots/{plot}.svg": content for plot, content in drawn.items()}
        else:
            suffix, text = _TEXTS[name]
            files[f"leaderboard.{suffix}"] = text(report)
    for path, content in files.items():
        write_text(folder / path, content)
    return [folder / path for path in files]
