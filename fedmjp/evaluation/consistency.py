"""How far a jigsaw moves what a model says of a picture: Diff. Norm. and Consistency (MJP, Eq. 6 and 7)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmjp import jigsaw
from fedmjp.data.datasets import open_dataset
from fedmjp.data.labelled import LabelledDataset
from fedmjp.data.loading import Batch, evaluation_batches
from fedmjp.errors import BadInputError, DataError
from fedmjp.evaluation.runs import Trained
from fedmjp.models.build import build
from fedmjp.models.classifier import Classifier
from fedmjp.models.inference import UNDECIDED, evaluated, predictions
from fedmjp.seeds import numpy_generator, torch_generator

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
BATCH_SIZE = 128
PER_PICTURE = ("correct", "undecided", "realised", "difference", "agrees", "correct_shuffled")


@dataclass(frozen=True)
class Puzzles:
    """Which x~ there are of every picture.

    A picture's puzzle depends on the seed, the ratio and the picture's key alone: every model with as
    many patches meets the same ones.

    Attributes:
        ratios: Wanted shares of shuffled patches, each of them one x~.
        seed: Of masks and permutations.
        tell_mask: Whether a defended model is told which patches were shuffled, as in the official code. The
            row "w/o" of Table 5 is one that is not told.
    """

    ratios: tuple[float, ...]
    seed: int = 0
    tell_mask: bool = True

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            if not 0.0 <= ratio <= 1.0:
                raise BadInputError(f"mask ratio {ratio:g} is outside [0, 1]")
        if len(set(self.ratios)) < len(self.ratios) or not self.ratios:
            given = ", ".join(f"{ratio:g}" for ratio in self.ratios)
            raise BadInputError(f"mask ratios must be at least one, each named once, got {given or 'none'}")

    def draw(self, grid: int, ratio: float, keys: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Source and mask of pictures, (pictures, patches) int64 and bool, as in ``fedmjp.jigsaw.PatchShuffle``."""
        drawn = [
            jigsaw.draw(grid, ratio, generator=torch_generator(self.seed, "consistency", ratio, key)) for key in keys
        ]
        return torch.cat([puzzle.source for puzzle in drawn]), torch.cat([puzzle.mask for puzzle in drawn])


@dataclass(frozen=True)
class Consistency:
    """What a model says of pictures x and of their jigsaws x~ of several mask ratios.

    Attributes:
        correct: (pictures,) whether x is classified right.
        undecided: (pictures,) whether a logit of x or of an x~ is not finite. Such a prediction is wrong and agrees
            with none.
        realised: (ratios, pictures), the shares that the drawn masks have.
        difference: (ratios, pictures), L2 norm of the difference of the features of x and x~ (Eq. 6): of the class
            token after the last norm, of others the pooled features. Not finite where a feature is not.
        agrees: (ratios, pictures), whether both have the same predicted class (Eq. 7).
        correct_shuffled: (ratios, pictures), whether x~ is classified right.
    """

    ratios: tuple[float, ...]
    keys: tuple[str, ...]
    correct: Booleans
    undecided: Booleans
    realised: Floats
    difference: Floats
    agrees: Booleans
    correct_shuffled: Booleans


def consistency(
    model: Classifier, batches: Iterable[Batch], puzzles: Puzzles, *, key_of: Callable[[int], str]
) -> Consistency:
    """Compare x with its x~ of every mask ratio, in one pass over the pictures, on the model's device.

    The official ``consistency.py`` differs: it resizes a whole picture to 224 x 224 without keeping its
    proportions (here it is resized and cropped, as for Top-1), goes picture by picture, draws its masks from
    the global generators, so that every run meets others, and moves patches of 16 pixels whatever the model
    (here the model's own: 4 for Swin-T).

    Args:
        model: A defended one is told the masks, others are not.
        batches: The pictures.
        puzzles: Which x~ to make.
        key_of: A picture's name in its source, by its index in the batch.

    Raises:
        DataError: If there is no picture.
    """
    with evaluated(model):
        parts = [_compare(model, batch, puzzles, [key_of(index) for index in batch.indices]) for batch in batches]
    if not parts:
        raise DataError("there is no picture to evaluate on")
    return Consistency(
        ratios=puzzles.ratios,
        keys=tuple(key for part in parts for key in part.keys),
        **{name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in PER_PICTURE},
    )


def _compare(model: Classifier, batch: Batch, puzzles: Puzzles, keys: Sequence[str]) -> Consistency:
    device = model.mean.device
    images, labels = batch.images.to(device), batch.labels.to(device)
    features = model.features(images)
    predicted = predictions(model.logits(features))
    undecided = predicted == UNDECIDED
    realised, difference, agrees, right = [], [], [], []
    for ratio in puzzles.ratios:
        source, mask = (tensor.to(device) for tensor in puzzles.draw(model.grid, ratio, keys))
        known_mask = mask if model.defended and puzzles.tell_mask else None
        moved = model.features(jigsaw.rearrange(images, source), known_mask)
        now = predictions(model.logits(moved))
        undecided = undecided | (now == UNDECIDED)
        realised.append(mask.double().mean(dim=1))
        difference.append(torch.linalg.vector_norm((features - moved).double(), dim=1))
        agrees.append((now == predicted) & (now != UNDECIDED))
        right.append(now == labels)
    return Consistency(
        puzzles.ratios,
        tuple(keys),
        (predicted == labels).cpu().numpy(),
        undecided.cpu().numpy(),
        *(torch.stack(rows).cpu().numpy() for rows in (realised, difference, agrees, right)),
    )


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
    workers: int,
    on_pictures: Callable[[int], None],
    on_skipped: Callable[[str], None],
) -> Consistency:
    """Evaluate a trained model on pictures and on their x~.

    Told are each batch's number of pictures when it is done, and once the reason for each that cannot be read.

    Raises:
        DataError: If no picture can be read.
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
