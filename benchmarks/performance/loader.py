"""Benchmarks of the training loader: speed and memory.

Pictures per second of the training loader, against a plain loop of torch and timm in the same process.

``python benchmarks/performance/run.py loader --pictures FOLDER --json FILE``

The plain loop is what DeiT's code does: torchvision's ``ImageFolder``, timm's ``create_transform`` (which normalises)
and ``RepeatAugSampler``, torch's ``DataLoader``. Arms take turns. Photographs are brought to 500 x 375 pixels first,
about what ImageNet's have, as JPEG of quality 95, and read from the disk's cache; there are so many that ours keeps
none of them decoded. The processor's time is that of one process that reads; the rate on a clock is that of several,
after the batches that they read ahead.

What reading a batch of 1,024 pictures takes: peak memory of the process that trains, and of those that read for it.

``python benchmarks/performance/run.py loader_memory --pictures FOLDER --json FILE``

The paper's recipe at 224 x 224 pixels. Nothing is trained. What processes share, such as batches on their way, counts
once (PSS). It is looked at ten times a second.
"""

import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from timm.data import create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from fedmjp.benchmarks.performance.harness import Measurement, benchmark, proportional_memory, sampled
from fedmjp.data.augmentation import with_posterize
from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import training_epochs
from fedmjp.data.pictures import BYTES_PER_PIXEL, KEPT_BYTES
from fedmjp.learning import Recipe

SIDES, QUALITY = (500, 375), 95
SIZE, BATCH = 224, 64
FILES = KEPT_BYTES // (SIDES[0] * SIDES[1] * BYTES_PER_PIXEL) + 1
AHEAD, COUNTED = 8, 16  # batches
LIGHT = {"repeats": 1, "rand_augment": "", "color_jitter": 0.0, "random_erasing": 0.0}
ARMS: dict[str, dict[str, Any]] = {"light": LIGHT, "paper": {}, "paper_without_repeats": {"repeats": 1}}


@benchmark
def loader(
    pictures: Annotated[Path, typer.Option(help="Folder of CLASS/picture.")],
    turns: Annotated[int, typer.Option(min=2, help="Of each arm.")] = 5,
    workers: Annotated[int, typer.Option(min=1, help="Processes that read, for the rate on a clock.")] = 2,
) -> Measurement:
    """Read the pictures with both, in turns, and print rates and ratios."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        count = resized(pictures, Path(folder))
        for arm, changes in ARMS.items():
            recipe = Recipe(batch_size=BATCH, **changes)
            figures[arm] = {
                **_turns(Path(folder), recipe, turns, clock=False),
                **_turns(Path(folder), recipe.model_copy(update={"workers": workers}), turns, clock=True),
            }
    return Measurement(figures, {"pictures": count, "sides": SIDES, "turns": turns, "workers": workers})


def resized(source: Path, target: Path) -> int:
    """How many different ones there are; each is there under several names."""
    paths = sorted(path for path in source.glob("*/*") if path.is_file())
    for number, path in zip(range(FILES), itertools.cycle(paths)):
        folder = target / path.parent.name
        folder.mkdir(exist_ok=True)
        place, first = folder / f"{number}.jpg", folder / f"{number % len(paths)}.jpg"
        if number >= len(paths):
            place.hardlink_to(first)
            continue
        with Image.open(path) as photograph:
            photograph.convert("RGB").resize(SIDES, Image.Resampling.BICUBIC).save(place, quality=QUALITY)
    return min(len(paths), FILES)


def _turns(folder: Path, recipe: Recipe, turns: int, *, clock: bool) -> dict[str, Any]:
    """Of both arms: milliseconds of the processor per picture, or pictures per second on a clock, and the ratio."""
    made = {"ours": _ours(folder, recipe), "plain": _plain(folder, recipe)}
    rates: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(turns):
        for name, epochs in made.items():
            rates[name].append(_rate(next(epochs), clock=clock))
    median = {name: float(np.median(each)) for name, each in rates.items()}
    ratios = np.array(rates["ours"]) / np.array(rates["plain"])
    what = f"times_as_fast_{'on_a_clock' if clock else 'by_processor'}"
    told = {what: [round(float(value), 2) for value in np.quantile(ratios, (0.5, 0, 1))]}
    if clock:
        return {f"{name}_pictures_per_second": round(rate, 1) for name, rate in median.items()} | told
    return {f"{name}_processor_ms_per_picture": round(1e3 / rate, 2) for name, rate in median.items()} | told


def _rate(batches: Iterable[int], *, clock: bool) -> float:
    """Pictures per second."""
    now = time.perf_counter if clock else time.process_time
    running = iter(batches)
    for _ in range(AHEAD if clock else 1):
        next(running)
    began = now()
    return sum(itertools.islice(running, COUNTED)) / (now() - began)


def _ours(folder: Path, recipe: Recipe) -> Iterator[Iterator[int]]:
    dataset = open_dataset(str(folder), "train", classes=1000)
    while True:  # processes that stay would read ahead while the other arm is timed
        epochs = training_epochs(dataset, np.arange(len(dataset)), recipe, size=SIZE, seed=0, epochs=(0,))
        yield (len(batch.labels) for batch in next(epochs)[1])


def _plain(folder: Path, recipe: Recipe) -> Iterator[Iterator[int]]:
    transform = create_transform(
        SIZE,
        is_training=True,
        scale=(recipe.crop_scale, 1.0),
        color_jitter=recipe.color_jitter,
        auto_augment=recipe.rand_augment or None,
        interpolation="bicubic",
        re_prob=recipe.random_erasing,
        re_mode="pixel",
    )
    dataset = ImageFolder(str(folder), with_posterize(transform))  # which Pillow 13 would end
    sampler = RepeatAugSampler(  # type: ignore[no-untyped-call]
        dataset, num_replicas=1, rank=0, num_repeats=recipe.repeats, selected_round=0
    )
    loader = DataLoader(dataset, recipe.batch_size, sampler=sampler, num_workers=recipe.workers, drop_last=True)
    while True:
        yield (len(labels) for _, labels in loader)


LARGE_BATCH = 1024
SAMPLE_SECONDS = 0.1


@benchmark
def loader_memory(
    pictures: Annotated[Path, typer.Option(help="Folder of CLASS/picture.")],
    workers: Annotated[list[int] | None, typer.Option(min=0, help="Processes that read; 0, 2 and 16.")] = None,
    batches: Annotated[int, typer.Option(min=1, help="That are read.")] = 3,
) -> Measurement:
    """Read some batches with each number of processes."""
    torch.set_num_threads(1)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        resized(pictures, Path(folder))
        dataset = open_dataset(folder, "train", classes=1000)
        for count in workers or [0, 2, 16]:
            recipe = Recipe(batch_size=LARGE_BATCH, workers=count)
            with sampled(proportional_memory, SAMPLE_SECONDS) as peaks:
                before = peaks[0]
                epochs = training_epochs(dataset, np.arange(len(dataset)), recipe, size=SIZE, seed=0, epochs=(0,))
                read = sum(len(batch.labels) for batch in itertools.islice(next(epochs)[1], batches))
                del epochs  # and with it the processes that read
            figures[f"{count} workers"] = {"pictures": read, "before_gb": before / 1e9, "peak_gb": max(peaks) / 1e9}
            typer.echo(figures)
    return Measurement(figures, {"batch": LARGE_BATCH, "size": SIZE})
