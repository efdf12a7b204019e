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
from fedmjp.training.together import ALONE, Together


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


def top1(model: Classifier, batches: Iterable[Batch], together: Together = ALONE) -> Accuracy:
    """Count the pictures that a model knows, without a puzzle, on the model's device; of all processes together.

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
            known = predicted == labels
            counts = known.sum(), lost.sum(), losses.where(~lost, 0.0).sum(), torch.ones_like(known).sum()
            sums += torch.stack(counts)
    correct, undecided, loss, total = together.sum(sums).tolist()
    if not total:
        raise DataError("there is no picture to evaluate on")
    mean = loss / (total - undecided) if undecided < total else math.inf
    return Accuracy(int(correct), int(total), mean, int(undecided))


def validate(
    model: Classifier,
    dataset: LabelledDataset,
    recipe: Recipe,
    on_skipped: Callable[[str], None],
    together: Together = ALONE,
) -> Accuracy:
    """Top-1 accuracy of the unshuffled pictures of a data set that can be read; of others the reason is told."""
    batches = evaluation_batches(
        dataset,
        np.arange(together.number, len(dataset), together.of),
        recipe.crop_share,
        size=model.image_size,
        batch_size=recipe.batch_size,
        workers=recipe.workers,
        on_skipped=on_skipped,
    )
    return top1(model, batches, together)
