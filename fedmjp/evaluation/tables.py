"""Evaluations as tables: for the terminal, as Markdown, as CSV."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tabulate import tabulate

from fedmjp.evaluation.figures import MEASURES, Estimate, Figures, Line
from fedmjp.evaluation.runs import TrainedModel, describe_kinds, distinguish_kinds
from fedmjp.training.rows import PAPER, SETTING

OUR_DECIMALS = {"difference": 3}  # of measures with more than one
PRINTED_DECIMALS = {"difference": 2}
NARROW = 120  # columns of a terminal below which a spread stands under its mean
HEADING = 9  # letters of a line of a heading in a narrow terminal, if its words allow
NOTHING = "-"
DEFENCES, RATIO = "defences", "mask_ratio"


@dataclass(frozen=True)
class TextTable:
    """A table of texts; in its cells a spread stands after a line break."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    faint: frozenset[int]  # places of rows with reported figures
    ends: frozenset[int] = frozenset()  # places of rows that end a section


@dataclass(frozen=True)
class Family:
    """A group of trainings with a jigsaw that differ in its mask ratio alone, named by their common settings."""

    name: str
    trained_with: Sequence[float]  # ascending; one without a jigsaw has 0
    lines: Mapping[float, Sequence[Line]]  # in that order, by the ratio of x~


def build_tables(lines: Sequence[Line], data: str) -> list[TextTable]:
    """Tabulate all kinds of run at all ratios of x~, and arrange them as Table 3 where possible.

    Args:
        lines: Of all kinds and mask ratios.
        data: Name of the pictures, for the title.
    """
    return [_tabulate_kinds(lines, data), *map(_tabulate_family, find_families(lines))]


def collect_remarks(lines: Sequence[Line]) -> list[str]:
    """Collect the explanations of the figures in the tables."""
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


def print_tables(tables: Sequence[TextTable], console: Console) -> None:
    """Print tables; on a narrow terminal spreads stand below their means."""
    narrow = console.width < NARROW
    for table in tables:
        grid = Table(box=box.SIMPLE_HEAD, title=Text(table.title), title_justify="left", padding=(0, 1, 0, 0))
        for place, name in enumerate(table.head):
            words = place == 0
            heading = textwrap.fill(name, HEADING, break_long_words=False) if narrow else name
            grid.add_column(heading, justify="left" if words else "right", no_wrap=not words, overflow="fold")
        for place, row in enumerate(table.rows):
            cells = row if narrow else map(_join_lines, row)
            style = "dim italic" if place in table.faint else ""
            grid.add_row(*map(Text, cells), style=style, end_section=place in table.ends)
        console.print(grid)


def render_markdown(
    tables: Sequence[TextTable], remarks: Sequence[str], title: str = "Accuracy and consistency"
) -> str:
    """Render a page of tables and remarks as Markdown."""
    parts = [f"# {title}"]
    for table in tables:
        rows = [[_join_lines(cell).replace("|", "\\|") for cell in row] for row in table.rows]
        align = ["left", *["right"] * (len(table.head) - 1)]
        body = tabulate(rows, headers=list(table.head), tablefmt="pipe", disable_numparse=True, colalign=align)
        parts += [f"## {table.title}", body]
    return "\n\n".join([*parts, "\n".join(f"- {remark}" for remark in remarks)]) + "\n"


def build_frame(runs: Sequence[TrainedModel], measured: Sequence[Sequence[Figures]]) -> pd.DataFrame:
    """Build a frame with a row per run and mask ratio, every number at full precision."""
    return pd.DataFrame(
        [
            {
                "run": run.name,
                **asdict(kind),
                "seed": run.seed,
                "mask_ratio": figures.ratio,
                "realised_ratio": figures.realised,
                "pictures": figures.pictures,
                "undecided": figures.undecided,
                **_build_columns(figures),
            }
            for run, kind, every in zip(runs, describe_kinds(runs), measured, strict=True)
            for figures in every
        ]
    )


def _build_columns(figures: Figures) -> dict[str, float | None]:
    row: dict[str, float | None] = {}
    for name in MEASURES:
        estimate: Estimate | None = getattr(figures, name)
        value, low, high = (estimate.value, estimate.low, estimate.high) if estimate else (None, None, None)
        row |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return row


