"""Top-1 accuracy of a classifier."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from fedmjp.data.loading import Batch, evaluation_batches
from fedmjp.data.pictures import LabelledDataset
from fedmjp.errors import DataError
from fedmjp.learning import Recipe
from fedmjp.models.classifier import Classifier
from fedmjp.models.inference import UNDECIDED, evaluated, predictions
from fedmjp.training.process_group import SINGLE, ProcessGroup


@dataclass(frozen=True)
class Accuracy:
    """Counts of correctly classified pictures: those whose greatest logit is that of their label."""

    correct: int
    total: int
    loss: float  # mean cross-entropy of the decided pictures; infinite if there are none
    undecided: int = 0  # pictures with a logit that is not finite; they count as wrong

    @property
    def top1(self) -> float:
        """Return the share of correctly classified pictures."""
        return self.correct / self.total


def top1(model: Classifier, batches: Iterable[Batch], group: ProcessGroup = SINGLE) -> Accuracy:
    """Count the unshuffled pictures that a model classifies correctly.

    Args:
        model: On the device that computes.
        batches: The pictures of this process.
        group: Processes whose counts are added up.

    Raises:
        DataError: If there is no picture.
    """
    device = model.mean.device
    # Sums stay on the device until the end: reading one after each batch would stop a GPU each time.
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    with evaluated(model):
        for batch in batches:
            logits, labels = model(batch.images.to(device)), batch.labels.to(device)
            predicted = predictions(logits)
            lost = predicted == UNDECIDED
            losses = F.cross_entropy(logits.double(), labels, reduction="none")
            correct = predicted == labels
            counts = correct.sum(), lost.sum(), losses.where(~lost, 0.0).sum(), torch.ones_like(correct).sum()
            sums += torch.stack(counts)
    hits, undecided, loss, total = group.sum(sums).tolist()
    if not total:
        raise DataError("there is no picture to evaluate on")
    mean = loss / (total - undecided) if undecided < total else math.inf
    return Accuracy(int(hits), int(total), mean, int(undecided))


def validate(
    model: Classifier,
    dataset: LabelledDataset,
    recipe: Recipe,
    on_skipped: Callable[[str], None],
    group: ProcessGroup = SINGLE,
) -> Accuracy:
    """Measure the Top-1 accuracy of a data set's unshuffled pictures.

    Args:
        model: On the device that computes.
        dataset: The pictures.
        recipe: Gives crop, batch size and reading processes.
        on_skipped: Called with the reason for each picture that cannot be read.
        group: Processes that share the work.
    """
    batches = evaluation_batches(
        dataset,
        np.arange(group.number, len(dataset), group.of),
        recipe.crop_share,
        size=model.image_size,
        batch_size=recipe.batch_size,
        workers=recipe.workers,
        on_skipped=on_skipped,
    )
    return top1(model, batches, group)
