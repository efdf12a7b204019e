"""Everything that is made of a folder's trials: board, tables, page, manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from fedmjp.benchmarks.folder.output import OutputFolder, write_json
from fedmjp.benchmarks.folder.pictures import PictureFolder
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.folder.trials import RecordedTrials
from fedmjp.benchmarks.leaderboard.admission import read_submitted
from fedmjp.benchmarks.leaderboard.board import board_of
from fedmjp.benchmarks.leaderboard.entries import Board, read_reported
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.report.figure import write_figure
from fedmjp.benchmarks.report.page import Gallery, KeptPicture
from fedmjp.benchmarks.report.publish import FORMATS, publish
from fedmjp.benchmarks.report.tables import Report
from fedmjp.benchmarks.report.terminal import print_answer, print_table, select_answers
from fedmjp.benchmarks.running.retention import extremes

FIGURE = "reconstructions.jpg"


def render(
    plan: TrialPlan,
    store: Store,
    output: OutputFolder,
    console: Console,
    *,
    figure: bool = False,
    short: bool = False,
) -> pd.DataFrame:
    """Write leaderboard in every format and manifest into the output folder, and print the table.

    Args:
        plan: The planned trials.
        store: The recorded trials.
        output: The folder.
        console: The terminal.
        figure: Whether to draw the reconstructions, if there are any.
        short: Whether to print and draw what ``select_answers`` selects.

    Returns:
        The failed trials, as rows of ``Store.frame``.
    """
    trials = _trials(plan, store)
    board = board_in(plan, store, output.root)
    write_json(output.root / "manifest.json", board.about)
    publish(board, output.root, formats=FORMATS, pictures=gallery_in(plan, store, board, output))
    if short:
        print_answer(board, console)
    else:
        print_table(Report(board), console)
    if figure:
        drawn = [trial for trial in plan.tasks if trial.cell.reveals == "pictures"]
        if short:
            picked = [trial for entry in select_answers(board) for trial in drawn if trial.cell == entry.cell]
            drawn = picked or drawn  # where nothing came back, the figure says so of all
        attacked = store.trials([trial.key for trial in drawn])
        if drawn:
            write_figure(drawn, attacked, output.pictures, output.root / FIGURE)
    return trials[trials["status"] == "failed"]


def board_in(plan: TrialPlan, store: RecordedTrials, folder: Path) -> Board:
    """Make the leaderboard of a folder of results, with what papers report and third parties submitted.

    Args:
        plan: The planned trials.
        store: The recorded trials.
        folder: The folder.
    """
    submitted = read_submitted(folder)
    return board_of(
        plan,
        _trials(plan, store),
        store.environments(),
        reported=read_reported(plan.about["reported"]),
        submitted=submitted.entries,
        claims=submitted.claims,
    )


def gallery_in(plan: TrialPlan, store: RecordedTrials, board: Board, output: OutputFolder) -> Gallery:
    """Collect the kept pictures of each entry.

    Args:
        plan: The planned trials.
        store: The recorded trials.
        board: Their board.
        output: The folder.

    Returns:
        Pictures by the entry's id; fewer where files are missing.
    """
    if plan.about["keep"] == "none":
        return {}
    trials = plan.trials.merge(_trials(plan, store)[["key", "status", "scores"]], on="key")
    by_cell = dict(iter(trials.groupby("cell")))
    entries = [entry for entry in board.entries if entry.origin == "reproduced"]
    return {
        entry.id: _shown(plan, by_cell[index], output.kept) for index, entry in enumerate(entries) if index in by_cell
    }


def _shown(plan: TrialPlan, cell: pd.DataFrame, pictures: PictureFolder) -> tuple[KeptPicture, ...]:
    rows: dict[Any, dict[Any, Any]] = cell.set_index("key").to_dict("index")
    extremes_kept = []
    for label, key in extremes(cell).items():
        row = rows[key]
        original, shuffled, reconstruction = map(pictures.path, plan.files_of(row).values())
        if original.exists() and reconstruction.exists():
            psnr = row["scores"]["psnr"]
            extremes_kept.append(KeptPicture(label, row["picture"], psnr, original, shuffled, reconstruction))
    return tuple(extremes_kept)


def _trials(plan: TrialPlan, store: RecordedTrials) -> pd.DataFrame:
    return store.frame(plan.trials["key"].tolist())
