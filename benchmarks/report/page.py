"""The leaderboard as one HTML file that needs neither network nor neighbours."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from itables import options as itables_options
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from benchmarks.leaderboard.entries import Board, Entry, Marginal, Standing
from benchmarks.report import numbers
from benchmarks.report.advice import advice
from benchmarks.report.drawing import Plot
from benchmarks.report.findings import strongest
from benchmarks.report.gallery import Gallery
from benchmarks.report.legend import HEADINGS, LEAKAGE_HEADING, VERDICTS, columns, definitions, told_of
from benchmarks.report.plots import inline
from benchmarks.report.reported import reported_rows
from benchmarks.report.rows import FILTERED, TEXT, Row, sections
from benchmarks.report.tables import filled

NO_GALLERY = (
    "This page holds no pictures: it is published without them, because not every picture that was attacked may be "
    "passed on. Run the command below to make them."
)
NO_UTILITY = "No plot of privacy against utility: no accuracy is known for the weights that were attacked."
NO_RATIOS = "No plot of leakage against mask ratio: no model was attacked at two ratios or more."

SENTENCES = ("reason", "differs")  # columns that would make rows high
SHARED = ("protocol", "source")  # columns of interest only where rows are not alike


@dataclass(frozen=True)
class Picture:
    """A picture that is embedded once, however many rows show it."""

    id: str
    width: int
    height: int
    png: str


class Pictures:
    """Pictures by content, in the order in which they are first shown."""

    def __init__(self) -> None:
        self.found: dict[str, Picture] = {}

    def add(self, path: Path) -> Picture:
        """Embed a PNG file, or find it again."""
        content = path.read_bytes()
        digest = sha256(content).hexdigest()
        if digest not in self.found:
            with Image.open(path) as image:
                width, height = image.size
            self.found[digest] = Picture(f"picture-{len(self.found)}", width, height, b64encode(content).decode())
        return self.found[digest]


def page(board: Board, gallery: Gallery | None, drawn: Mapping[str, str], plots: Sequence[Plot]) -> str:
    """Render the page.

    Args:
        board: What is shown.
        gallery: Pictures per entry; the page says why there are none.
        drawn: SVG by name of the plot.
        plots: In the order in which they are shown.
    """
    pictures = Pictures()
    shown = {entry.id: gallery.of(entry.id) for entry in board.entries} if gallery else {}
    galleries = {
        entry_id: [(one, [pictures.add(path) for path in one.files]) for one in several]
        for entry_id, several in shown.items()
    }
    environments = _environments(board)
    template = _environment().get_template("page.html.jinja")
    return template.render(
        board=board,
        advice=advice(board),
        sections=sections(board),
        reported=reported_rows(board),
        differences=_differences(board),
        numbers=numbers,
        headings=HEADINGS,
        text_columns=TEXT,
        filtered=FILTERED,
        leakage=LEAKAGE_HEADING,
        columns_of=_columns,
        widths=_widths,
        standing_reasons=_standing_reasons(board),
        anchors={entry.id: f"entry-{place}" for place, entry in enumerate(board.entries)},
        galleries=galleries,
        pictures=list(pictures.found.values()),
        no_gallery=None if gallery else NO_GALLERY,
        plots=[(plot, inline(plot, drawn[plot.name])) for plot in plots],
        no_plots=_missing_plots(plots),
        verdicts={name: text for name, text in VERDICTS.items() if any(e.verdict == name for e in board.entries)},
        verdict_class=_verdict_class,
        columns=columns(board),
        definitions=definitions(board.metrics),
        facts=_facts,
        environments=[(place, _described(one)) for place, one in enumerate(environments.values(), start=1)],
        environment_numbers=lambda entry: _numbers_of(entry, list(environments)),
        manifest=json.dumps(board.about, indent=2, default=str),
        bundle=_bundle(),
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("benchmarks.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _bundle() -> dict[str, str]:
    """DataTables as itables brings it along: its style sheet, and its module in base64."""
    module = Path(itables_options.dt_bundle)
    style = module.with_suffix(".css").read_text(encoding="utf-8")
    return {"style": style, "module": b64encode(module.read_bytes()).decode()}


def _verdict_class(row: Row) -> str:
    return f"verdict-{row.verdict.replace(' ', '-')}"


def _columns(rows: Sequence[Row]) -> list[str]:
    """Columns of the page, without sentences and without what all rows share: that stands beside the table."""
    shown = filled(rows)
    shared = [name for name in SHARED if name in shown and len({row.values[name].text for row in rows}) == 1]
    return [name for name in shown if name not in (*SENTENCES, *shared)]


def _differences(board: Board) -> dict[str, list[str]]:
    """The rows of papers by what differs there from ours, each with its source."""
    found: dict[str, list[str]] = {}
    for row in board.reported:
        found.setdefault(f"{row.source}: {row.differs}", []).append(row.row)
    return found


def _widths(rows: Sequence[Row], names: Sequence[str]) -> dict[str, int]:
    """Letters of the longest interval of each column, so that the numbers before them line up."""
    return {name: max(len(row.values[name].interval) for row in rows) for name in names}


def _standing_reasons(board: Board) -> dict[str, str]:
    """What the standing that an entry decides says, where that is not what the entry says; by the entry's id."""
    return {
        strongest(board, standing).id: f"{standing.verdict}: {standing.reason}"
        for standing in board.standings
        if _differ(standing, strongest(board, standing))
    }


