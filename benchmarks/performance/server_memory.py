"""What a server takes as its clients become more: peak memory of its process, and rounds per minute.

``python -m fedmjp.benchmarks.performance.server_memory --json FILE``

Real simulations of Flower, in which every client computes the gradient of one picture of noise. The server's process
holds Flower's engine as well. Its memory is looked at four times a second.
"""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import psutil
import typer
from PIL import Image

from fedmjp.benchmarks.federation.resources import resources_for
from fedmjp.benchmarks.federation.training import deal, train_federated
from fedmjp.benchmarks.scripts import Json, keep_figures
from fedmjp.running import run_function
from fedmjp.scenario import TrainingScenario
from fedmjp.seeds import numpy_generator
from fedmjp.training.run_folder import TrainingFolder

SERVER = "flwr-simulation"  # the program of Flower that runs the server
SAMPLE_SECONDS = 0.25


class Case(NamedTuple):
    """A federation to measure."""

    model: str
    image_size: int
    patch_size: int
    clients: int


CASES = [
    *(Case("deit_micro", 32, 4, clients) for clients in (8, 100, 1000)),
    *(Case("deit_small", 224, 16, clients) for clients in (8, 100)),
]
CLASSES = 2
VALIDATED = 2  # pictures of a class: the server's time is to go into updates


def main(
    json: Json,
    rounds: Annotated[int, typer.Option(min=2, help="The first counts for memory alone.")] = 3,
    model: Annotated[str, typer.Option(help="Only the federations of this model; all by default.")] = "",
) -> None:
    """Play the federations one after another."""
    chosen = [case for case in CASES if model in ("", case.model)]
    measured = [measure(case, rounds) for case in chosen]
    keep_figures(json, {"federations": measured}, {"rounds": rounds})


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One federation's figures."""
    network = {"name": case.model, "image_size": case.image_size, "patch_size": case.patch_size, "classes": CLASSES}
    recipe = {"batch_size": 1, "warmup_epochs": 0, "repeats": 1}
    training = {"recipe": recipe, "rounds": rounds, "strategy": "fedsgd", "max_norm": 0}
    with tempfile.TemporaryDirectory() as scratch, watched() as peaks:
        data = draw_pictures(Path(scratch) / "pictures", case.clients)
        scenario = TrainingScenario.parse(
            {"model": network, "data": data, "device": "cpu", "clients": case.clients, "training": training}
        )
        folder = TrainingFolder(Path(scratch) / "run")
        folder.root.mkdir()
        _, dealt = deal(scenario)
        dealt.save(folder.partition)
        train_federated(scenario, dealt, folder, resources_for(scenario, gpus_per_client=None))
        history = pd.read_csv(folder.history)
    figures = {
        **case._asdict(),
        "upload_megabytes": round(float(history["upload_bytes"].iloc[0]) / 1e6, 2),
        "answered": history["clients"].tolist(),
        "server_peak_gigabytes": round(max(peaks) / 1e9, 2),
        "rounds_per_minute": round(60 / median(history["seconds"].iloc[1:]), 2),
    }
    typer.echo(figures)
    return figures


def draw_pictures(folder: Path, count: int) -> str:
    """Make a folder of pictures of noise, so many to train on."""
    generator = numpy_generator(0, "noise")
    for split, of_class in (("train", -(-count // CLASSES)), ("validation", VALIDATED)):
        for label in range(CLASSES):
            place = folder / split / str(label)
            place.mkdir(parents=True)
            for number in range(of_class):
                Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return str(folder)


@contextmanager
def watched() -> Iterator[list[int]]:
    """A list that the memory of every server below this process is added to, while the block runs."""
    peaks, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            peaks.append(sum(map(server_memory, psutil.Process().children(recursive=True))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()


def server_memory(process: psutil.Process) -> int:
    """Bytes that a process holds if it is a server; 0 otherwise."""
    try:
        is_server = any(Path(word).name == SERVER for word in process.cmdline()[:2])
        return int(process.memory_info().rss) if is_server else 0
    except psutil.Error:
        return 0


if __name__ == "__main__":
    run_function(main)
