"""A board in a terminal, whatever its width: the whole, or a short answer."""

import itertools
from collections.abc import Iterable, Sequence

import pandas as pd
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import exactly, headline
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.report.advice import write_advice
from fedmjp.benchmarks.report.columns import TEXT, filled
from fedmjp.benchmarks.report.front import disclosed_answer
from fedmjp.benchmarks.report.legend import (
    ADDED_HEADING,
    AGAINST_CHANCE,
    AGAINST_HEADING,
    AGAINST_NONE,
    DISCLOSED,
    FEATURE_ERROR,
    LEAKAGE_HEADING,
)
from fedmjp.benchmarks.report.tables import Report
from fedmjp.metrics import EXACT
from fedmjp.texts import printable

# Columns that a narrow terminal leaves out, in this order.
DISPENSABLE = (
    "protocol", "reason", "upload", "attack s", "n", "rank 5, other crop", "rank 5", "rank 1, other crop",
    AGAINST_NONE, "members known", "server sees", "setting", AGAINST_CHANCE, FEATURE_ERROR,
    "MSE", "FFT2D", "p95", LEAKAGE_HEADING, "over grey, dB", "top-1 %", "LPIPS", "SSIM",
    "worst", "recognisable", "failed", "flat", "weights", ADDED_HEADING, AGAINST_HEADING, "strongest attack",
    "mask ratio",
)  # fmt: skip
PRINTED = 40  # entries up to which a terminal gets all cells
COUNTS = ["failed", "flat"]  # columns that are left out where all counts are 0
NAMED = 4  # columns that are named as left out
GAP = 2  # between columns


def print_table(report: Report, console: Console) -> None:
    """Print standings per server, the cells of a small board, and notes; say which columns did not fit.

    Args:
        report: A board's report.
        console: The terminal.
    """
    board, left_out = report.board, list[str]()
    whole = len(board.entries) <= PRINTED
    _print_sentences(write_advice(board), console)
    for section in report.sections:
        lines = [f"{section.title}.", section.sentence, *section.findings, section.summary]
        _print_sentences(["\n".join(lines)], console)
        for title, table in section.rankings.items():
            left_out += _print(report, f"Standings, {title}, rank 1 leaks least", table, (), console)
        if whole:
            left_out += _print(report, "All cells", section.cells, ("model", "defence", "mask ratio"), console)
    if not report.disclosed.empty:
        _print_sentences(report.disclosed_sentences, console)
        left_out += _print(report, DISCLOSED, report.disclosed, ("model", "defence"), console)
        _print_sentences([disclosed_answer(board)], console)
    if board.claims:
        attacks = f"{len(board.claims)} {'claim' if len(board.claims) == 1 else 'claims'}"
        console.print(
            f"{attacks} of third parties, not measured here, {'is' if len(board.claims) == 1 else 'are'} "
            "in the report, apart.\n",
            highlight=False,
        )
    if not whole:
        console.print(f"All {len(board.entries)} cells are in the report.", highlight=False)
    if left_out:
        missing = list(dict.fromkeys(left_out))[::-1]  # the last are those that a reader misses most
        rest_count = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        console.print(
            f"Left out for want of width: {', '.join(missing[:NAMED])}{rest_count}. The report has every column.\n"
        )
    for note in board.notes:
        console.print(printable(f"- {note}"), highlight=False, markup=False, soft_wrap=True)


def _print_sentences(sentences: Iterable[str], console: Console) -> None:
    for sentence in sentences:
        console.print(printable(f"{sentence}\n"), markup=False, highlight=False)


def _print(report: Report, title: str, table: pd.DataFrame, groups: Sequence[str], console: Console) -> list[str]:
    """Print the columns that fit, rows of one group together; return those that are left out."""
    table = filled(table)
    zeros = [name for name in COUNTS if name in table and not any(text.order for text in table[name])]
    table = table.drop(columns=zeros)
    widths = {name: max(map(cell_len, (name, *table[name]))) for name in map(str, table)}
    left_out: list[str] = []
    for name in DISPENSABLE:
        if sum(widths.values()) + GAP * len(widths) + 1 <= console.width:
            break
        if name in widths:
            left_out.append(name)
            del widths[name]
    columns = [Column(name, justify="left" if name in TEXT else "right", no_wrap=True) for name in widths]
    printed = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    roles = report.frame.loc[table.index, "role"]
    members = zip(table.to_dict("records"), roles, strict=True)
    for _, rows in itertools.groupby(members, key=lambda member: [member[0][name] for name in groups]):
        printed.add_section()
        for row, role in rows:
            texts = (Text(printable(row[name])) for name in widths)
            printed.add_row(*texts, style="" if role == "attack" else "dim")
    console.print(printed)
    return left_out


def print_answer(board: Board, console: Console) -> None:
    """Print how many pictures each attack recovers exactly, and the sentences of ``advice``.

    Args:
        board: A board.
        console: The terminal.
    """
    names, figures = ("model", "defence", "attack"), ("uploads of a picture", "recovered exactly", "median PSNR, dB")
    headings: list[str | Column] = [*names, *(Column(name, justify="right") for name in figures)]
    table = Table(*headings, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for entry in select_answers(board):
        uploads = str(entry.threat.uploads_per_picture)
        cells = (entry.model, entry.defence, entry.attack, uploads, exactly(entry), f"{headline(entry)[1]:.1f}")
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)
    meaning = f"Exactly: {EXACT:g} dB or more against the private picture, where everything is in its place."
    _print_sentences([meaning, *write_advice(board)], console)


def select_answers(board: Board) -> list[BoardEntry]:
    """Select the strongest attack on each undefended model from one upload, then every attack on a defence.

    Args:
        board: A board.
    """
    attacks = [entry for entry in board.reproduced.revealing("pictures").entries if entry.role == "attack" and entry.n]
    undefended = [entry for entry in attacks if not entry.defences and entry.threat.uploads_per_picture == 1]
    strongest = [max(group, key=_as_printed) for group in grouped(undefended, lambda entry: entry.model).values()]
    return [*strongest, *(entry for entry in attacks if entry.defences)]


def _as_printed(entry: BoardEntry) -> tuple[float, float]:
    """Round the median as it is printed: of attacks that print the same figures the first one stays."""
    share, median = headline(entry)
    return share, round(median, 1)
