"""The leaderboard as one HTML file that needs neither network nor neighbours."""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from itables import options as itables_options
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from benchmarks.leaderboard.entries import Board
from benchmarks.leaderboard.listing import grouped
from benchmarks.report import legend, numbers
from benchmarks.report.advice import advice
from benchmarks.report.drawing import Plot
from benchmarks.report.findings import strongest
from benchmarks.report.plots import inline
from benchmarks.report.reported import reported_rows
from benchmarks.report.rows import FILTERED, TEXT, Row, sections
from benchmarks.report.tables import filled

SENTENCES = ("reason", "differs")  # columns that would make rows high
SHARED = ("protocol", "source")  # columns of interest only where rows are not alike


@dataclass(frozen=True)
class Shown:
    """One picture of an entry: its name, what leaked of it (PSNR in dB), and three PNG files."""

    label: str
    picture: str
    psnr: float
    original: Path
    shuffled: Path
    reconstruction: Path

    @property
    def files(self) -> dict[str, Path]:
        """By what they show."""
        return {"original": self.original, "shuffled": self.shuffled, "reconstruction": self.reconstruction}


Gallery = dict[str, tuple[Shown, ...]]  # up to three pictures for each entry, by the entry's id


@dataclass(frozen=True)
class Picture:
    """A picture that is embedded once, however many rows show it."""

    id: str
    width: int
    height: int
    png: str


def page(board: Board, gallery: Gallery | None, drawn: Mapping[str, str], plots: Sequence[Plot]) -> str:
    """Render the page, with plots in this order, which ``drawn`` has as SVG by name; without a gallery it says why."""
    decided = ((standing, strongest(board, standing)) for standing in board.standings)
    environments = (one for entry in board.entries for one in entry.provenance.environments)
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            board=board,
            advice=advice(board),
            sections=sections(board),
            reported=reported_rows(board),
            differences=grouped(board.reported, lambda row: f"{row.source}: {row.differs}"),
            # What the standing that an entry decides says, where that is not what the entry says.
            standing_reasons={
                entry.id: f"{standing.verdict}: {standing.reason}"
                for standing, entry in decided
                if (standing.verdict, standing.reason) != (entry.verdict, entry.reason)
            },
            anchors={entry.id: f"entry-{place}" for place, entry in enumerate(board.entries)},
            gallery=gallery,
            pictures=_pictures(
                path for shown in (gallery or {}).values() for one in shown for path in one.files.values()
            ),
            plots=[(plot, inline(plot, drawn[plot.name])) for plot in plots],
            environments=list({json.dumps(one, sort_keys=True): one for one in environments}.values()),
            manifest=json.dumps(board.about, indent=2, default=str),
        )
    )


def _pictures(paths: Iterable[Path]) -> dict[Path, Picture]:
    """By file; files of the same content are one picture."""
    found: dict[bytes, Picture] = {}
    by_path = {}
    for path in paths:
        content = path.read_bytes()
        if content not in found:
            with Image.open(path) as image:
                found[content] = Picture(f"picture-{len(found)}", *image.size, b64encode(content).decode())
        by_path[path] = found[content]
    return by_path


@cache
def _environment() -> Environment:
    """The template's language: what does not depend on the board."""
    environment = Environment(
        loader=PackageLoader("benchmarks.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # DataTables as itables brings it along: its style sheet, and its module in base64.
    module = Path(itables_options.dt_bundle)
    bundle = {
        "style": module.with_suffix(".css").read_text(encoding="utf-8"),
        "module": b64encode(module.read_bytes()).decode(),
    }
    columns = {"columns_of": _columns, "widths": _widths, "text_columns": TEXT, "filtered": FILTERED}
    environment.globals.update(columns, bundle=bundle, legend=legend, numbers=numbers, words=_words)
    return environment


def _columns(rows: Sequence[Row]) -> list[str]:
    """Columns of the page, without sentences and without what all rows share: that stands beside the table."""
    shown = filled(rows)
    shared = [name for name in SHARED if name in shown and len({row.values[name].text for row in rows}) == 1]
    return [name for name in shown if name not in (*SENTENCES, *shared)]


def _widths(rows: Sequence[Row], names: Sequence[str]) -> dict[str, int]:
    """Letters of the longest interval of each column, so that the numbers before them line up."""
    return {name: max(len(row.values[name].interval) for row in rows) for name in names}


def _words(content: Any) -> str:
    """Whatever was recorded of an environment: a third party's need not look like ours."""
    if isinstance(content, Mapping):
        return ", ".join(f"{name}: {_words(value)}" for name, value in content.items())
    if isinstance(content, (list, tuple)):
        return ", ".join(map(_words, content)) or "none"
    if content is None:
        return "unknown"
    return ("yes" if content else "no") if isinstance(content, bool) else str(content)
