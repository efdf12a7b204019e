"""Top-1 accuracy of a classifier."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from fedmjp.data.datasets import LabelledDataset
from fedmjp.data.loading import Batch, evaluation_batches
from fedmjp.errors import DataError
from fedmjp.learning import Recipe
from fedmjp.models.classifier import Classifier
from fedmjp.models.inference import UNDECIDED, evaluated, predictions


@dataclass(frozen=True)
class Accuracy:
    """How many of all pictures a model knows: their greatest logit is that of their label."""

    correct: int
    total: int
    loss: float  # mean cross-entropy of the decided pictures; infinite if there are none
    undecided: int = 0  # pictures with a logit that is not finite; they count as wrong

    @property
    def top1(self) -> float:
        """Share of pictures that are known."""
        return self.correct / self.total


def top1(model: Classifier, batches: Iterable[Batch]) -> Accuracy:
    """Count the pictures that a model knows, without a puzzle, on the model's device.

    Raises:
        DataError: If there is no picture.
    """
    device, total = model.mean.device, 0
    # Sums stay on the device until the end: reading one after each batch would stop a GPU each time.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with evaluated(model):
        for batch in batches:
            logits, labels = model(batch.images.to(device)), batch.labels.to(device)
            predicted = predictions(logits)
            lost = predicted == UNDECIDED
            losses = F.cross_entropy(logits.double(), labels, reduction="none")
            sums += torch.stack([(predicted == labels).sum(), lost.sum(), losses.where(~lost, 0.0).sum()])
            total += len(batch.labels)
    if not total:
        raise DataError("there is no picture to evaluate on")
    correct, undecided, loss = sums.tolist()
    mean = loss / (total - undecided) if undecided < total else math.inf
    return Accuracy(int(correct), total, mean, int(undecided))


def validate(
    model: Classifier, dataset: LabelledDataset, recipe: Recipe, on_skipped: Callable[[str], None]
) -> Accuracy:
    """Top-1 accuracy of the unshuffled pictures of a data set that can be read; of others the reason is told."""
    batches = evaluation_batches(
        dataset,
        np.arange(len(dataset)),
        recipe.crop_share,
        size=model.image_size,
        batch_size=recipe.batch_size,
        workers=recipe.workers,
        on_skipped=on_skipped,
    )
    return top1(model, batches)
