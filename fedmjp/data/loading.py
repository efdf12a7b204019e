"""Batches of pictures for training and evaluation, the same whatever the number of reading processes."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from fedmjp.data.augmentation import TrainingTransform
from fedmjp.data.pictures import LabelledDataset, to_image
from fedmjp.defences.base import Drawn
from fedmjp.errors import DataError
from fedmjp.learning import Recipe
from fedmjp.seeds import derive, numpy_generator, scoped_randomness

# Pictures that a reading process hands over at a time: the more, the more processes that are ahead hold.
CHUNK = 64


Draw = Callable[[int, int, Sequence[int]], Drawn | None]  # of an epoch, a step, and places in its batch


@dataclass(frozen=True)
class Batch:
    """A batch of pictures as the model sees them."""

    images: Tensor  # (pictures, 3, size, size) float32 in [0, 1]
    labels: Tensor  # (pictures,) int64
    indices: tuple[int, ...]  # in their data set
    places: tuple[int, ...] | None = None  # in the step's whole batch; None where they are counted from 0
    drawn: Drawn | None = None  # mask and source of their puzzles, where these were drawn ahead

    def place(self, number: int) -> int:
        """Return a picture's place in the step's whole batch, of which other processes may have other parts.

        Args:
            number: Of the picture in this batch.
        """
        return number if self.places is None else self.places[number]


@dataclass(frozen=True)
class Part:
    """The part of every batch that one of several processes reads."""

    number: int = 0  # from 0
    of: int = 1

    def places(self, pictures: int) -> list[int]:
        """List this part's places in a batch: as many from its beginning as, mirrored, from its end.

        timm mixes the first picture with the last, the second with the last but one; both are in the same part.

        Args:
            pictures: Number of pictures of the batch.
        """
        pairs = pictures // 2
        first, end = pairs * self.number // self.of, pairs * (self.number + 1) // self.of
        unpaired = range(pairs, pictures - pairs) if self.number == self.of - 1 else ()
        return [*range(first, end), *unpaired, *range(pictures - end, pictures - first)]


WHOLE = Part()


def _refuse(reason: str) -> None:
    """End the run at an unreadable picture, as DataError."""
    raise DataError(reason)


def steps_per_epoch(pictures: int, recipe: Recipe) -> int:
    """Count the batches of an epoch: a last, smaller batch counts only if it is the only one.

    Args:
        pictures: Number of pictures.
        recipe: Gives the batch size.
    """
    return max(pictures // recipe.batch_size, 1)


def epoch_order(indices: np.ndarray, *, repeats: int, seed: int, epoch: int) -> np.ndarray:
    """Order the pictures of an epoch, with repeated augmentation as DeiT's ``RASampler`` has it for one process.

    Each picture of a shuffled order comes ``repeats`` times, and the epoch ends after as many as there are
    pictures, so that it shows a share of them only.

    Args:
        indices: (pictures,) int64 of the pictures.
        repeats: How often each comes.
        seed: Of the run.
        epoch: From 0.
    """
    shuffled = numpy_generator(seed, "order", epoch).permutation(indices)
    return np.repeat(shuffled, repeats)[: len(indices)]


def training_epochs(  # noqa: PLR0913 (where in the run it is takes four)
    dataset: LabelledDataset,
    indices: np.ndarray,
    recipe: Recipe,
    *,
    size: int,
    seed: int,
    epochs: Sequence[int],
    skip: int = 0,
    part: Part = WHOLE,
    pinned: bool = False,
    draw: Draw | None = None,
    on_skipped: Callable[[str], None] = _refuse,
) -> Iterator[tuple[int, Iterator[Batch]]]:
    """Iterate over epochs of training with their numbers; the same processes read ahead for all.

    A picture's version depends on (seed, epoch, its place in the epoch) alone.

    Args:
        dataset: The photographs.
        indices: Those to train on.
        recipe: Batch size, augmentation, reading processes.
        size: Pixels per side.
        seed: Of the run.
        epochs: Which, from 0.
        skip: Batches to leave out at the start of each, because they were trained on before.
        part: What is read of each batch.
        pinned: Whether batches lie in memory that CUDA copies from while it computes.
        draw: Draws puzzles where pictures are read.
        on_skipped: Told once of each picture that cannot be read; the batch goes on without it. A batch of which
            nothing is left is not given, unless it is a part, which others may wait for.

    Raises:
        DataError: If a picture cannot be read and ``on_skipped`` was not given.
    """
    steps = range(skip, steps_per_epoch(len(indices), recipe))
    places = part.places(min(recipe.batch_size, len(indices)))
    chunks, pictures = _chunks(places), len(places)
    jobs = (_Job(epoch, step, chunk) for epoch in epochs for step in steps for chunk in chunks)
    reader = _Reader(
        dataset,
        partial(_epoch_of_training, indices, recipe.repeats, seed),
        partial(_without_key, TrainingTransform(recipe, size)),
        recipe.batch_size,
        draw,
    )
    reads, tell = _read(reader, jobs, recipe.workers), cache(on_skipped)
    for epoch in epochs:
        joined = (_join(islice(reads, len(chunks)), pictures, tell, pinned=pinned) for _ in steps)
        batches = (batch for batch in joined if len(batch.labels) or part.of > 1)
        yield epoch, batches
        for _ in batches:  # the next epoch's follow what was not asked for
            pass


def evaluation_batches(
    dataset: LabelledDataset,
    indices: np.ndarray,
    crop_share: float,
    *,
    size: int,
    batch_size: int,
    workers: int = 0,
    on_skipped: Callable[[str], None] = _refuse,
) -> Iterator[Batch]:
    """Iterate over batches of pictures in the given order, without augmentation.

    Args:
        dataset: The photographs.
        indices: Those to read, in order.
        crop_share: Share of the shorter side that is kept, in (0, 1].
        size: Pixels per side.
        batch_size: Pictures per batch.
        workers: Processes that read.
        on_skipped: Called with the reason for each picture that cannot be read.

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
    on_skipped: Callable[[str], None] = _refuse,
) -> Iterator[Batch]:
    """Iterate over batches of pictures in the given order, prepared by a function.

    Args:
        dataset: The photographs.
        indices: Those to read, in order.
        prepare: Makes a tensor (3, size, size) of a photograph and its key in its source.
        batch_size: Pictures per batch.
        workers: Processes that read.
        on_skipped: Called with the reason for each picture that cannot be read.

    Raises:
        DataError: If a picture cannot be read and ``on_skipped`` was not given.
    """
    sizes = [min(batch_size, len(indices) - first) for first in range(0, len(indices), batch_size)]
    chunks = [_chunks(range(size)) for size in sizes]
    jobs = (_Job(0, step, chunk) for step, of_step in enumerate(chunks) for chunk in of_step)
    reader = _Reader(dataset, partial(_as_given, indices), prepare, batch_size)
    reads, tell = _read(reader, jobs, workers), cache(on_skipped)
    joined = (_join(islice(reads, len(of_step)), sum(map(len, of_step)), tell) for of_step in chunks)
    return (batch for batch in joined if len(batch.labels))


