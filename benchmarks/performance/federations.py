"""Benchmarks of federations: the cost of Flower, and the memory of a server.

What Flower costs: seconds per round of a simulation against the same local training in bare processes.

``python benchmarks/performance/run.py federated_overhead --data FOLDER --classes 32 --json FILE``

Both train the same clients with the same number of processes and threads. The first round of each, in which
processes start and read the data set for the first time, is not counted.

What a server takes as its clients become more: peak memory of its process, and rounds per minute.

``python benchmarks/performance/run.py server_memory --json FILE``

Real simulations of Flower, in which every client computes the gradient of one picture of noise. The server's process
holds Flower's engine as well. Its memory is looked at four times a second.
"""

import multiprocessing
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import psutil
import torch
import typer
from PIL import Image

from fedmjp.benchmarks.federation.resources import resources_for
from fedmjp.benchmarks.federation.simulation import Resources
from fedmjp.benchmarks.federation.training import deal, train_federated
from fedmjp.benchmarks.performance.harness import Measurement, benchmark, sampled
from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import steps_per_epoch, training_epochs
from fedmjp.data.pictures import LabelledDataset
from fedmjp.models.build import build
from fedmjp.models.classifier import Classifier
from fedmjp.scenario import TrainingScenario
from fedmjp.seeds import derive, numpy_generator
from fedmjp.training.loop import Schedule, Trainer
from fedmjp.training.run_folder import TrainingFolder

Arrays = dict[str, np.ndarray]
CLIENTS = 8


