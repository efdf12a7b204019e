"""What MJP costs per training step: the same steps with and without it, in turn.

``python benchmarks/performance/run.py mjp_step --model deit_small --batch-size 32 --turns 8 --json FILE``

The paper says +2 % per epoch (supplement, section 2; eight V100, masks per batch), and +46 % with localisation by PCA
(section 5.3). PCA depends on which patches are masked: masks per picture need one for each, masks per batch one per
step. Pictures are noise and already in memory, so that only the step is timed. Arms take turns, and ratios are taken
within a turn: of wall-clock seconds, and on the CPU of processor seconds, which other programs disturb less.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer

from fedmjp.benchmarks.performance.harness import Measurement, benchmark
from fedmjp.benchmarks.scripts import timed
from fedmjp.config import ModelConfig
from fedmjp.data.loading import Batch
from fedmjp.defences.pipeline import read_pipeline
from fedmjp.learning import OFFICIAL_CODE, Learning, Puzzle, Recipe
from fedmjp.models.build import build
from fedmjp.seeds import torch_generator
from fedmjp.training.loop import Schedule, Trainer

DAL, PCA = {"localisation": "nonlinear"}, {"localisation": "pca"}
PER_BATCH = OFFICIAL_CODE.model_copy(update={"warmup_epochs": 0, "probability": 1.0})
# Changes of the model, defences, the puzzle's schedule.
ARMS: dict[str, tuple[dict[str, Any], list[str], Puzzle]] = {
    "none": ({}, [], Puzzle()),
    "mjp": (DAL, ["mjp"], Puzzle()),
    "mjp_masks_per_batch": (DAL | {"localisation_layers": 2}, ["mjp"], PER_BATCH),
    "mjp_pca": (PCA, ["mjp"], Puzzle()),
    "mjp_pca_masks_per_batch": (PCA, ["mjp"], PER_BATCH),
    "jigsaw": ({}, ["jigsaw"], Puzzle()),
}


@benchmark
def mjp_step(
    model: Annotated[str, typer.Option(help="Name.")] = "deit_small",
    image_size: Annotated[int, typer.Option(help="Pixels per side.")] = 224,
    patch_size: Annotated[int, typer.Option(help="Pixels per side of a patch.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures per step.")] = 32,
    turns: Annotated[int, typer.Option(min=2, help="Steps of each arm.")] = 8,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> Measurement:
    """Time the steps and print the cost of each arm against none."""
    sizes = {"name": model, "image_size": image_size, "patch_size": patch_size}
    recipe = Recipe(batch_size=batch_size, epochs=turns + 1, warmup_epochs=0)
    trainers = {}
    for name, (changes, defences, puzzle) in ARMS.items():
        pipeline, learning = read_pipeline(defences), Learning(recipe=recipe, puzzle=puzzle)
        network = build(pipeline.change_model(ModelConfig.parse(sizes | changes))).to(device)
        trainers[name] = Trainer(network, learning, pipeline, schedule=Schedule(turns + 1, 1), seed=0)
    batch = _noise(batch_size, image_size)
    wall: dict[str, list[float]] = {name: [] for name in trainers}
    processor: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(turns + 1):
        for name, trainer in trainers.items():
            began = time.process_time()
            # Its report reads the loss, which waits for the device.
            wall[name].append(timed(partial(trainer.epoch, turn, [batch]))[1])
            processor[name].append(time.process_time() - began)
    figures = {
        **{f"{name}_ms_per_step": round(1e3 * float(np.median(taken[1:])), 1) for name, taken in wall.items()},
        **_costs(wall, "cost"),
        **(_costs(processor, "processor_cost") if device == "cpu" else {}),
    }
    about = {
        "threads": torch.get_num_threads(),
        "costs_are": "ratio of a step to one without MJP: median, least and greatest of the turns",
    }
    return Measurement(figures, about)


def _costs(seconds: Mapping[str, list[float]], what: str) -> dict[str, list[float]]:
    """Of each arm against none, but for the first turn, which allocates."""
    steady = {name: np.array(taken[1:]) for name, taken in seconds.items()}
    return {
        f"{name}_{what}": [round(float(value), 3) for value in np.quantile(taken / steady["none"], (0.5, 0, 1))]
        for name, taken in steady.items()
        if name != "none"
    }


def _noise(pictures: int, size: int) -> Batch:
    generator = torch_generator(0, "pictures")
    labels = torch.randint(1000, (pictures,), generator=generator)
    return Batch(torch.rand(pictures, 3, size, size, generator=generator), labels, tuple(range(pictures)))