def _differ(standing: Standing, entry: Entry) -> bool:
    return (standing.verdict, standing.reason) != (entry.verdict, entry.reason)


def _missing_plots(plots: Sequence[Plot]) -> list[str]:
    needed = {"-utility": NO_UTILITY, "-mask-ratio": NO_RATIOS}
    return [reason for part, reason in needed.items() if not any(part in plot.name for plot in plots)]


def _facts(entry: Entry) -> list[tuple[str, str]]:
    """What the table has no column for."""
    provenance = entry.provenance
    found = [
        ("Caveat", entry.caveat),
        ("Threat model", " ".join(filter(None, [entry.threat.sentence(), told_of([entry.pipeline])]))),
        ("Defences, as configured", ", then ".join(config.text for config in entry.defences)),
        ("Against no defence, dB", numbers.difference(entry.over_twin) if entry.over_twin else ""),
        *((f"Adds, {each.defence}, dB", _added(each)) for each in entry.marginal),
        ("Over grey, dB", numbers.difference(entry.over_floor) if entry.over_floor else ""),
        ("Weights", entry.weights if entry.weights == "untrained" else f"checkpoint {entry.weights}"),
        ("Accuracy", f"top-1 {entry.utility.top1:g} %, {entry.utility.source}" if entry.utility else ""),
        ("Attack", "adapted to the defence" if entry.adapted else "not adapted to any defence"),
        ("Trials", _trials(entry)),
        ("Recognisable and 3 dB over the guess", f"{entry.exposed} of {entry.n} pictures" if entry.n else ""),
        ("Mask ratio, realised", "" if entry.realised_ratio is None else f"{entry.realised_ratio:.3f}"),
        ("Errors", "; ".join(entry.errors)),
        ("Submitted by", f"{entry.submitter.name}, {entry.submitter.link}" if entry.submitter else ""),
        ("Scored as", entry.protocol),
        ("Campaign", provenance.campaign),
        ("Pictures", provenance.data),
        ("SHA-256 of the pictures", provenance.pictures_sha256),
        ("SHA-256 of the weights", ", ".join(provenance.weights_sha256)),
        ("SHA-256 of the configuration", provenance.config_sha256),
        ("Entry", entry.id),
        ("Entry without defence", entry.twin),
        ("Entry of the guess", entry.floor),
        ("Seeds", ", ".join(map(str, provenance.seeds))),
        ("Run", f"{provenance.first} to {provenance.last}" if provenance.first else "not run"),
    ]
    return [(term, text) for term, text in found if text]


def _added(marginal: Marginal) -> str:
    found = numbers.difference(marginal.difference) if marginal.difference else "not measured"
    return f"{found}; entry without it: {marginal.twin}"


def _trials(entry: Entry) -> str:
    counts = {"missing": entry.missing, "pictures left out, being the attack's own prior": entry.left_out}
    more = [f"{count} {what}" for what, count in counts.items() if count]
    return ", ".join([f"{entry.trials} finished over {entry.n} pictures", f"{entry.failures} failed", *more])


def _environments(board: Board) -> dict[str, Mapping[str, Any]]:
    """Every environment once, by its JSON."""
    return {json.dumps(one, sort_keys=True): one for entry in board.entries for one in entry.provenance.environments}


def _numbers_of(entry: Entry, keys: Sequence[str]) -> str:
    return ", ".join(str(keys.index(json.dumps(one, sort_keys=True)) + 1) for one in entry.provenance.environments)


def _described(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Whatever was recorded, in words: a third party's environment need not look like ours."""
    return [(name, _words(content)) for name, content in environment.items()]


def _words(content: Any) -> str:
    if isinstance(content, Mapping):
        return ", ".join(f"{name}: {_words(value)}" for name, value in content.items())
    if isinstance(content, (list, tuple)):
        return ", ".join(map(_words, content)) or "none"
    if content is None:
        return "unknown"
    return ("yes" if content else "no") if isinstance(content, bool) else str(content)
