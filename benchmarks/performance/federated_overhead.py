"""What Flower costs: seconds per round of a simulation against the same local training in bare processes.

``python -m fedmjp.benchmarks.performance.federated_overhead --data FOLDER --classes 32 --json FILE``

Both train the same clients with the same number of processes and threads. The first round of each, in which
processes start and read the data set for the first time, is not counted.
"""

import multiprocessing
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer

from fedmjp.benchmarks.federation.resources import resources_for
from fedmjp.benchmarks.federation.simulation import Resources
from fedmjp.benchmarks.federation.training import deal, train_federated
from fedmjp.benchmarks.scripts import Json, keep_figures
from fedmjp.data.datasets import LabelledDataset, open_dataset
from fedmjp.data.loading import steps_per_epoch, training_epochs
from fedmjp.models.build import build
from fedmjp.models.classifier import Classifier
from fedmjp.running import run_function
from fedmjp.scenario import TrainingScenario
from fedmjp.seeds import derive
from fedmjp.training.loop import Schedule, Trainer
from fedmjp.training.run_folder import TrainingFolder, published

Arrays = dict[str, np.ndarray]
CLIENTS = 8


def main(
    json: Json,
    data: Annotated[Path, typer.Option(help="A folder of pictures or parquet files.", metavar="FOLDER")],
    classes: Annotated[int, typer.Option(help="Of the pictures.")],
    rounds: Annotated[int, typer.Option(min=2, help="The first is not counted.")] = 4,
    local_epochs: Annotated[int, typer.Option(help="Of a client in a round.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Of a client.")] = 64,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
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
    keep_figures(json, figures, {"config": published(scenario), "resources": resources.sentence()})


def with_flower(scenario: TrainingScenario, resources: Resources) -> list[float]:
    """Seconds of each round, from the first message to the new weights."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = TrainingFolder(Path(scratch))
        _, dealt = deal(scenario)
        dealt.save(folder.partition)
        train_federated(scenario, dealt, folder, resources)
        return [float(seconds) for seconds in pd.read_csv(folder.history)["seconds"]]


def without_flower(scenario: TrainingScenario, resources: Resources) -> list[float]:
    """The same with a pool of processes."""
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


if __name__ == "__main__":
    run_function(main)
