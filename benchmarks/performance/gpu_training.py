"""Training steps of DeiT-S at 224 pixels in pictures per second, with and without MJP, beside a bare loop."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm import create_model
from torch import Tensor

from fedmjp.benchmarks.performance.gpu_work import Work
from fedmjp.config import ModelConfig
from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import Batch, training_epochs
from fedmjp.defences.pipeline import read_pipeline
from fedmjp.learning import Learning, Puzzle, Recipe
from fedmjp.models.build import build
from fedmjp.training.loop import Schedule, Trainer

# Defences, changes of the model, the puzzle's schedule.
ARMS: dict[str, tuple[list[str], dict[str, Any], Puzzle]] = {
    "none": ([], {}, Puzzle()),
    "mjp": (["mjp"], {"localisation": "nonlinear"}, Puzzle()),
    "mjp_masks_per_batch": (["mjp"], {"localisation": "nonlinear"}, Puzzle(masks="batch")),
}
BATCH, SMALL_BATCH = 512, 2  # pictures, on a GPU and elsewhere
STEPS = 20
SHORTEST = 45.0  # seconds that an arm takes to compile and to be timed
REPEATED = 40  # times that the loader goes through its files


def measure(work: Work, arm: str) -> dict[str, Any]:
    """One of ``ARMS`` compiled, or none of them compiled, or what they are held against.

    The bare loop is timm's model under autocast, compiled, with AdamW; nothing makes it repeat.
    """
    if work.on_gpu and work.left() < SHORTEST:
        return {"left_out": "the time was nearly up"}
    made = {"uncompiled": partial(_ours, work, "none", compiled=False), "bare": partial(_bare, work)}
    made |= {"loader": partial(_loader, work)}
    figures = made[arm]() if arm in made else _ours(work, arm)
    return {"batch": _size(work), **figures}


def _ours(work: Work, arm: str, *, compiled: bool = True) -> dict[str, Any]:
    trainer = _trainer(work, arm, _recipe(work, compiled=compiled and work.on_gpu))
    # As readers bring them.
    batches = [
        replace(batch, drawn=trainer.puzzles.ahead(0, step, batch.indices)) for step, batch in enumerate(_batches(work))
    ]
    trainer.epoch(0, batches)  # compiles
    steps = _steps(work)
    report = trainer.epoch(1, (batches[step % len(batches)] for step in range(steps)))
    return {
        "pictures_per_second": round(report.images_per_second, 1),
        "loss": round(report.loss, 4),
        "memory_gb": _memory(work),
    }


def _bare(work: Work) -> dict[str, Any]:
    model = create_model("deit_small_patch16_224").to(work.device).to(memory_format=torch.channels_last)
    compiled: Any = torch.compile(model) if work.on_gpu else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=work.on_gpu)
    batches = _batches(work)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(work.device, torch.bfloat16):
            loss = F.cross_entropy(compiled(batch.images), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def several(steps: int) -> None:
        for number in range(steps):
            step(batches[number % len(batches)])

    several(3)
    steps = _steps(work)
    _, seconds = work.timed(partial(several, steps))
    return {"pictures_per_second": round(steps * _size(work) / seconds, 1), "memory_gb": _memory(work)}


def _loader(work: Work) -> dict[str, Any]:
    """Pictures per second that the loader decodes and augments, by the recipe."""
    recipe = _recipe(work, workers=15 if work.on_gpu else 0)
    pictures = open_dataset(work.pictures, "train", classes=1000)
    indices = torch.arange(len(pictures)).repeat(REPEATED if work.on_gpu else 1).numpy()
    _, batches = next(training_epochs(pictures, indices, recipe, size=224, seed=0, epochs=(0,)))
    next(batches)  # starts the processes
    began, seen = time.perf_counter(), 0
    for batch in batches:
        seen += len(batch.labels)
        if seen >= _steps(work) * _size(work):
            break
    seconds = time.perf_counter() - began
    return {"pictures_per_second": round(seen / seconds, 1), "processes": recipe.workers}


def _trainer(work: Work, arm: str, recipe: Recipe) -> Trainer:
    defences, changes, puzzle = ARMS[arm]
    pipeline = read_pipeline(defences)
    network = pipeline.change_model(ModelConfig.parse({"name": "deit_small", **changes}))
    model = build(network, drop_path=0.1).to(work.device)
    model = model.to(memory_format=torch.channels_last)
    learning = Learning(recipe=recipe, puzzle=puzzle)
    return Trainer(model, learning, pipeline, schedule=Schedule(2, _steps(work)), seed=0)


def _recipe(work: Work, *, workers: int = 0, compiled: bool = False) -> Recipe:
    return Recipe(
        batch_size=_size(work),
        epochs=2,
        warmup_epochs=0,
        precision="bfloat16",
        compile=compiled,
        workers=workers,
    )


def _batches(work: Work) -> list[Batch]:
    """Noise, on the device."""
    generator, size = torch.Generator().manual_seed(0), _size(work)
    made = []
    for _ in range(3):
        images = torch.rand(size, 3, 224, 224, generator=generator).to(work.device)
        labels = torch.randint(1000, (size,), generator=generator).to(work.device)
        made.append(Batch(images.contiguous(memory_format=torch.channels_last), labels, tuple(range(size))))
    return made


def _size(work: Work) -> int:
    return BATCH if work.on_gpu else SMALL_BATCH


def _steps(work: Work) -> int:
    return STEPS if work.on_gpu else 1


def _memory(work: Work) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 1) if work.on_gpu else None
