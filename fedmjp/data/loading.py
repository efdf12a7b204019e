"""Batches of pictures for training and evaluation, the same whatever the number of reading processes."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedmjp.data.augmentation import TrainingTransform
from fedmjp.data.datasets import LabelledDataset
from fedmjp.data.pictures import to_image
from fedmjp.errors import DataError
from fedmjp.learning import Recipe
from fedmjp.seeds import derive, numpy_generator, scoped_randomness


@dataclass(frozen=True)
class Batch:
    """Pictures as the model sees them."""

    images: Tensor  # (pictures, 3, size, size) float32 in [0, 1]
    labels: Tensor  # (pictures,) int64
    indices: tuple[int, ...]  # in their data set


def refuse(reason: str) -> None:
    """An unreadable picture ends the run, as DataError."""
    raise DataError(reason)


def steps_per_epoch(pictures: int, recipe: Recipe) -> int:
    """Batches of an epoch: a last, smaller batch counts only if it is the only one."""
    return max(pictures // recipe.batch_size, 1)


def epoch_order(indices: np.ndarray, *, repeats: int, seed: int, epoch: int) -> np.ndarray:
    """What an epoch reads, in order: repeated augmentation as DeiT's ``RASampler`` has it for one process.

    Each picture of a shuffled order comes ``repeats`` times, and the epoch ends after as many as there are
    pictures, so that it shows a share of them only.
    """
    shuffled = numpy_generator(seed, "order", epoch).permutation(indices)
    return np.repeat(shuffled, repeats)[: len(indices)]


def training_batches(  # noqa: PLR0913 (where in the run it is takes three)
    dataset: LabelledDataset,
    indices: np.ndarray,
    recipe: Recipe,
    *,
    size: int,
    seed: int,
    epoch: int,
    skip: int = 0,
    on_skipped: Callable[[str], None] = refuse,
) -> Iterator[Batch]:
    """One epoch (from 0) of training; a picture's version depends on (seed, epoch, its place in the epoch) alone.

    Args:
        dataset: The photographs.
        indices: Those to train on.
        recipe: Batch size, augmentation, reading processes.
        size: Pixels per side.
        seed: Of the run.
        epoch: From 0.
        skip: Batches to leave out at the start, because they were trained on before.
        on_skipped: Told once of each picture that cannot be read; the batch goes on without it, and a batch
            of which nothing is left is not given.

    Raises:
        DataError: If a picture cannot be read and ``on_skipped`` was not given.
    """
    order = epoch_order(indices, repeats=recipe.repeats, seed=seed, epoch=epoch)
    places = [
        range(step * recipe.batch_size, min((step + 1) * recipe.batch_size, len(order)))
        for step in range(skip, steps_per_epoch(len(order), recipe))
    ]
    transform = partial(_without_key, TrainingTransform(recipe, size))
    reader = _Reader(dataset, order, transform, places, seed=derive(seed, "augmentation", epoch))
    return _batches(reader, recipe.workers, on_skipped)


def evaluation_batches(
    dataset: LabelledDataset,
    indices: np.ndarray,
    crop_share: float,
    *,
    size: int,
    batch_size: int,
    workers: int = 0,
    on_skipped: Callable[[str], None] = refuse,
) -> Iterator[Batch]:
    """Pictures in the given order, without augmentation; the arguments are those of ``training_batches``.

    Raises:
        DataError: If a picture cannot be read and ``on_skipped`` was not given.
    """
    prepare = partial(_without_key, partial(to_image, size=size, crop_share=crop_share))
    return prepared_batches(dataset, indices, prepare, batch_size=batch_size, workers=workers, on_skipped=on_skipped)


def prepared_batches(
    dataset: LabelledDataset,
    indices: np.ndarray,
    prepare: Callable[[Image.Image, str], Tensor],
    *,
    batch_size: int,
    workers: int = 0,
    on_skipped: Callable[[str], None] = refuse,
) -> Iterator[Batch]:
    """Pictures in the given order, each as ``prepare`` makes it of a photograph and its key in its source.

    Raises:
        DataError: If a picture cannot be read and ``on_skipped`` was not given.
    """
    places = [range(start, min(start + batch_size, len(indices))) for start in range(0, len(indices), batch_size)]
    return _batches(_Reader(dataset, indices, prepare, places, seed=0), workers, on_skipped)


def _without_key(transform: Callable[[Image.Image], Tensor], photograph: Image.Image, _key: str) -> Tensor:
    return transform(photograph)


# A batch (None if nothing of it could be read) and what is wrong with the pictures that it lacks.
Read = tuple[Batch | None, list[str]]


class _Reader(Dataset[Read]):
    """Reads batches of places in an order of pictures; what is drawn at a place depends on it and the seed."""

    def __init__(
        self,
        dataset: LabelledDataset,
        order: np.ndarray,
        transform: Callable[[Image.Image, str], Tensor],
        places: list[range],
        *,
        seed: int,
    ) -> None:
        self._dataset, self._order, self._transform = dataset, order, transform
        self._places, self._seed = places, seed

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, step: int) -> Read:
        images: dict[int, Tensor] = {}
        skipped = []
        with scoped_randomness(self._seed):
            for place in self._places[step]:
                try:
                    index = int(self._order[place])
                    photograph = self._dataset.photograph(index)
                    _reseed(derive(self._seed, place))
                    images[place] = self._transform(photograph, self._dataset.key(index))
                except DataError as error:
                    skipped.append(str(error))
        if not images:
            return None, skipped
        indices = self._order[list(images)]
        labels = torch.from_numpy(self._dataset.labels[indices])
        return Batch(torch.stack(list(images.values())), labels, tuple(indices.tolist())), skipped


def _reseed(seed: int) -> None:
    """Put the global CPU generators into a state; only within ``scoped_randomness``, which is slow to enter."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002, TID251
    torch.default_generator.manual_seed(seed)


def _batches(reader: _Reader, workers: int, on_skipped: Callable[[str], None]) -> Iterator[Batch]:
    tell = cache(on_skipped)  # once of each
    # A generator of its own: the loader would draw from the global one.
    for batch, skipped in DataLoader(reader, batch_size=None, num_workers=workers, generator=torch.Generator()):
        for reason in skipped:
            tell(reason)
        if batch is not None:
            yield batch
