"""What reading a batch of 1,024 pictures takes: peak memory of the process that trains, and of those that read for it.

``python -m fedmjp.benchmarks.performance.loader_memory --pictures FOLDER --json FILE``

The paper's recipe at 224 x 224 pixels. Nothing is trained. What processes share, such as batches on their way, counts
once (PSS). It is looked at ten times a second.
"""

import itertools
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import torch
import typer

from fedmjp.benchmarks.performance.loader import SIZE, resized
from fedmjp.benchmarks.scripts import Json, keep_figures
from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import training_epochs
from fedmjp.learning import Recipe
from fedmjp.running import run_function

BATCH = 1024
SAMPLE_SECONDS = 0.1


def main(
    json: Json,
    pictures: Annotated[Path, typer.Option(help="Folder of CLASS/picture.")],
    workers: Annotated[list[int] | None, typer.Option(min=0, help="Processes that read; 0, 2 and 16.")] = None,
    batches: Annotated[int, typer.Option(min=1, help="That are read.")] = 3,
) -> None:
    """Read some batches with each number of processes."""
    torch.set_num_threads(1)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        resized(pictures, Path(folder))
        dataset = open_dataset(folder, "train", classes=1000)
        for count in workers or [0, 2, 16]:
            recipe = Recipe(batch_size=BATCH, workers=count)
            with watched() as peaks:
                before = memory()
                epochs = training_epochs(dataset, np.arange(len(dataset)), recipe, size=SIZE, seed=0, epochs=(0,))
                read = sum(len(batch.labels) for batch in itertools.islice(next(epochs)[1], batches))
                del epochs  # and with it the processes that read
            figures[f"{count} workers"] = {"pictures": read, "before_gb": before / 1e9, "peak_gb": max(peaks) / 1e9}
            typer.echo(figures)
    keep_figures(json, figures, {"batch": BATCH, "size": SIZE})


@contextmanager
def watched() -> Iterator[list[int]]:
    """A list that the memory of this process and those below it is added to, while the block runs."""
    peaks, over = [memory()], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            peaks.append(memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()


def memory() -> int:
    """Bytes of this process and those below it."""
    held = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            held += int(process.memory_full_info().pss)
    return held


if __name__ == "__main__":
    run_function(main)