def find_families(lines: Sequence[Line]) -> list[Family]:
    """Find the families of two trainings or more: Table 3's arrangement."""
    shared: dict[str, dict[str, Any]] = {}
    for line in lines:
        settings = {key: value for key, value in line.example.settings.items() if key != RATIO}
        if line.example.settings.get(RATIO) and settings not in shared.values():
            shared[_name_family(line)] = settings
    candidates = [_build_family(name, settings, lines) for name, settings in shared.items()]
    return [family for family in candidates if len(family.trained_with) > 1]


def _name_family(line: Line) -> str:
    """Name the kind of a line without its mask ratio."""
    ratio = f" {line.example.settings[RATIO]:g}"
    return str(replace(line.kind, defence=line.kind.defence.replace(ratio, "", 1)))


def _build_family(name: str, settings: Mapping[str, Any], lines: Sequence[Line]) -> Family:
    placed = [(ratio, line) for line in lines if (ratio := _find_training_ratio(line, settings)) is not None]
    placed.sort(key=lambda pair: pair[0])
    by_ratio = {
        ratio: [line for _, line in placed if line.ratio == ratio] for ratio in sorted({line.ratio for line in lines})
    }
    return Family(name, list(dict.fromkeys(ratio for ratio, _ in placed)), by_ratio)


def _find_training_ratio(line: Line, shared: Mapping[str, Any]) -> float | None:
    """Find the mask ratio of a training; None if another setting differs from the family's."""
    settings = dict(line.example.settings)
    ratio = settings.pop(RATIO, None)
    if not settings.get(DEFENCES):
        ratio, settings = 0.0, settings | {DEFENCES: shared[DEFENCES]}
    return ratio if settings == shared else None


def _tabulate_kinds(lines: Sequence[Line], data: str) -> TextTable:
    """Order kinds by ratio, so that figures to be compared stand side by side."""
    rows: list[list[str]] = []
    faint, ends = set(), set()
    present = list(dict.fromkeys(line.kind for line in lines))
    common, names = distinguish_kinds(present)
    for ratio in sorted({line.ratio for line in lines}):
        for line in (line for line in lines if line.ratio == ratio):
            figures = [format_estimate(line.spreads[name], name) for name in MEASURES]
            name = names[present.index(line.kind)]
            rows.append([name, f"{line.seeds}", f"{ratio:g}\n{line.realised:.3f}", *figures])
            if line.reported:
                faint.add(len(rows))
                printed = [_format_reported(line.get_reported(name), name) for name in MEASURES]
                rows.append([f"reported: {line.reported.source}", "", "", *printed])
        ends.add(len(rows) - 1)
    head = ["trained", "seeds", "x~ ratio", *MEASURES.values()]
    title = f"{common}{lines[0].pictures:,} pictures of {data}"
    return TextTable(title, head, rows, frozenset(faint), frozenset(ends))


def _tabulate_family(family: Family) -> TextTable:
    rows: list[list[str]] = []
    faint = set()
    for ratio, lines in family.lines.items():
        for name, heading in MEASURES.items():
            if name == "top1" and rows:
                continue  # it is that of x for every x~
            words = heading if name == "top1" else f"{heading} at {ratio:g}"
            rows.append([words, *(format_estimate(line.spreads[name], name) for line in lines)])
            printed = [_format_reported(line.get_reported(name), name) for line in lines]
            if any(text != NOTHING for text in printed):
                faint.add(len(rows))
                rows.append(["reported", *printed])
    head = ["trained with", *(f"{ratio:g}" for ratio in family.trained_with)]
    return TextTable(f"By the mask ratio of training: {family.name}", head, rows, frozenset(faint))


def _format_reported(value: float | None, name: str) -> str:
    """Format a figure with the decimals of the paper."""
    return NOTHING if value is None else f"{value:.{PRINTED_DECIMALS.get(name, 1)}f}"


def format_estimate(estimate: Estimate | None, name: str) -> str:
    """Format a mean with its spread after a line break.

    Args:
        estimate: A dash stands for None.
        name: Of the measure, which says the number of decimals.
    """
    if estimate is None:
        return NOTHING
    decimals = OUR_DECIMALS.get(name, 1)
    mean = f"{estimate.value:.{decimals}f}"
    if estimate.deviation is not None:
        return f"{mean}\n± {estimate.deviation:.{decimals}f}"
    if estimate.low is None or estimate.high is None:
        return mean
    return f"{mean}\n{estimate.low:.{decimals}f}–{estimate.high:.{decimals}f}"


def _join_lines(cell: str) -> str:
    value, _, spread = cell.partition("\n")
    if not spread or spread.startswith("±"):
        return f"{value} {spread}".rstrip()
    return f"{value} ({spread})"