def _without_key(transform: Callable[[Image.Image], Tensor], photograph: Image.Image, _key: str) -> Tensor:
    return transform(photograph)


def _epoch_of_training(indices: np.ndarray, repeats: int, seed: int, epoch: int) -> tuple[np.ndarray, int]:
    order = epoch_order(indices, repeats=repeats, seed=seed, epoch=epoch)
    return order, derive(seed, "augmentation", epoch)


def _as_given(indices: np.ndarray, _epoch: int) -> tuple[np.ndarray, int]:
    return indices, 0


def _chunks(places: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(places[first : first + CHUNK]) for first in range(0, len(places), CHUNK)]


@dataclass(frozen=True)
class _Job:
    """Some pictures of a batch, to be read by one process."""

    epoch: int
    step: int
    places: tuple[int, ...]  # in the batch


# Pictures, none if nothing could be read, and what is wrong with those that are not there.
Read = tuple[Batch, list[str]]


class _Reader(Dataset[Read]):
    """A reader of pictures at places of an epoch; draws at a place depend on it and the epoch's seed."""

    def __init__(
        self,
        dataset: LabelledDataset,
        order: Callable[[int], tuple[np.ndarray, int]],  # of an epoch, and its seed
        transform: Callable[[Image.Image, str], Tensor],
        batch_size: int,
        draw: Draw | None = None,
    ) -> None:
        self._dataset, self._transform, self._batch_size, self._draw = dataset, transform, batch_size, draw
        self._order, self._orders = order, dict[int, tuple[np.ndarray, int]]()

    def __getitem__(self, job: _Job) -> Read:
        if job.epoch not in self._orders:
            self._orders = {job.epoch: self._order(job.epoch)}
        order, seed = self._orders[job.epoch]
        images: dict[int, Tensor] = {}
        skipped, opened = [], None
        with scoped_randomness(seed):
            for place in job.places:
                position = job.step * self._batch_size + place
                index = int(order[position])
                try:
                    if opened is None or opened[0] != index:  # its repetitions follow each other
                        opened = index, self._dataset.photograph(index)
                    _reseed(derive(seed, position))
                    images[place] = self._transform(opened[1], self._dataset.key(index))
                except DataError as error:
                    skipped.append(str(error))
        places = tuple(images)
        indices = order[[job.step * self._batch_size + place for place in places]]
        labels = torch.from_numpy(self._dataset.labels[indices])
        # Which stacks them, in a process that reads right where the other one will look.
        stacked = default_collate(list(images.values())) if images else torch.empty(0)
        drawn = self._draw(job.epoch, job.step, places) if self._draw and places else None
        return Batch(stacked, labels, tuple(indices.tolist()), places, drawn), skipped


