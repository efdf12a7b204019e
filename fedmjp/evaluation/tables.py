"""Evaluations as tables: for the terminal, as Markdown, as CSV."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tabulate import tabulate

from fedmjp.evaluation.figures import MEASURES, Estimate, Figures, Line
from fedmjp.evaluation.runs import Trained, kinds, told_apart
from fedmjp.training.rows import PAPER, SETTING

OUR_DECIMALS = {"difference": 3}  # one for the others
PRINTED_DECIMALS = {"difference": 2}
NARROW = 120  # columns of a terminal below which a spread stands under its mean
HEADING = 9  # letters of a line of a heading then, if its words allow
NOTHING = "-"
DEFENCES, RATIO = "defences", "mask_ratio"


@dataclass(frozen=True)
class Sheet:
    """A table of texts; in its cells a spread stands after a line break."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    faint: frozenset[int]  # rows that are somebody else's figures
    ends: frozenset[int] = frozenset()  # rows that end a section


@dataclass(frozen=True)
class Family:
    """Trainings with a jigsaw that differ in its mask ratio alone, and what they have in common, in words."""

    name: str
    trained_with: Sequence[float]  # ascending; one without a jigsaw has 0
    lines: Mapping[float, Sequence[Line]]  # in that order, by the ratio of x~


def sheets(lines: Sequence[Line], data: str) -> list[Sheet]:
    """All kinds of run at all ratios of x~, and Table 3's arrangement where there is one."""
    return [_by_kind(lines, data), *map(_by_training_ratio, families(lines))]


def notes(lines: Sequence[Line]) -> list[str]:
    """What the figures of the tables are."""
    remarks = [
        "x~ ratio: the wanted share of shuffled patches, and the realised one.",
        "Diff. Norm.: L2 norm of the difference of x's and x~'s features. Consistency: predictions that stay the same.",
    ]
    if any(line.seeds > 1 for line in lines):
        remarks.append("± is the standard deviation over seeds.")
    if any(line.seeds == 1 for line in lines):
        remarks.append("A range is the 95 % interval over the pictures, for one seed.")
    if any(line.reported for line in lines):
        remarks.append(
            f"Reported: {PAPER} (MJP), not measured here; {SETTING}. The ratio of its x~ is known for Top-1 only."
        )
    return remarks


def print_sheets(shown: Sequence[Sheet], console: Console) -> None:
    """On a narrow terminal spreads stand below their means."""
    for sheet in shown:
        table = Table(box=box.SIMPLE_HEAD, title=Text(sheet.title), title_justify="left", padding=(0, 1, 0, 0))
        narrow = console.width < NARROW
        for place, name in enumerate(sheet.head):
            words = place == 0
            heading = textwrap.fill(name, HEADING, break_long_words=False) if narrow else name
            table.add_column(heading, justify="left" if words else "right", no_wrap=not words, overflow="fold")
        for place, row in enumerate(sheet.rows):
            cells = row if narrow else map(_on_one_line, row)
            style = "dim italic" if place in sheet.faint else ""
            table.add_row(*map(Text, cells), style=style, end_section=place in sheet.ends)
        console.print(table)


def markdown(shown: Sequence[Sheet], remarks: Sequence[str], title: str = "Accuracy and consistency") -> str:
    """All tables and what has to be said of them."""
    parts = [f"# {title}"]
    for sheet in shown:
        rows = [[_on_one_line(cell).replace("|", "\\|") for cell in row] for row in sheet.rows]
        align = ["left", *["right"] * (len(sheet.head) - 1)]
        body = tabulate(rows, headers=list(sheet.head), tablefmt="pipe", disable_numparse=True, colalign=align)
        parts += [f"## {sheet.title}", body]
    return "\n\n".join([*parts, "\n".join(f"- {remark}" for remark in remarks)]) + "\n"


def frame(runs: Sequence[Trained], measured: Sequence[Sequence[Figures]]) -> pd.DataFrame:
    """One row per run and mask ratio, every number at full precision."""
    return pd.DataFrame(
        [
            {
                "run": run.name,
                "model": kind.model,
                "defence": kind.defence,
                "localisation": kind.localisation,
                "training": kind.training,
                "seed": run.seed,
                "mask_ratio": figures.ratio,
                "realised_ratio": figures.realised,
                "pictures": figures.pictures,
                "undecided": figures.undecided,
                **_columns(figures),
            }
            for run, kind, every in zip(runs, kinds(runs), measured, strict=True)
            for figures in every
        ]
    )


def _columns(figures: Figures) -> dict[str, float | None]:
    row: dict[str, float | None] = {}
    for name in MEASURES:
        estimate: Estimate | None = getattr(figures, name)
        value, low, high = (estimate.value, estimate.low, estimate.high) if estimate else (None, None, None)
        row |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return row


