"""How far a jigsaw moves a model's features and prediction: Diff. Norm. and Consistency (MJP, Eq. 6 and 7)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmjp import jigsaw
from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import Batch, evaluation_batches
from fedmjp.data.pictures import LabelledDataset
from fedmjp.errors import BadInputError, DataError
from fedmjp.evaluation.runs import TrainedModel
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
    """The jigsaws x~ of every picture.

    A picture's puzzle depends on the seed, the ratio and the picture's key alone: every model with as
    many patches meets the same ones.
    """

    ratios: tuple[float, ...]  # requested shares of shuffled patches, each of them one x~
    seed: int = 0  # of masks and permutations
    # A defended model is told which patches were shuffled, as in the official code; Table 5 has a row "w/o" this.
    tell_mask: bool = True

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            if not 0.0 <= ratio <= 1.0:
                raise BadInputError(f"mask ratio {ratio:g} is outside [0, 1]")
        if len(set(self.ratios)) < len(self.ratios) or not self.ratios:
            listed = ", ".join(f"{ratio:g}" for ratio in self.ratios)
            raise BadInputError(f"mask ratios must be at least one, each named once, got {listed or 'none'}")

    def draw(self, grid: int, ratio: float, keys: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Draw source and mask of pictures, (pictures, patches) int64 and bool, as in ``fedmjp.jigsaw.PatchShuffle``.

        Args:
            grid: Patches per side.
            ratio: Share of patches that are shuffled, from 0 to 1.
            keys: Names of the pictures in their source.
        """
        drawn = [
            jigsaw.draw(grid, ratio, generator=torch_generator(self.seed, "consistency", ratio, key)) for key in keys
        ]
        return torch.cat([puzzle.source for puzzle in drawn]), torch.cat([puzzle.mask for puzzle in drawn])


@dataclass(frozen=True)
class Consistency:
    """A model's predictions of pictures x and of their jigsaws x~ of several mask ratios."""

    ratios: tuple[float, ...]
    keys: tuple[str, ...]
    correct: Booleans  # (pictures,) whether x is classified right
    # (pictures,) whether a logit of x or of an x~ is not finite: such a prediction is wrong and agrees with none
    undecided: Booleans
    realised: Floats  # (ratios, pictures), the shares that the drawn masks have
    # (ratios, pictures), L2 norm of the difference of the features of x and x~ (Eq. 6): of the class token after the
    # last norm, else the pooled features; not finite where a feature is not
    difference: Floats
    agrees: Booleans  # (ratios, pictures), whether both have the same predicted class (Eq. 7)
    correct_shuffled: Booleans  # (ratios, pictures), whether x~ is classified right


def compare_with_shuffled(
    model: Classifier, batches: Iterable[Batch], puzzles: Puzzles, *, key_of: Callable[[int], str]
) -> Consistency:
    """Compare x with its x~ of every mask ratio, in one pass over the pictures, on the model's device.

    The official ``consistency.py`` differs: it resizes a whole picture to 224 x 224 without keeping its
    proportions (here it is resized and cropped, as for Top-1), goes picture by picture, draws its masks from
    the global generators, so that every run meets other masks, and moves patches of 16 pixels whatever the model
    (here the model's own: 4 for Swin-T).

    Args:
        model: A defended model receives the masks; an undefended model does not.
        batches: The pictures.
        puzzles: Draws the x~.
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
    realised, difference, agrees, correct_moved = [], [], [], []
    for ratio in puzzles.ratios:
        source, mask = (tensor.to(device) for tensor in puzzles.draw(model.grid, ratio, keys))
        disclosed_mask = mask if model.defended and puzzles.tell_mask else None
        moved_features = model.features(jigsaw.rearrange(images, source), disclosed_mask)
        predicted_moved = predictions(model.logits(moved_features))
        undecided = undecided | (predicted_moved == UNDECIDED)
        realised.append(mask.double().mean(dim=1))
        difference.append(torch.linalg.vector_norm((features - moved_features).double(), dim=1))
        agrees.append((predicted_moved == predicted) & (predicted_moved != UNDECIDED))
        correct_moved.append(predicted_moved == labels)
    return Consistency(
        puzzles.ratios,
        tuple(keys),
        (predicted == labels).cpu().numpy(),
        undecided.cpu().numpy(),
        *(torch.stack(rows).cpu().numpy() for rows in (realised, difference, agrees, correct_moved)),
    )


@dataclass(frozen=True)
class Sample:
    """The pictures of a data set with some indices."""

    dataset: LabelledDataset
    indices: np.ndarray

    def draw(self, limit: int | None, seed: int) -> "Sample":
        """Draw at most ``limit`` pictures at random, in their order; None keeps all."""
        if limit is None:
            return self
        order = numpy_generator(seed, "evaluation").permutation(self.indices)
        return Sample(self.dataset, np.sort(order[:limit]))

    def read_batches(
        self, size: int, crop_share: float, *, workers: int, on_skipped: Callable[[str], None]
    ) -> Iterable[Batch]:
        """Read the pictures as for Top-1.

        Args:
            size: Pixels per side.
            crop_share: Of the resized picture that is kept.
            workers: Processes that read.
            on_skipped: Called once with the reason for each picture that cannot be read.
        """
        return evaluation_batches(
            self.dataset, self.indices, crop_share,
            size=size, batch_size=BATCH_SIZE, workers=workers, on_skipped=on_skipped,
        )  # fmt: skip


def sample_pictures(data: str, *, classes: int, limit: int | None, seed: int) -> Sample:
    """Open the validation split, or draw ``limit`` pictures of it (the first of a folder are of few classes).

    Args:
        data: bundled, a folder or hub:OWNER/NAME.
        classes: Of the model; labels must lie below.
        limit: Pictures at most; None for all.
        seed: Of the choice.

    Raises:
        DataError: If there are no such pictures, or their labels do not fit the model.
    """
    dataset = open_dataset(data, "validation", classes=classes)
    return Sample(dataset, np.arange(len(dataset))).draw(limit, seed)


def measure_consistency(
    run: TrainedModel,
    pictures: Sample,
    puzzles: Puzzles,
    *,
    device: str,
    workers: int,
    on_pictures: Callable[[int], None],
    on_skipped: Callable[[str], None],
) -> Consistency:
    """Evaluate a trained model on pictures and on their x~.

    Args:
        run: The trained model.
        pictures: To evaluate on.
        puzzles: Draws the x~.
        device: cpu or cuda.
        workers: Processes that read.
        on_pictures: Called after each batch with its number of pictures.
        on_skipped: Called once with the reason for each picture that cannot be read.

    Raises:
        DataError: If no picture can be read.
        CheckpointError: If the weights do not fit the model.
    """
    model = build(run.model).to(torch.device(device))
    batches = pictures.read_batches(model.image_size, run.crop_share, workers=workers, on_skipped=on_skipped)
    return compare_with_shuffled(model, _report_batches(batches, on_pictures), puzzles, key_of=pictures.dataset.key)


def _report_batches(batches: Iterable[Batch], on_pictures: Callable[[int], None]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        on_pictures(len(batch.labels))
