"""Rows of a paper's table, as printed there, each with the nearest of ours beside it."""

from collections.abc import Sequence

import pandas as pd

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, BoardEntry, ReportedRow
from fedmjp.benchmarks.leaderboard.headline import headline
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.columns import NO_SCORE
from fedmjp.benchmarks.report.legend import write_heading
from fedmjp.benchmarks.report.numbers import CellText, empty, number
from fedmjp.defences.pipeline import NONE
from fedmjp.settings import Setting

BREACHING = "april_min_norm"  # computes what breaching's analytic attack does
NONE_NEAR = "nothing of ours comes near"


def reported_table(board: Board) -> pd.DataFrame:
    """Write the figures that papers report, each row with the nearest of ours beside it.

    Args:
        board: A board.

    Returns:
        A row per reported row, a column per heading; empty where nothing is reported.
    """
    names = list(dict.fromkeys(name for row in board.reported for name in row.metrics))
    return pd.DataFrame([_row(board, row, names) for row in board.reported], dtype=object)


def _row(board: Board, row: ReportedRow, names: Sequence[str]) -> dict[str, CellText]:
    nearest = find_nearest(board, row)
    printed = ("source", "row", "model", "defence", "attack", "setting")
    return {
        **{name: CellText(str(getattr(row, name))) for name in printed},
        "n": CellText(str(row.n), row.n),
        "top-1 %": number(row.top1, f"{row.top1}", "not reported"),
        **{write_heading(name): _printed(board, row, name) for name in names},
        "nearest of ours": CellText(_named(nearest)) if nearest else empty(NONE_NEAR),
        **{f"ours: {write_heading(name)}": _measured(nearest, name) for name in names},
        "differs": CellText(row.differs),
    }


def _measured(entry: BoardEntry | None, name: str) -> CellText:
    if entry is None or name not in entry.metrics:
        return empty(NO_SCORE if entry else NONE_NEAR)
    statistics = entry.metrics[name]
    return numbers.mean(statistics.mean, statistics.low, statistics.high, name)


def find_nearest(board: Board, row: ReportedRow) -> BoardEntry | None:
    """Find the entry that comes nearest a reported row: of the model that it names, same setting and defence.

    The paper's attack comes before others, and in setting a, where nothing is shuffled, a smaller mask ratio. Then the
    entry that revealed most.

    Args:
        board: The board.
        row: The reported row.

    Returns:
        None where nothing comes near.
    """
    candidates = [
        entry
        for entry in board.reproduced.entries
        if (entry.model, entry.setting) == (row.compares_with, row.setting)
        and _called(entry) == row.defence.casefold()
        and entry.role == "attack"
        and LEAKAGE in entry.metrics
    ]

    def nearness(entry: BoardEntry) -> tuple[bool, float, float, float]:
        same_attack = "breaching" in row.attack.casefold() and entry.attack == BREACHING
        shuffled = entry.mask_ratio if row.setting is Setting.A else 0.0
        return same_attack, -shuffled, *headline(entry)

    return max(candidates, key=nearness, default=None)


def _called(entry: BoardEntry) -> str:
    """Name the defence as papers do: to them a shuffled picture alone is an evaluation setting."""
    return NONE if entry.pipeline.marks == {"shuffled"} else entry.defence


def _named(entry: BoardEntry) -> str:
    defence = entry.defence + (f" at mask ratio {entry.mask_ratio:g}" if entry.mask_ratio else "")
    weights, n = numbers.weights(entry.weights), numbers.pictures(entry.n, entry.uploads)
    return f"{entry.model}, {defence}, {entry.attack}, {weights}, n = {n}"


def _printed(board: Board, row: ReportedRow, name: str) -> CellText:
    """Write a figure as it was printed, with the zeros at the end that JSON lost."""
    if name not in row.metrics:
        return empty("not reported")
    column = [
        reported.metrics[name]
        for reported in board.reported
        if reported.source == row.source and name in reported.metrics
    ]
    value = row.metrics[name]
    return CellText(f"{value:.{max(map(_decimals, column))}f}", value)


def _decimals(value: float) -> int:
    return len(f"{value:.10f}".rstrip("0").partition(".")[2])