def _reseed(seed: int) -> None:
    """Put the global CPU generators into a state; only within ``scoped_randomness``, which is slow to enter."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002, TID251
    torch.default_generator.manual_seed(seed)


def _read(reader: _Reader, jobs: Iterable[_Job], workers: int) -> Iterator[Read]:
    # A generator of its own: the loader would draw from the global one.
    return iter(DataLoader(reader, batch_size=None, sampler=jobs, num_workers=workers, generator=torch.Generator()))


def _join(reads: Iterable[Read], pictures: int, tell: Callable[[str], None], *, pinned: bool = False) -> Batch:
    """Join parts into a batch of at most so many pictures; each part is let go once it is copied."""
    images, labels = torch.empty(0), torch.empty(0, dtype=torch.int64)
    indices: list[int] = []
    places: list[int] = []
    drawn: list[Drawn] = []
    for part, skipped in reads:
        for reason in skipped:
            tell(reason)
        if not len(part.labels):
            continue
        if len(part.labels) == pictures and not pinned:
            return part
        if not indices:
            images = torch.empty((pictures, *part.images.shape[1:]), dtype=part.images.dtype, pin_memory=pinned)
            labels = torch.empty(pictures, dtype=part.labels.dtype, pin_memory=pinned)
        rows = slice(len(indices), len(indices) + len(part.labels))
        images[rows], labels[rows] = part.images, part.labels
        indices += part.indices
        places += map(part.place, range(len(part.labels)))
        drawn += [part.drawn] if part.drawn is not None else []
    puzzles = (torch.cat([mask for mask, _ in drawn]), torch.cat([source for _, source in drawn])) if drawn else None
    return Batch(images[: len(indices)], labels[: len(indices)], tuple(indices), tuple(places), puzzles)
