"""The leaderboard as one HTML file: what it shows needs neither network nor neighbours."""

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fedmjp.benchmarks.leaderboard.entries import BoardEntry
from fedmjp.benchmarks.leaderboard.headline import exactly, headline, recovery, server_name
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.report import details, front, legend, numbers
from fedmjp.benchmarks.report.citation import AUTHORS, read_citation
from fedmjp.benchmarks.report.claimed import CAVEAT, CLAIMS, claimed_table
from fedmjp.benchmarks.report.columns import KEY_FIGURES, RESULTS, TEXT, filled, write
from fedmjp.benchmarks.report.drawing import Plot
from fedmjp.benchmarks.report.matrix import Matrix
from fedmjp.benchmarks.report.plots import embed_svg
from fedmjp.benchmarks.report.reported import reported_table
from fedmjp.benchmarks.report.tables import Report, list_servers
from fedmjp.benchmarks.report.thumbnails import make_thumbnails
from fedmjp.metrics import EXACT

FILTERS = {
    "server sees": "Threat",
    "model": "Model",
    "defence": "Defence",
    "setting": "Setting",
    "attack": "Attack",
    "verdict": "Verdict",
}  # columns that a reader chooses values of, and what the choice is called
OPTIONAL = ("model", "setting", "server sees")  # where all rows say the same, a line above the table says it
FRONT_SIDES = (224,)  # pixels of the three pictures that stand first
NEIGHBOURS = ("leaderboard.csv", "leaderboard.json")  # what the page links to, written beside it
LABEL = "median"  # the picture of an entry that stands for it


@dataclass(frozen=True)
class KeptPicture:
    """One picture of an entry: its name, what leaked of it (PSNR in dB), and three PNG files."""

    label: str
    picture: str
    psnr: float
    original: Path
    shuffled: Path
    reconstruction: Path

    @property
    def files(self) -> dict[str, Path]:
        """Map the pictures' captions to their files."""
        return {"private": self.original, "uploaded": self.shuffled, "recovered": self.reconstruction}


Gallery = dict[str, tuple[KeptPicture, ...]]  # up to three pictures for each entry, by the entry's id


def page(report: Report, gallery: Gallery | None, drawn: Mapping[str, str], plots: Sequence[Plot]) -> str:
    """Render the page.

    Args:
        report: A board's report.
        gallery: Kept pictures by the entry's id; None for a page that says why it has none.
        drawn: Each plot as SVG, by name.
        plots: The plots, in the order in which they are shown.
    """
    values = {**_tables(report), **_pictures(report, gallery), **_facts(report), **_plots(drawn, plots)}
    return _environment().get_template("page.html.jinja").render(board=report.board, gallery=gallery, **values)


def _tables(report: Report) -> dict[str, Any]:
    board, table, frame = report.board, report.matrix, report.frame
    key_entries = front.select_key_entries(table)
    pictures = frame.loc[[entry.id for entry in report.pictures.entries]]
    results = write(pictures, RESULTS)
    return {
        "question": board.question or front.QUESTION,
        "answer": front.sentence(board, table),
        "matrix": table,
        "key_entries": key_entries,
        "key_figures": write(frame.loc[[entry.id for entry in key_entries]], KEY_FIGURES),
        "results": _drop(results, OPTIONAL),
        "shared": {name: results[name].iloc[0] for name in OPTIONAL if len(results) and results[name].nunique() == 1},
        "disclosed": filled(report.disclosed).drop(columns="reason", errors="ignore"),
        "disclosed_columns": legend.explain_disclosed() if len(report.disclosed) else {},
        "records": frame.to_dict("index"),
        "attacks": {cell.entry.id: cell.attacks for row in table.rows for cell in row.cells if cell},
        "claimed": claimed_table(board),
        "reported": filled(reported_table(board)).drop(columns=["source", "differs"], errors="ignore"),
        "differences": grouped(board.reported, lambda row: f"{row.source}: {row.differs}"),
    }