def families(lines: Sequence[Line]) -> list[Family]:
    """Those with two trainings or more: Table 3's arrangement."""
    shared: dict[str, dict[str, Any]] = {}
    for line in lines:
        settings = {key: value for key, value in line.example.settings.items() if key != RATIO}
        if line.example.settings.get(RATIO) and settings not in shared.values():
            shared[_name(line)] = settings
    candidates = [_family(name, settings, lines) for name, settings in shared.items()]
    return [family for family in candidates if len(family.trained_with) > 1]


def _name(line: Line) -> str:
    """Its kind without the mask ratio."""
    ratio = f" {line.example.settings[RATIO]:g}"
    return str(replace(line.kind, defence=line.kind.defence.replace(ratio, "", 1)))


def _family(name: str, settings: Mapping[str, Any], lines: Sequence[Line]) -> Family:
    placed = [(ratio, line) for line in lines if (ratio := _trained_with(line, settings)) is not None]
    placed.sort(key=lambda pair: pair[0])
    by_ratio = {
        ratio: [line for _, line in placed if line.ratio == ratio] for ratio in sorted({line.ratio for line in lines})
    }
    return Family(name, list(dict.fromkeys(ratio for ratio, _ in placed)), by_ratio)


def _trained_with(line: Line, shared: Mapping[str, Any]) -> float | None:
    """The mask ratio that a model was trained with; None if more than that sets it apart from the family."""
    settings = dict(line.example.settings)
    ratio = settings.pop(RATIO, None)
    if not settings.get(DEFENCES):
        ratio, settings = 0.0, settings | {DEFENCES: shared[DEFENCES]}
    return ratio if settings == shared else None


def _by_kind(lines: Sequence[Line], data: str) -> Sheet:
    """Ordered by ratio, so that what is to be compared stands together."""
    rows: list[list[str]] = []
    faint, ends = set(), set()
    present = list(dict.fromkeys(line.kind for line in lines))
    common, names = told_apart(present)
    for ratio in sorted({line.ratio for line in lines}):
        for line in (line for line in lines if line.ratio == ratio):
            figures = [text_of(line.spreads[name], name) for name in MEASURES]
            name = names[present.index(line.kind)]
            rows.append([name, f"{line.seeds}", f"{ratio:g}\n{line.realised:.3f}", *figures])
            if line.reported:
                faint.add(len(rows))
                printed = [_printed(line.printed(name), name) for name in MEASURES]
                rows.append([f"reported: {line.reported.source}", "", "", *printed])
        ends.add(len(rows) - 1)
    head = ["trained", "seeds", "x~ ratio", *MEASURES.values()]
    title = f"{common}{lines[0].pictures:,} pictures of {data}"
    return Sheet(title, head, rows, frozenset(faint), frozenset(ends))


def _by_training_ratio(family: Family) -> Sheet:
    rows: list[list[str]] = []
    faint = set()
    for ratio, lines in family.lines.items():
        for name, heading in MEASURES.items():
            if name == "top1" and rows:
                continue  # it is that of x, whatever x~ is
            words = heading if name == "top1" else f"{heading} at {ratio:g}"
            rows.append([words, *(text_of(line.spreads[name], name) for line in lines)])
            printed = [_printed(line.printed(name), name) for line in lines]
            if any(text != NOTHING for text in printed):
                faint.add(len(rows))
                rows.append(["reported", *printed])
    head = ["trained with", *(f"{ratio:g}" for ratio in family.trained_with)]
    return Sheet(f"By the mask ratio of training: {family.name}", head, rows, frozenset(faint))


def _printed(value: float | None, name: str) -> str:
    """With the decimals of the paper."""
    return NOTHING if value is None else f"{value:.{PRINTED_DECIMALS.get(name, 1)}f}"


def text_of(estimate: Estimate | None, name: str) -> str:
    """A mean with its spread after a line break, with the decimals of the measure of that name."""
    if estimate is None:
        return NOTHING
    decimals = OUR_DECIMALS.get(name, 1)
    mean = f"{estimate.value:.{decimals}f}"
    if estimate.deviation is not None:
        return f"{mean}\n± {estimate.deviation:.{decimals}f}"
    if estimate.low is None or estimate.high is None:
        return mean
    return f"{mean}\n{estimate.low:.{decimals}f}–{estimate.high:.{decimals}f}"


def _on_one_line(cell: str) -> str:
    value, _, spread = cell.partition("\n")
    if not spread or spread.startswith("±"):
        return f"{value} {spread}".rstrip()
    return f"{value} ({spread})"
