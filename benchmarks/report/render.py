"""Everything that is made of a folder's trials: board, tables, page, manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console

from fedmjp.benchmarks.folder.ledger import Ledger
from fedmjp.benchmarks.folder.output import OutputFolder, write_json
from fedmjp.benchmarks.folder.store import RecordedTrials, Store
from fedmjp.benchmarks.leaderboard.admission import submitted
from fedmjp.benchmarks.leaderboard.board import board_of
from fedmjp.benchmarks.leaderboard.entries import Board, reported_in
from fedmjp.benchmarks.report.figure import write_figure
from fedmjp.benchmarks.report.page import Gallery, Shown
from fedmjp.benchmarks.report.publish import FORMATS, publish
from fedmjp.benchmarks.report.tables import Report
from fedmjp.benchmarks.report.terminal import print_answer, print_table, select_answers
from fedmjp.benchmarks.running.retention import extremes

if TYPE_CHECKING:
    from fedmjp.benchmarks.plan.experiment import Plan

FIGURE = "reconstructions.jpg"


def render(
    ledger: Ledger,
    store: Store,
    output: OutputFolder,
    console: Console,
    figure_of: Plan | None = None,
    *,
    short: bool = False,
) -> pd.DataFrame:
    """Write leaderboard in every format and manifest into the output folder, and print the table.

    The plan of a single experiment adds a figure of all its reconstructions, if there are any. A short answer prints,
    and draws, what ``answers`` picks.

    Returns:
        The failed trials, as rows of ``Store.frame``.
    """
    trials = _trials(ledger, store)
    board = board_in(ledger, store, output.root)
    write_json(output.root / "manifest.json", board.about)
    publish(board, output.root, formats=FORMATS, pictures=gallery_in(ledger, store, board, output))
    if short:
        print_answer(board, console)
    else:
        print_table(Report(board), console)
    if figure_of:
        drawn = [trial for trial in figure_of.trials if trial.cell.reveals == "pictures"]
        if short:
            picked = [trial for entry in select_answers(board) for trial in drawn if trial.cell == entry.cell]
            drawn = picked or drawn  # where nothing came back, the figure says so of all
        attacked = store.trials([trial.key for trial in drawn])
        if drawn:
            write_figure(drawn, attacked, output.pictures, output.root / FIGURE)
    return trials[trials["status"] == "failed"]


def board_in(ledger: Ledger, store: RecordedTrials, folder: Path) -> Board:
    """The leaderboard of a folder of results, with what papers report and third parties submitted."""
    return board_of(
        ledger,
        _trials(ledger, store),
        store.environments(),
        reported=reported_in(ledger.about["reported"]),
        submitted=submitted(folder),
    )


def gallery_in(ledger: Ledger, store: RecordedTrials, board: Board, output: OutputFolder) -> Gallery:
    """The kept pictures of each entry; fewer where files are missing."""
    if ledger.about["keep"] == "none":
        return {}
    trials = ledger.trials.merge(_trials(ledger, store)[["key", "status", "scores"]], on="key")
    by_cell = dict(iter(trials.groupby("cell")))
    entries = [entry for entry in board.entries if entry.origin == "reproduced"]
    return {
        entry.id: _shown(ledger, by_cell[index], output.pictures)
        for index, entry in enumerate(entries)
        if index in by_cell
    }


def _shown(ledger: Ledger, cell: pd.DataFrame, pictures: Path) -> tuple[Shown, ...]:
    rows: dict[Any, dict[Any, Any]] = cell.set_index("key").to_dict("index")
    shown = []
    for label, key in extremes(cell).items():
        row = rows[key]
        original, shuffled, made = (pictures / name for name in ledger.files_of(row).values())
        if original.exists() and made.exists():
            shown.append(Shown(label, row["picture"], row["scores"]["psnr"], original, shuffled, made))
    return tuple(shown)


def _trials(ledger: Ledger, store: RecordedTrials) -> pd.DataFrame:
    return store.frame(ledger.trials["key"].tolist())