@benchmark
def federated_overhead(
    data: Annotated[Path, typer.Option(help="A folder of pictures or parquet files.", metavar="FOLDER")],
    classes: Annotated[int, typer.Option(help="Of the pictures.")],
    rounds: Annotated[int, typer.Option(min=2, help="The first is not counted.")] = 4,
    local_epochs: Annotated[int, typer.Option(help="Of a client in a round.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Of a client.")] = 64,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> Measurement:
    """Measure, print and write."""
    recipe = {"batch_size": batch_size, "warmup_epochs": 0}
    scenario = TrainingScenario.parse(
        {
            "model": {"name": "deit_micro", "image_size": 64, "patch_size": 8, "classes": classes},
            "data": str(data.absolute()),
            "device": device,
            "clients": CLIENTS,
            "training": {"recipe": recipe, "rounds": rounds, "local_epochs": local_epochs},
        }
    )
    resources = resources_for(scenario, gpus_per_client=None)
    flower, bare = with_flower(scenario, resources), without_flower(scenario, resources)
    figures = {
        "flower_seconds_per_round": flower,
        "bare_seconds_per_round": bare,
        "flower_median": round(median(flower[1:]), 3),
        "bare_median": round(median(bare[1:]), 3),
        "ratio": round(median(flower[1:]) / median(bare[1:]), 3),
    }
    return Measurement(figures, {"config": scenario.published(), "resources": resources.sentence()})


def with_flower(scenario: TrainingScenario, resources: Resources) -> list[float]:
    """Seconds of each round, from the first message to the new weights."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = TrainingFolder(Path(scratch))
        _, dealt = deal(scenario)
        dealt.save(folder.partition)
        train_federated(scenario, dealt, folder, resources)
        return [float(seconds) for seconds in pd.read_csv(folder.history)["seconds"]]


def without_flower(scenario: TrainingScenario, resources: Resources) -> list[float]:
    """Time the same with a pool of processes."""
    _, dealt = deal(scenario)
    weights = {name: value.numpy() for name, value in build(scenario.network).state_dict().items()}
    seconds = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(resources.processes, torch.set_num_threads, (resources.cores,)) as pool:
        for server_round in range(1, scenario.rounds + 1):
            started = time.perf_counter()
            work = [(scenario, client, share, server_round, weights) for client, share in enumerate(dealt.shares)]
            trained = pool.starmap(_train, work, chunksize=1)
            weights = _mean(trained, [len(share) for share in dealt.shares])
            seconds.append(time.perf_counter() - started)
    return seconds


def _train(scenario: TrainingScenario, client: int, indices: np.ndarray, server_round: int, weights: Arrays) -> Arrays:
    training = scenario.training
    model, pictures = _prepared(scenario)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    steps = steps_per_epoch(len(indices), training.recipe)
    trainer = Trainer(
        model,
        training,
        scenario.pipeline,
        schedule=Schedule(training.rounds * training.local_epochs, steps),
        seed=scenario.seed,
        purpose=("client", client),
    )
    epochs = training_epochs(
        pictures,
        indices,
        training.recipe,
        size=scenario.model.image_size,
        seed=derive(scenario.seed, "client", client),
        epochs=range((server_round - 1) * training.local_epochs, server_round * training.local_epochs),
    )
    for epoch, batches in epochs:
        trainer.epoch(epoch, batches)
    return {name: value.cpu().numpy() for name, value in model.state_dict().items()}


@lru_cache(maxsize=1)
def _prepared(scenario: TrainingScenario) -> tuple[Classifier, LabelledDataset]:
    drop_path = scenario.training.recipe.drop_path
    model = build(scenario.network, drop_path=drop_path).to(torch.device(scenario.device))
    return model, open_dataset(scenario.data, "train", classes=scenario.model.classes)


def _mean(trained: list[Arrays], pictures: list[int]) -> Arrays:
    return {name: np.average([arrays[name] for arrays in trained], axis=0, weights=pictures) for name in trained[0]}


SERVER = "flwr-simulation"  # the program of Flower that runs the server
SAMPLE_SECONDS = 0.25


class FederationCase(NamedTuple):
    """A federation to measure."""

    model: str
    image_size: int
    patch_size: int
    clients: int


CASES = [
    *(FederationCase("deit_micro", 32, 4, clients) for clients in (8, 100, 1000)),
    *(FederationCase("deit_small", 224, 16, clients) for clients in (8, 100)),
]
NOISE_CLASSES = 2
VALIDATED = 2  # pictures of a class: the server's time is to go into updates


@benchmark
def server_memory(
    rounds: Annotated[int, typer.Option(min=2, help="The first counts for memory alone.")] = 3,
    model: Annotated[str, typer.Option(help="Only the federations of this model; all by default.")] = "",
) -> Measurement:
    """Play the federations one after another."""
    chosen = [case for case in CASES if model in ("", case.model)]
    measured = [_measure_federation(case, rounds) for case in chosen]
    return Measurement({"federations": measured}, {"rounds": rounds})


def _measure_federation(case: FederationCase, rounds: int) -> dict[str, Any]:
    """One federation's figures."""
    network = {
        "name": case.model,
        "image_size": case.image_size,
        "patch_size": case.patch_size,
        "classes": NOISE_CLASSES,
    }
    recipe = {"batch_size": 1, "warmup_epochs": 0, "repeats": 1}
    training = {"recipe": recipe, "rounds": rounds, "strategy": "fedsgd", "max_norm": 0}
    with tempfile.TemporaryDirectory() as scratch, sampled(_servers_memory, SAMPLE_SECONDS) as peaks:
        data = _draw_pictures(Path(scratch) / "pictures", case.clients)
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


def _draw_pictures(folder: Path, count: int) -> str:
    """Make a folder of pictures of noise, so many to train on."""
    generator = numpy_generator(0, "noise")
    for split, of_class in (("train", -(-count // NOISE_CLASSES)), ("validation", VALIDATED)):
        for label in range(NOISE_CLASSES):
            place = folder / split / str(label)
            place.mkdir(parents=True)
            for number in range(of_class):
                Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return str(folder)


def _server_memory(process: psutil.Process) -> int:
    """Bytes that a process holds if it is a server; 0 otherwise."""
    try:
        is_server = any(Path(word).name == SERVER for word in process.cmdline()[:2])
        return int(process.memory_info().rss) if is_server else 0
    except psutil.Error:
        return 0


def _servers_memory() -> int:
    """Add up the bytes of all servers below this process."""
    return sum(map(_server_memory, psutil.Process().children(recursive=True)))