def _drop(table: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Drop the columns that are empty, and those of these names where all rows say the same."""
    table = filled(table)
    return table.drop(columns=[name for name in names if name in table and table[name].nunique() == 1])


def list_filter_options(table: pd.DataFrame) -> dict[str, list[str]]:
    """Map each filterable column to its values; skip columns with a single value.

    Args:
        table: The table of all results.
    """
    values = {name: list(dict.fromkeys(table[name])) for name in FILTERS if name in table}
    return {name: texts for name, texts in values.items() if len(texts) > 1}


def list_key_columns(table: pd.DataFrame) -> list[str]:
    """List the columns in which key figures differ and those of numbers; what all share stands in the heading.

    Args:
        table: The table of key figures.
    """
    return list(map(str, _drop(table, ("server sees", "model", "defence"))))


def _pictures(report: Report, gallery: Gallery | None) -> dict[str, Any]:
    first = _first(gallery or {}, report.matrix)
    kept_pictures = [picture for pictures in (gallery or {}).values() for picture in pictures]
    return {
        "first": first,
        "front_pictures": make_thumbnails(first[1].files.values() if first else (), "front", FRONT_SIDES),
        "pictures": make_thumbnails((path for picture in kept_pictures for path in picture.files.values()), "picture"),
    }


def _facts(report: Report) -> dict[str, Any]:
    board = report.board
    facts, shared = details.list_facts(board)
    return {
        "facts": facts,
        "shared_facts": shared,
        "servers": {
            server: server.sentence(entry.pipeline for entry in board.entries if entry.server == server)
            for server in list_servers(board)
        },
        "environments": details.list_environments(board),
        "citation": read_citation(board),
        "manifest": json.dumps(board.about, indent=2, default=str),
    }


def _plots(drawn: Mapping[str, str], plots: Sequence[Plot]) -> dict[str, Any]:
    """Embed the plots; ``repeated`` are those behind one of the same kind, whose caption explains both."""
    kinds = [re.sub(r"\d+", "", plot.name) for plot in plots]
    return {
        "plots": [(plot, Markup(embed_svg(plot, drawn[plot.name]))) for plot in plots],  # noqa: S704 (we drew it)
        "repeated": {plot.name: kinds[place] in kinds[:place] for place, plot in enumerate(plots)},
    }


def anchor(entry_id: str) -> str:
    """Name the fragment of an entry's details, the same in every page that shows it.

    Args:
        entry_id: The entry's id, whatever it is made of.
    """
    return f"cell-{sha256(entry_id.encode()).hexdigest()[:12]}"


def _breakable(text: str) -> Markup:
    """Text whose lines may break after an underscore, colon or equals sign, as in names of models and defences."""
    return Markup(re.sub(r"([_:=])", r"\1<wbr>", str(escape(text))))  # noqa: S704 (escaped)


def _first(gallery: Gallery, table: Matrix) -> tuple[BoardEntry, KeptPicture] | None:
    """Choose the median picture of the cell that the answer speaks of where it leaks most, or of any cell."""
    subject = table.subject.measured if table.subject else []
    most = sorted(subject, key=lambda cell: headline(cell.entry), reverse=True)
    cells = [*most, *(cell for row in table.rows for cell in row.measured)]
    entry = next((cell.entry for cell in cells if gallery.get(cell.entry.id)), None)
    if entry is None:
        return None
    candidates = gallery[entry.id]
    return entry, next((picture for picture in candidates if picture.label == LABEL), candidates[0])


@cache
def _environment() -> Environment:
    """Set up the template's language, which does not depend on the board."""
    environment = Environment(
        loader=PackageLoader("fedmjp.benchmarks.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(breakable=_breakable, minus=numbers.with_minus, words=details.write_words)
    environment.globals.update(
        style=_asset("page.css"),
        script=_asset("page.js"),
        anchor=anchor,
        server_name=server_name,
        legend=legend,
        numbers=numbers,
        filters=FILTERS,
        exact_share=legend.EXACT_SHARE,
        filter_options=list_filter_options,
        key_columns=list_key_columns,
        text_columns=TEXT,
        authors=AUTHORS,
        exact=EXACT,
        exactly=exactly,
        headline=headline,
        recovery=recovery,
        neighbours=NEIGHBOURS,
        claims_title=CLAIMS,
        claims_caveat=CAVEAT,
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
