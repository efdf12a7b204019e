"""How long a large leaderboard takes: reading the store, computing the board, writing it.

``python -m fedmjp.benchmarks.performance.leaderboard --trials 100000 --json FILE``

200 cells of synthetic trials in a real store; nothing is attacked. Figures are wall-clock seconds on
the machine that the file names.
"""

import itertools
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from fedmjp import provenance
from fedmjp.benchmarks.folder.ledger import Ledger
from fedmjp.benchmarks.folder.store import Store, Trial
from fedmjp.benchmarks.leaderboard.board import board_of
from fedmjp.benchmarks.leaderboard.entries import reported_in
from fedmjp.benchmarks.performance.store import filler
from fedmjp.benchmarks.plan.cells import Cell, PlannedCell
from fedmjp.benchmarks.report.publish import FORMATS, publish
from fedmjp.benchmarks.scripts import Json, keep_figures, timed
from fedmjp.metrics import RECOGNISABLE
from fedmjp.running import run_function
from fedmjp.scenario import Scenario
from fedmjp.seeds import numpy_generator
from fedmjp.settings import Setting

MODELS = 10
ATTACKS = ("grey", "naive", "strong", "adapted", "weak")
ARMS = tuple(itertools.product((Scenario(defences=()), Scenario(defences="mjp")), (Setting.A, Setting.C)))
CELLS = MODELS * len(ATTACKS) * len(ARMS)
METRICS = ("mse", "psnr", "ssim", "fft2d", "lpips_alex")
MASK_RATIO = 0.27


def main(
    json: Json,
    trials: Annotated[int, typer.Option(min=2 * CELLS, help=f"Spread over {CELLS} cells.")] = 100_000,
) -> None:
    """Fill a store, then time what a user waits for."""
    environment = provenance.environment()
    ledger = synthetic_ledger(trials // CELLS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        store = Store.at(folder / "trials.sqlite")
        store.put(synthetic_trials(ledger, environment))
        frame, reading = timed(partial(store.frame, ledger.trials["key"]))
        board, computing = timed(
            lambda: board_of(ledger, frame, store.environments(), reported=reported_in(["mjp_table5"]))
        )
        store.close()
        written, writing = timed(partial(publish, board, folder, formats=FORMATS, pictures=None))
        sizes = {path.name: path.stat().st_size for path in written if path.parent == folder}
    taken = {"store": reading, "board": computing, "files": writing, "all": reading + computing + writing}
    seconds = {name: round(duration, 2) for name, duration in taken.items()}
    keep_figures(json, {"trials": len(ledger.trials), "cells": CELLS, "seconds": seconds, "bytes": sizes}, {})


def synthetic_ledger(pictures: int) -> Ledger:
    """The plan: every attack on every model, with and without MJP, in settings a and c, as scenarios are planned."""
    arms = [(scenario.in_setting(setting, MASK_RATIO), setting) for scenario, setting in ARMS]
    cells = tuple(
        PlannedCell(
            Cell(
                model=f"model{model}",
                weights="untrained",
                defences=scenario.defences,
                mask_ratio=scenario.pipeline.mask_ratio,
                attack=attack,
                role="floor" if attack == "grey" else "attack",
                setting=setting,
                protocol="float",
                threat=scenario.threat,
            ),
            refusal=None,
            left_out=0,
            adapted=attack == "adapted" and "masked" in scenario.pipeline.marks,
            caveat=None,
            upload_bytes=88_000_000,
        )
        for model, attack, (scenario, setting) in itertools.product(range(MODELS), ATTACKS, arms)
    )
    rows = pd.DataFrame(
        [
            (f"{cell:03d}-{picture:05d}", cell, f"class/{picture:05d}")
            for cell in range(CELLS)
            for picture in range(pictures)
        ],
        columns=["key", "cell", "picture"],
    )
    return Ledger(_about(), cells, rows.assign(picture_sha256=rows["picture"], seed=0, stem=""))


def _about() -> dict[str, Any]:
    return {
        "name": "performance",
        "title": "Synthetic trials",
        "question": "How long does a large leaderboard take?",
        "config": {},
        "config_sha256": "",
        "data": "synthetic",
        "metrics": list(METRICS),
        "uploads": "none",
        "recognisable_at": RECOGNISABLE,
        "utility": {},
        "keep": "none",
        "reported": ["mjp_table5"],
        "skipped": [],
        "notes": [],
        "command": "",
    }


def synthetic_trials(ledger: Ledger, environment: Mapping[str, Any]) -> list[Trial]:
    """Scores around a level of each cell: the guess, or what an attack without and with the defence might reach."""
    generator = numpy_generator(0, "performance of the leaderboard")
    levels = np.array([_level(planned.cell) for planned in ledger.cells])[ledger.trials["cell"]]
    psnr = levels + generator.normal(size=len(levels))
    others = generator.uniform(size=(len(levels), len(METRICS) - 2))
    scores = np.column_stack([10 ** (-psnr / 10), psnr, others])
    return [
        filler(
            row["key"],
            environment,
            **ledger.cells[row["cell"]].cell.columns,
            picture=row["picture"],
            picture_sha256=row["picture_sha256"],
            scores=dict(zip(METRICS, map(float, values), strict=True)),
        )
        for row, values in zip(ledger.trials.to_dict("records"), scores, strict=True)
    ]


def _level(cell: Cell) -> float:
    if cell.role == "floor" or cell.attack == "weak":
        return 12.5
    if not cell.defences:
        return 40.0
    return 12.7 if cell.attack == "naive" else 18.0


if __name__ == "__main__":
    run_function(main)
