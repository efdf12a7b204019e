"""The leaderboard as one HTML file: what it shows needs neither network nor neighbours."""

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import exactly, headline, recovery
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.report import details, disclosed, front, legend, numbers, results
from fedmjp.benchmarks.report.citation import AUTHORS, citation
from fedmjp.benchmarks.report.drawing import Plot
from fedmjp.benchmarks.report.matrix import Matrix, matrix, server_name
from fedmjp.benchmarks.report.plots import inline
from fedmjp.benchmarks.report.reported import reported_rows
from fedmjp.benchmarks.report.rows import TEXT, servers
from fedmjp.benchmarks.report.tables import filled
from fedmjp.benchmarks.report.thumbnails import thumbnails
from fedmjp.metrics import EXACT

FRONT_SIDES = (224,)  # pixels of the three pictures that stand first
NEIGHBOURS = ("leaderboard.csv", "leaderboard.json")  # what the page links to, written beside it
LABEL = "median"  # the picture of an entry that stands for it


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
        return {"private": self.original, "uploaded": self.shuffled, "recovered": self.reconstruction}


Gallery = dict[str, tuple[Shown, ...]]  # up to three pictures for each entry, by the entry's id


def page(board: Board, gallery: Gallery | None, drawn: Mapping[str, str], plots: Sequence[Plot]) -> str:
    """Render the page, with plots in this order, which ``drawn`` has as SVG by name; without a gallery it says why."""
    shown, rows = matrix(board), results.results(board)
    first = _first(gallery or {}, shown)
    facts, shared = details.facts(board)
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            board=board,
            question=front.question(board),
            answer=front.sentence(board, shown),
            matrix=shown,
            key_figures=front.key_figures(board, shown),
            rows=rows,
            disclosed=disclosed.rows(board),
            disclosed_columns=disclosed.meanings(board),
            standings={row.entry.id: row.standing for row in rows if row.standing} | disclosed.standings(board),
            attacks={cell.entry.id: cell.attacks for row in shown.rows for cell in row.cells if cell},
            servers={
                server: server.sentence(entry.pipeline for entry in board.entries if entry.server == server)
                for server in servers(board)
            },
            reported=reported_rows(board),
            differences=grouped(board.reported, lambda row: f"{row.source}: {row.differs}"),
            gallery=gallery,
            first=first,
            front_pictures=thumbnails(first[1].files.values() if first else (), "front", FRONT_SIDES),
            pictures=thumbnails(
                (path for several in (gallery or {}).values() for one in several for path in one.files.values()),
                "picture",
            ),
            plots=[(plot, Markup(inline(plot, drawn[plot.name]))) for plot in plots],  # noqa: S704 (we drew it)
            repeated=_repeated(plots),
            facts=facts,
            shared_facts=shared,
            environments=details.environments_of(board),
            citation=citation(board),
            manifest=json.dumps(board.about, indent=2, default=str),
        )
    )


def anchor(entry: BoardEntry) -> str:
    """The fragment of an entry's details: the same in every page that shows it, whatever its id is made of."""
    return f"cell-{sha256(entry.id.encode()).hexdigest()[:12]}"


def _repeated(plots: Sequence[Plot]) -> dict[str, bool]:
    """By name, whether a plot of the same kind stands before it, whose caption explains both."""
    kinds = [re.sub(r"\d+", "", plot.name) for plot in plots]
    return {plot.name: kind in kinds[:place] for place, (plot, kind) in enumerate(zip(plots, kinds, strict=True))}


def _breakable(text: str) -> Markup:
    """Text whose lines may break after an underscore, colon or equals sign, as in names of models and defences."""
    return Markup(re.sub(r"([_:=])", r"\1<wbr>", str(escape(text))))  # noqa: S704 (escaped)


def _first(gallery: Gallery, shown: Matrix) -> tuple[BoardEntry, Shown] | None:
    """The median picture of where the row that the answer speaks of leaks most, or of any cell that has pictures."""
    subject = shown.subject.measured if shown.subject else []
    most = sorted(subject, key=lambda cell: headline(cell.entry), reverse=True)
    cells = [*most, *(cell for row in shown.rows for cell in row.measured)]
    entry = next((cell.entry for cell in cells if gallery.get(cell.entry.id)), None)
    if entry is None:
        return None
    kept = gallery[entry.id]
    return entry, next((picture for picture in kept if picture.label == LABEL), kept[0])


@cache
def _environment() -> Environment:
    """The template's language: what does not depend on the board."""
    environment = Environment(
        loader=PackageLoader("fedmjp.benchmarks.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(breakable=_breakable, minus=numbers.with_minus, words=details.words)
    environment.globals.update(
        style=_asset("page.css"),
        script=_asset("page.js"),
        anchor=anchor,
        server_name=server_name,
        legend=legend,
        numbers=numbers,
        results=results,
        front=front,
        filled=filled,
        text_columns=(*TEXT, *disclosed.TEXTS),
        disclosed_title=disclosed.TITLE,
        authors=AUTHORS,
        exact=EXACT,
        exactly=exactly,
        headline=headline,
        recovery=recovery,
        neighbours=NEIGHBOURS,
    )
    return environment


@dataclass(frozen=True)
class _Asset:
    """Style or script as it stands in the page, and its digest as a content-security policy names it."""

    content: Markup
    digest: str


def _asset(name: str) -> _Asset:
    text = resources.files("fedmjp.benchmarks.report").joinpath(name).read_text(encoding="utf-8")
    digest = b64encode(sha256(text.encode()).digest()).decode()
    return _Asset(Markup(text), f"sha256-{digest}")  # noqa: S704 (a file of ours)
