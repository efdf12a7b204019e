"""One trained model on the pictures that it is evaluated on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fedmjp.data.datasets import LabelledDataset, open_dataset
from fedmjp.data.loading import Batch, evaluation_batches, refuse
from fedmjp.evaluation.consistency import Consistency, Puzzles, consistency
from fedmjp.evaluation.runs import Trained
from fedmjp.models.build import build
from fedmjp.seeds import numpy_generator

BATCH_SIZE = 128


@dataclass(frozen=True)
class Sample:
    """The pictures of a data set with some indices."""

    dataset: LabelledDataset
    indices: np.ndarray


def sample(data: str, *, classes: int, limit: int | None, seed: int) -> Sample:
    """The validation split, or so many pictures of it at random: the first of a folder are of few classes.

    Raises:
        DataError: If there are no such pictures, or their labels do not fit the model.
    """
    dataset = open_dataset(data, "validation", classes=classes)
    order = np.arange(len(dataset))
    if limit is not None:
        order = np.sort(numpy_generator(seed, "evaluation").permutation(order)[:limit])
    return Sample(dataset, order)


def measure(
    run: Trained,
    pictures: Sample,
    puzzles: Puzzles,
    *,
    device: str,
    workers: int = 0,
    on_pictures: Callable[[int], None] = lambda _count: None,
    on_skipped: Callable[[str], None] = refuse,
) -> Consistency:
    """Evaluate a trained model on pictures and on their x~.

    Args:
        run: The model.
        pictures: What it is evaluated on.
        puzzles: Which x~ to make of them.
        device: Where it runs.
        workers: Processes that read pictures.
        on_pictures: Called with the number of pictures in each batch.
        on_skipped: Called with the reason for every picture that cannot be read.

    Raises:
        DataError: If no picture can be read, or one cannot and ``on_skipped`` was not given.
        CheckpointError: If the weights do not fit the model.
    """
    model = build(run.model).to(torch.device(device))
    batches = evaluation_batches(
        pictures.dataset,
        pictures.indices,
        run.crop_share,
        size=model.image_size,
        batch_size=BATCH_SIZE,
        workers=workers,
        on_skipped=on_skipped,
    )
    return consistency(model, _told(batches, on_pictures), puzzles, key_of=pictures.dataset.key)


def _told(batches: Iterable[Batch], on_pictures: Callable[[int], None]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        on_pictures(len(batch.labels))
