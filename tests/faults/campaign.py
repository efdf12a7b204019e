"""Whether a campaign loses a trial, or counts one twice, when its workers are killed at random.

``python -m tests.faults.campaign --database URL --output FOLDER``. Workers, all on this machine, do
what
`fedmjp campaign work` does, each in a process of its own; the PostgreSQL database is empty at first. They are killed
(SIGKILL) at random moments of the campaign, one after another, and another begins in the place of each. A row per kill.
In the end nobody is killed any more, and

- every planned trial stands in the database once, finished,
- its scores are, to the last bit, those of the same campaign in one process that nobody kills,
- the pictures in the database are, byte for byte, the files that this process keeps.

The exit code is 1 if something of this does not hold, or a worker ended otherwise than it should.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
import yaml

from fedmjp.benchmarks.campaign.file import read_campaign
from fedmjp.benchmarks.campaign.prepare import Prepared, prepare
from fedmjp.benchmarks.campaign.shared import SharedCampaign
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.queue import Queue
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.folder.stored_pictures import StoredPictures
from fedmjp.benchmarks.running.leasing import offer, work_off
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.runner import run_campaign
from fedmjp.benchmarks.scripts import keep_table
from fedmjp.errors import BadInputError
from fedmjp.running import run_function
from fedmjp.seeds import numpy_generator

# Workers are forked from a process that has imported what they need: kills fall into work, not into imports.
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["fedmjp.benchmarks.running.leasing", "fedmjp.benchmarks.scripts"])
CAMPAIGN = {
    "name": "campaign_kills",
    "data": {"pictures": 4},
    "image_size": 64,
    "patch_size": 8,
    "metrics": ["mse", "psnr", "ssim"],
    "grids": [
        {
            "models": ["deit_micro"],
            "defences": ["none", "mjp", "round"],
            "attacks": ["patch_embedding", "patch_embedding_wiener", "mjp_prior", "grey"],
        }
    ],
}
HELD = "every trial is there once, with the scores and pictures of a run that nobody disturbed"
POLL_SECONDS = 0.05
LONGEST_PAUSE = 1.0  # seconds from a number of finished trials, drawn at random, to the kill


def main(
    database: Annotated[str, typer.Option(help="Of an empty PostgreSQL database.", metavar="URL")],
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")] = Path(
        "results/campaign_kills"
    ),
    kills: Annotated[int, typer.Option(help="Workers to kill.", min=0)] = 100,
    workers: Annotated[int, typer.Option(help="At work at any time.", min=1)] = 8,
    weights: Annotated[int, typer.Option(help="Draws of weights, six jobs each.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Of moments and victims.", min=0)] = 0,
) -> None:
    """Work, kill, and compare."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of all processes that are started: sums depend on it
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "campaign.yaml"
        file.write_text(yaml.safe_dump({**CAMPAIGN, "seeds": list(range(weights))}))
        prepared = prepare(read_campaign(file), device="cpu", command="")
        store = Store.open(database)
        if store.counts():
            raise BadInputError("the database holds trials; name an empty one")
        offer(prepared, store=store, queue=Queue(store), device="cpu", arithmetic="float32")
        began = time.monotonic()
        crew = _Crew(database, workers)
        try:
            table = pd.DataFrame(crew.play(numpy_generator(seed, "kills"), kills, len(prepared.plan.trials)))
        finally:
            crew.end()
        seconds = round(time.monotonic() - began)
        undisturbed = OutputFolder(Path(scratch) / "undisturbed")
        undisturbed.prepare(fresh=False)
        run_campaign(prepared, undisturbed, RunProgress(), database="", workers=1, ray="")
        wrong = crew.wrong + differences(prepared, store, undisturbed)
    about = {
        "kills": len(table),
        "workers": workers,
        "trials": len(prepared.plan.trials),
        "seconds": seconds,
        "processes": crew.begun,
        "wrong": wrong,
    }
    keep_table(output, table, about)
    typer.echo(f"{len(table)} kills of {workers} workers, {about['trials']} trials, {seconds} s")
    typer.echo("; ".join(wrong) or HELD)
    raise typer.Exit(1 if wrong else 0)


class _Crew:
    """Workers, each in its place."""

    def __init__(self, database: str, workers: int) -> None:
        self._database, self._store = database, Store.open(database)
        self.begun, self.wrong = 0, list[str]()
        self._places = [self._begin() for _ in range(workers)]

    def play(self, drawn: np.random.Generator, kills: int, trials: int) -> Iterator[dict[str, Any]]:
        """Kill so many, then wait until the others are done; a row for each kill."""
        began = time.monotonic()
        for kill, due in enumerate(sorted(drawn.integers(0, trials, kills)), 1):
            while self._finished() < due:
                time.sleep(POLL_SECONDS)
            time.sleep(drawn.uniform(0, LONGEST_PAUSE))
            place = int(drawn.integers(len(self._places)))
            victim = self._places[place]
            held, finished = self._held_by(victim), self._finished()
            victim.kill()
            victim.join()
            seconds = round(time.monotonic() - began, 2)
            yield {"kill": kill, "seconds": seconds, "worker": place, "job": held, "finished": finished}
            self._places[place] = self._begin()
        for worker in self._places:
            worker.join()
            if worker.exitcode:
                self.wrong.append(f"a worker ended with {worker.exitcode}")

    def end(self) -> None:
        """Leave no process behind."""
        for worker in self._places:
            worker.kill()
            worker.join()

    def _begin(self) -> BaseProcess:
        self.begun += 1
        worker = PROCESSES.Process(target=_work, args=(self._database,))
        worker.start()
        return worker

    def _finished(self) -> int:
        return self._store.counts().get("ok", 0)

    def _held_by(self, worker: BaseProcess) -> int | None:
        """Which job it has; none between two jobs, or while it plans."""
        with self._store.transaction() as connection:
            query = "select number from jobs where status = 'leased' and worker like %(worker)s"
            row = connection.exec_driver_sql(query, {"worker": f"% {worker.pid}"}).first()
        return None if row is None else int(row[0])


def _work(database: str) -> None:
    torch.set_num_threads(1)
    store = Store.open(database)
    queue = Queue(store)
    work_off(SharedCampaign.read(queue.content()), store=store, queue=queue, progress=RunProgress())


def differences(prepared: Prepared, store: Store, undisturbed: OutputFolder) -> list[str]:
    """What of a campaign in a database differs from its run in one process, in words."""
    keys = sorted(trial.key for trial in prepared.plan.trials)
    disturbed, expected = store.trials(keys), undisturbed.store().trials(keys)
    wrong = []
    if [trial.key for trial in disturbed] != keys or store.counts() != {"ok": len(keys)}:
        wrong.append(f"of {len(keys)} trials the database holds {store.counts()}")
    if [trial.scores for trial in disturbed] != [trial.scores for trial in expected]:
        wrong.append("scores differ from those of one process")
    pictures, kept = StoredPictures(store), undisturbed.pictures
    with tempfile.TemporaryDirectory() as folder:
        pictures.copy(pictures.names(), Path(folder))
        if _files(Path(folder)) != _files(kept):
            wrong.append("pictures differ from those of one process")
    return wrong


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.png")}


if __name__ == "__main__":
    run_function(main)
