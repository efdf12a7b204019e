"""Benchmarks of campaigns: the store, the board, memory, and quickstart.

Rows per second of the store, at the start and at the end of many trials, and seconds to read them all.

``python benchmarks/performance/run.py store --trials 100000 --json FILE [--url URL]``

Writes to a SQLite file in a temporary folder, or to the empty database that the URL names.

How long a large leaderboard takes: reading the store, computing the board, writing it.

``python benchmarks/performance/run.py leaderboard --trials 100000 --json FILE``

200 cells of synthetic trials in a real store; nothing is attacked. Figures are wall-clock seconds on
the machine that the file names.

Whether a campaign's memory grows as trials go by: of its processes together, from its first minute to its last.

``python benchmarks/performance/run.py campaign_memory --campaign FILE --data FOLDER --output DIR --json FILE``

The campaign is run by its command. Memory that processes share counts once (PSS).

Seconds, memory and disk of `fedmjp quickstart`, all its processes together.

``python benchmarks/performance/run.py quickstart --json FILE``
"""

import hashlib
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from fedmjp import provenance
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.folder.trials import TrialResult
from fedmjp.benchmarks.leaderboard.board import board_of
from fedmjp.benchmarks.leaderboard.entries import read_reported
from fedmjp.benchmarks.performance.harness import Measurement, benchmark, proportional_memory
from fedmjp.benchmarks.plan.trial_plan import Cell, TrialPlan
from fedmjp.benchmarks.report.publish import FORMATS, publish
from fedmjp.benchmarks.scripts import timed
from fedmjp.errors import BadInputError, FedmjpError
from fedmjp.metrics import RECOGNISABLE
from fedmjp.scenario import Scenario
from fedmjp.seeds import numpy_generator
from fedmjp.settings import Setting

PUT = 16
STORED_METRICS = ("mse", "psnr", "ssim", "fft2d", "fft2d_magnitude", "lpips_alex", "lpips_vgg", "lpips_squeeze")
SEED = 0


