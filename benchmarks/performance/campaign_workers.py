"""Trials per second of a campaign that workers share through PostgreSQL, against one process with a file.

``python -m fedmjp.benchmarks.performance.campaign_workers --database URL --json FILE``. Workers are processes of this
machine, each with one thread. They plan first. Then all begin at once, and time counts until the last has ended.
Processor seconds per trial say what leasing costs however busy the machine is; those of the database are not counted.
"""

import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
import yaml

from fedmjp.benchmarks.campaign.file import read_campaign
from fedmjp.benchmarks.campaign.prepare import Prepared, prepare
from fedmjp.benchmarks.campaign.shared import SharedCampaign
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.queue import Queue
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.running.leasing import offer, work_off
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.runner import run_campaign
from fedmjp.benchmarks.scripts import Json, keep_figures
from fedmjp.errors import BadInputError
from fedmjp.running import run_function

PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["fedmjp.benchmarks.running.leasing", "fedmjp.benchmarks.scripts"])
CAMPAIGN = {
    "name": "campaign_workers",
    "data": {"pictures": 8},
    "image_size": 64,
    "patch_size": 8,
    "metrics": ["mse", "psnr", "ssim"],
    "grids": [{"models": ["deit_tiny"], "attacks": ["patch_embedding", "patch_embedding_wiener", "mjp_prior", "grey"]}],
}


def main(
    database: Annotated[str, typer.Option(help="Of a PostgreSQL database that holds nothing else.", metavar="URL")],
    json: Json,
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "1,2,4,8",
    weights: Annotated[int, typer.Option(help="Draws of weights for each number of workers.", min=1)] = 4,
) -> None:
    """Time one process, then workers."""
    torch.set_num_threads(1)
    if Store.open(database).counts():
        raise BadInputError("the database holds trials; name an empty one")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "campaign.yaml"
        for place, number in enumerate([0, *map(int, workers.split(","))]):
            drawn = range(place * weights, (place + 1) * weights)  # trials that no former number has done
            file.write_text(yaml.safe_dump({**CAMPAIGN, "seeds": list(drawn)}))
            prepared = prepare(read_campaign(file), device="cpu", command="")
            name, trials = f"{number} leasing" if number else "one process", len(prepared.plan.trials)
            seconds, work = _leased(prepared, database, number) if number else _alone(prepared, Path(scratch))
            figures[name] = {
                "trials": trials,
                "trials_per_second": trials / seconds,
                "processor_seconds_per_trial": work / trials,
            }
    keep_figures(json, figures, {"load_average": psutil.getloadavg()})


def _alone(prepared: Prepared, scratch: Path) -> tuple[float, float]:
    output = OutputFolder(scratch / "alone")
    output.prepare(fresh=False)
    began, worked = time.monotonic(), time.process_time()
    run_campaign(prepared, output, RunProgress(), database="", workers=1, ray="")
    return time.monotonic() - began, time.process_time() - worked


def _leased(prepared: Prepared, database: str, number: int) -> tuple[float, float]:
    store = Store.open(database)
    offer(prepared, store=store, queue=Queue(store), device="cpu", arithmetic="float32")
    pipes, processes = [], []
    for _ in range(number):
        here, there = PROCESSES.Pipe()
        processes.append(PROCESSES.Process(target=_work, args=(database, there), daemon=True))
        processes[-1].start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    began = time.monotonic()
    for pipe in pipes:
        pipe.send(None)
    work = sum(float(pipe.recv()) for pipe in pipes)
    seconds = time.monotonic() - began
    for process in processes:
        process.join()
    return seconds, work


class _Told(RunProgress):
    """Says when a worker has planned, and waits until all have."""

    def __init__(self, line: "Connection[Any, Any]") -> None:
        self._line = line
        self.worked = 0.0

    def attacks(self, trials: int) -> None:
        """So many trials are about to be attacked and scored."""
        self._line.send(trials)
        self._line.recv()
        self.worked = time.process_time()


def _work(database: str, line: "Connection[Any, Any]") -> None:
    torch.set_num_threads(1)
    store, told = Store.open(database), _Told(line)
    queue = Queue(store)
    work_off(SharedCampaign.read(queue.content()), store=store, queue=queue, progress=told)
    line.send(time.process_time() - told.worked)


if __name__ == "__main__":
    run_function(main)
