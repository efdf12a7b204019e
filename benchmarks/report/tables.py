"""The leaderboard as CSV, Markdown and terminal tables."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tabulate import tabulate

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry, Difference, Share, Statistics, Utility
from fedmjp.benchmarks.leaderboard.headline import headline
from fedmjp.benchmarks.report import disclosed
from fedmjp.benchmarks.report.advice import advice
from fedmjp.benchmarks.report.legend import ADDED_HEADING, LEAKAGE_HEADING, columns, verdicts
from fedmjp.benchmarks.report.reported import reported_rows
from fedmjp.benchmarks.report.rows import TEXT, Row, sections
from fedmjp.config import Config
from fedmjp.defences.pipeline import NONE
from fedmjp.texts import guard, printable
from fedmjp.threat import HONEST

# What a narrow terminal can do without, in this order.
DISPENSABLE = (
    "protocol", "reason", "upload", "attack s", "n", *disclosed.DISPENSABLE,
    "MSE", "FFT2D", "p95", LEAKAGE_HEADING, "over grey, dB", "top-1 %",
    "LPIPS", "SSIM",
    "worst", "recognisable", "failed", "flat", "weights", ADDED_HEADING, "against no defence, dB", "strongest attack",
    "mask ratio",
)  # fmt: skip
PRINTED = 40  # entries up to which a terminal gets all cells
COUNTS = ("failed", "flat")  # of what is shown where there is any
NAMED = 4  # columns that are named as left out
GAP = 2  # between columns of a terminal table
NESTED = {
    "defences", "marginal", "threat", "metrics", "scores", "submitter", "utility", "cost", "provenance", "errors",
    "over_floor", "over_twin", "exact", "flat", "recognisable", "together",
}  # fmt: skip


def csv_text(board: Board) -> str:
    """One line per entry, every number at full precision, empty where there is no value."""
    lines = [_flat(entry, board.metrics) for entry in board.entries]
    return printable(pd.DataFrame(lines, dtype=object).map(guard).to_csv(index=False, lineterminator="\n"))


def _flat(entry: BoardEntry, metrics: Sequence[str]) -> dict[str, Any]:
    """Flat names: ``psnr_mean``, ``over_twin_p_value``, ``threat_batch_size``."""
    provenance = entry.provenance.model_dump(mode="json", exclude={"environments"})
    return {
        **entry.model_dump(mode="json", exclude=NESTED),
        "errors": "; ".join(entry.errors),
        "defences": " + ".join(config.text for config in entry.defences) or NONE,  # as the command line takes them
        "marginal": json.dumps([marginal.model_dump() for marginal in entry.marginal]) if entry.marginal else None,
        **_headline(entry),
        **_prefixed("threat", entry.server.model_dump(mode="json", exclude={"defences", "server"})),
        "threat_server": HONEST if entry.threat.server is None else entry.threat.server.text,
        **{key: value for name in metrics for key, value in _fields(name, Statistics, entry.metrics.get(name)).items()},
        **_fields("over_floor", Difference, entry.over_floor),
        **_fields("over_twin", Difference, entry.over_twin),
        **_fields("recognisable", Share, entry.recognisable),
        **_fields("utility", Utility, entry.utility),
        **entry.cost.model_dump(),
        **_prefixed("provenance", provenance),
        **{f"provenance_{name}": " ".join(map(str, provenance[name])) for name in ("weights_sha256", "seeds")},
    }


def _headline(entry: BoardEntry) -> dict[str, Any]:
    """What every table begins with: ``exact`` is a share."""
    exact = entry.exact
    return {
        "exact": exact and exact.share,
        "exact_low": exact and exact.low,
        "exact_high": exact and exact.high,
        "median": headline(entry)[1] if exact and entry.reveals == "pictures" else None,
        "flat": None if entry.flat is None else len(entry.flat),
        "uploads": entry.uploads,
    }


def _fields(name: str, kind: type[Config], value: Config | None) -> dict[str, Any]:
    return _prefixed(name, value.model_dump() if value else dict.fromkeys(kind.model_fields))


def _prefixed(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}_{key}": value for key, value in values.items()}


def markdown_text(board: Board) -> str:
    """Standings and cells per server, reported figures, notes."""
    parts = [f"# {_escaped(board.title)}", _escaped(board.question), *map(_escaped, advice(board))]
    for section in sections(board):
        parts += [
            f"## {_escaped(section.title)}",
            _escaped(section.sentence),
            *([_listing(section.findings)] if section.findings else []),
            _escaped(section.summary),
            *(
                part
                for ranking in section.rankings
                for part in (f"### Standings, {ranking.title}", _markdown(ranking.rows))
            ),
            "### All cells",
            _markdown(section.cells),
        ]
    if others := disclosed.rows(board):
        parts += [f"## {disclosed.TITLE}", *map(_escaped, disclosed.sentences(board)), _markdown(others)]
        parts += [_listing(f"{name}: {text}." for name, text in disclosed.meanings(board).items())]
    if board.reported:
        parts += ["## Reported in papers, not measured here", _markdown(reported_rows(board))]
    parts += ["## Verdicts", _listing(f"{name}: {text}." for name, text in verdicts(board).items())]
    parts += ["## Columns", _listing(f"{name}: {text}." for name, text in columns(board).items())]
    parts += ["## Notes", _listing(board.notes)]
    return "\n\n".join(parts) + "\n"


def _listing(texts: Iterable[str]) -> str:
    return "\n".join(f"- {_escaped(text)}" for text in texts)


def _markdown(rows: Sequence[Row]) -> str:
    names = filled(rows)
    return tabulate(
        [[_escaped(row.values[name].text) for name in names] for row in rows],
        headers=names,
        tablefmt="pipe",
        disable_numparse=True,
        colalign=["left" if name in TEXT else "right" for name in names],
    )


def _escaped(text: str) -> str:
    """Text that GitHub shows as it is; underscores inside words are no markup, and stay readable."""
    plain = re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|\[\]~$]|(?<!\w)_|_(?!\w))", r"\\\1", plain)


def filled(rows: Sequence[Row]) -> list[str]:
    """Headings of the columns that are not empty throughout."""
    return [name for name in (rows[0].values if rows else ()) if any(row.values[name].text for row in rows)]


def print_table(board: Board, console: Console) -> None:
    """Standings per server, the cells of a small board, notes; a narrow terminal gets fewer columns, and is told."""
    whole = len(board.entries) <= PRINTED
    left_out: dict[str, None] = {}
    for sentence in advice(board):
        console.print(printable(f"{sentence}\n"), markup=False, highlight=False)
    for section in sections(board):
        lines = [f"{section.title}.", section.sentence, *section.findings, section.summary, ""]
        console.print(printable("\n".join(lines)), markup=False, highlight=False)
        for ranking in section.rankings:
            title = f"Standings, {ranking.title}, rank 1 leaks least"
            left_out |= dict.fromkeys(_print(title, ranking.rows, (), console))
        if whole:
            left_out |= dict.fromkeys(_print("All cells", section.cells, ("model", "defence", "mask ratio"), console))
    left_out |= dict.fromkeys(_print_disclosed(board, console))
    if not whole:
        console.print(f"All {len(board.entries)} cells are in the report.", highlight=False)
    if left_out:
        missed = list(left_out)[::-1]  # the last are those that a reader misses most
        more = f" and {len(missed) - NAMED} more" if len(missed) > NAMED else ""
        named = f"{', '.join(missed[:NAMED])}{more}"
        console.print(f"Left out for want of width: {named}. The report has every column.\n")
    for note in board.notes:
        console.print(printable(f"- {note}"), highlight=False, markup=False, soft_wrap=True)


def _print_disclosed(board: Board, console: Console) -> list[str]:
    """Print what leaks besides pictures, if anything was tried; the columns that are left out."""
    others = disclosed.rows(board)
    if not others:
        return []
    for sentence in disclosed.sentences(board):
        console.print(printable(f"{sentence}\n"), markup=False, highlight=False)
    left_out = _print(disclosed.TITLE, others, ("model", "defence"), console)
    console.print(printable(f"{disclosed.answer(board)}\n"), markup=False, highlight=False)
    return left_out


def _print(title: str, rows: Sequence[Row], groups: Sequence[str], console: Console) -> list[str]:
    """Print what fits, rows of one group together; the columns that are left out."""
    names = [name for name in filled(rows) if name not in COUNTS or any(row.values[name].order for row in rows)]
    widths = {name: max(cell_len(text) for text in (name, *(row.values[name].text for row in rows))) for name in names}
    left_out: list[str] = []
    for name in DISPENSABLE:
        if sum(widths.values()) + GAP * len(widths) + 1 <= console.width:
            break
        if name in widths:
            left_out.append(name)
            del widths[name]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in widths:
        table.add_column(name, justify="left" if name in TEXT else "right", no_wrap=True)
    for _, together in itertools.groupby(rows, key=lambda row: [row.values[name].text for name in groups]):
        table.add_section()
        for row in together:
            table.add_row(
                *(escape(printable(row.values[name].text)) for name in widths), style="dim" if row.dim else ""
            )
    console.print(table)
    return left_out