@benchmark
def store(
    trials: Annotated[int, typer.Option(min=20 * PUT, help="How many.")] = 100_000,
    url: Annotated[str | None, typer.Option(help="An empty database instead of a SQLite file.", metavar="URL")] = None,
) -> Measurement:
    """Measure, print and write."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trials.sqlite"
        database = Store.at(path) if url is None else Store.open(url)
        if database.counts():
            raise BadInputError(f"{database.name} holds trials; name an empty database")
        figures: dict[str, Any] = _measure_store(database, trials)
        database.close()
        if url is None:
            figures["megabytes"] = round(path.stat().st_size / 1e6, 1)
    kind = "SQLite" if url is None else "PostgreSQL"
    return Measurement(figures, {"database": kind, "trials": trials, "batch": PUT})


def _measure_store(store: Store, trials: int) -> dict[str, float]:
    """Rows per second of the first and last tenth of the puts, and seconds of readings.

    Other work on the machine slows some puts down; ``last_to_first_put`` compares the fastest tenths of both.
    """
    environment = provenance.environment()
    chance = random.Random(SEED)  # noqa: S311 (filler, no secret)
    keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(trials)]
    seconds = []
    for start in range(0, trials, PUT):
        rows = [_stored_trial(key, environment, chance) for key in keys[start : start + PUT]]
        seconds.append(timed(partial(store.put, rows))[1])
    tenth = len(seconds) // 10
    first, last = seconds[:tenth], seconds[-tenth:]
    readings: dict[str, Callable[[], object]] = {
        "finished": partial(store.finished, keys),
        "frame": store.frame,
        "frame_of_keys": partial(store.frame, keys),
        "trials": partial(store.trials, keys),
        "counts": store.counts,
    }
    return {
        "rows_per_second_first_tenth": round(PUT / mean(first)),
        "rows_per_second_last_tenth": round(PUT / mean(last)),
        "last_to_first_put": round(quantiles(last, n=10)[0] / quantiles(first, n=10)[0], 2),
        **{f"{name}_seconds": round(timed(read)[1], 2) for name, read in readings.items()},
    }


def _filler(key: str, environment: Mapping[str, Any], **known: Any) -> TrialResult:
    """Make a finished trial of no attack, with what is known of it and anything else in the other columns."""
    columns = {
        "model": "deit_small",
        "defence": "mjp",
        "mask_ratio": 0.27,
        "attack": "gradient_matching",
        "setting": "a",
        "protocol": "float",
        "picture_sha256": key,
        "seed": SEED,
        "realised_ratio": 0.27,
        "weights_sha256": "0",
        "attack_seconds": 0.1,
        "diagnostics": {},
    }
    return TrialResult(key=key, status="ok", environment=environment, **{**columns, **known})


def _stored_trial(key: str, environment: Mapping[str, Any], chance: random.Random) -> TrialResult:
    return _filler(
        key,
        environment,
        picture=f"n01440764/ILSVRC2012_val_{chance.randrange(50_000):08}",
        realised_ratio=chance.random(),
        weights_sha256=key,
        attack_seconds=chance.random(),
        scores={metric: chance.random() for metric in STORED_METRICS},
        diagnostics={"iterations": 1000, "loss": [chance.random() for _ in range(20)], "restarts": 1},
    )


MODELS = 10
ATTACKS = ("grey", "naive", "strong", "adapted", "weak")
ARMS = tuple(itertools.product((Scenario(defences=()), Scenario(defences="mjp")), (Setting.A, Setting.C)))
CELLS = MODELS * len(ATTACKS) * len(ARMS)
METRICS = ("mse", "psnr", "ssim", "fft2d", "lpips_alex")
MASK_RATIO = 0.27


@benchmark
def leaderboard(
    trials: Annotated[int, typer.Option(min=2 * CELLS, help=f"Spread over {CELLS} cells.")] = 100_000,
) -> Measurement:
    """Fill a store, then time what a user waits for."""
    environment = provenance.environment()
    plan = synthetic_plan(trials // CELLS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        store = Store.at(folder / "trials.sqlite")
        store.put(synthetic_trials(plan, environment))
        frame, reading = timed(partial(store.frame, plan.trials["key"]))
        board, computing = timed(
            lambda: board_of(plan, frame, store.environments(), reported=read_reported(["mjp_table5"]))
        )
        store.close()
        written, writing = timed(partial(publish, board, folder, formats=FORMATS, pictures=None))
        sizes = {path.name: path.stat().st_size for path in written if path.parent == folder}
    taken = {"store": reading, "board": computing, "files": writing, "all": reading + computing + writing}
    seconds = {name: round(duration, 2) for name, duration in taken.items()}
    return Measurement({"trials": len(plan.trials), "cells": CELLS, "seconds": seconds, "bytes": sizes})


def synthetic_plan(pictures: int) -> TrialPlan:
    """Return the plan: every attack on every model, with and without MJP, in settings a and c."""
    arms = [(scenario.in_setting(setting, MASK_RATIO), setting) for scenario, setting in ARMS]
    cells = tuple(
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
            adapted=attack == "adapted" and "masked" in scenario.pipeline.marks,
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
    return TrialPlan(cells, rows.assign(picture_sha256=rows["picture"], seed=0, stem=""), _about())


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


def synthetic_trials(plan: TrialPlan, environment: Mapping[str, Any]) -> list[TrialResult]:
    """Scores around a level of each cell: the guess, or what an attack without and with the defence might reach."""
    generator = numpy_generator(0, "performance of the leaderboard")
    levels = np.array([_level(cell) for cell in plan.cells])[plan.trials["cell"]]
    psnr = levels + generator.normal(size=len(levels))
    others = generator.uniform(size=(len(levels), len(METRICS) - 2))
    scores = np.column_stack([10 ** (-psnr / 10), psnr, others])
    return [
        _filler(
            row["key"],
            environment,
            **plan.cells[row["cell"]].columns,
            picture=row["picture"],
            picture_sha256=row["picture_sha256"],
            scores=dict(zip(METRICS, map(float, values), strict=True)),
        )
        for row, values in zip(plan.trials.to_dict("records"), scores, strict=True)
    ]


def _level(cell: Cell) -> float:
    if cell.role == "floor" or cell.attack == "weak":
        return 12.5
    if not cell.defences:
        return 40.0
    return 12.7 if cell.attack == "naive" else 18.0


SAMPLE_SECONDS = 2.0
SPAN_SECONDS = 300.0  # samples of so long are one row
GIGABYTE = 1e9


@benchmark
def campaign_memory(
    campaign: Annotated[Path, typer.Option(help="The campaign's file.")],
    data: Annotated[Path, typer.Option(help="Folder of its pictures.", metavar="FOLDER")],
    output: Annotated[Path, typer.Option(help="Folder that its results go to.", metavar="DIR")],
    pictures: Annotated[int | None, typer.Option(min=1, help="So many instead of the file's.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that run its trials in a folder.")] = 1,
) -> Measurement:
    """Run the campaign and look at its memory all along."""
    command = [sys.executable, "-m", "fedmjp", "campaign", "run", str(campaign), f"data.source={data}"]
    command += [f"data.pictures={pictures}"] if pictures else []
    command += ["--output", str(output), "--workers", str(workers)]
    began = time.perf_counter()
    spans: dict[int, list[float]] = {}
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            passed = time.perf_counter() - began
            spans.setdefault(int(passed // SPAN_SECONDS), []).append(proportional_memory(process.pid) / GIGABYTE)
            time.sleep(SAMPLE_SECONDS)
    if process.returncode:
        raise FedmjpError(f"the campaign ended with exit code {process.returncode}; what it printed says why")
    rows = [
        {
            "minutes": number * SPAN_SECONDS / 60,
            "median_gb": round(median(samples), 3),
            "largest_gb": round(max(samples), 3),
        }
        for number, samples in spans.items()
    ]
    return Measurement({"minutes": round((time.perf_counter() - began) / 60, 1), "spans": rows})


QUICKSTART_SAMPLE = 0.5


@benchmark
def quickstart() -> Measurement:
    """Run quickstart once in a temporary folder and measure it from outside."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results"
        started, memory, disk = time.monotonic(), 0, 0
        with subprocess.Popen(
            [sys.executable, "-m", "fedmjp", "quickstart", "--output", str(output)], stdout=subprocess.DEVNULL
        ) as process:
            while process.poll() is None:
                memory = max(memory, proportional_memory(process.pid))
                disk = max(disk, _size(output))
                time.sleep(QUICKSTART_SAMPLE)
        if process.returncode:
            raise FedmjpError(f"quickstart ended with exit code {process.returncode}")
        figures = {
            "seconds": round(time.monotonic() - started, 1),
            "peak_memory_gb": round(memory / 1e9, 2),
            "peak_disk_gb": round(disk / 1e9, 2),
            "left_on_disk_gb": round(_size(output) / 1e9, 3),
        }
    return Measurement(figures, {"runs": 1})


def _size(folder: Path) -> int:
    """Bytes of all files below a folder that are there when they are looked at."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
