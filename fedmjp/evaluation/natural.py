"""ImageNet-A and ImageNet-O: photographs that models get wrong, and photographs of none of their classes.

After Hendrycks et al., "Natural Adversarial Examples", CVPR 2021, and its code.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedmjp.data.datasets import names_of_imagenet, open_dataset
from fedmjp.data.labelled import LabelledDataset
from fedmjp.data.loading import evaluation_batches
from fedmjp.errors import BadInputError, DataError
from fedmjp.evaluation.consistency import Booleans, Floats, Sample
from fedmjp.evaluation.runs import Trained
from fedmjp.models.classifier import Classifier
from fedmjp.models.inference import evaluated
from fedmjp.seeds import numpy_generator

BATCH_SIZE = 128
RECALL = 0.95  # of what is foreign, at which false alarms are counted


@dataclass(frozen=True)
class Adversarial:
    """What a model says of ImageNet-A; shares in per cent."""

    pictures: int
    classes: int
    accuracy: float
    aurra: float


@dataclass(frozen=True)
class Detection:
    """How well the least confident predictions are those of foreign pictures, as of ImageNet-O; shares in per cent."""

    foreign: int
    familiar: int
    aupr: float
    auroc: float
    fpr95: float


@dataclass(frozen=True)
class Restricted:
    """Predictions among some classes alone."""

    confidence: Floats  # the largest probability; 0 where a logit is not finite
    correct: Booleans


def class_names(run: Trained, kept: Sequence[str]) -> Sequence[str]:
    """What a model's labels mean: as its training noted it, or ImageNet's classes in their order.

    Raises:
        BadInputError: If that is not known.
    """
    imagenet = names_of_imagenet()
    if kept or run.model.classes == len(imagenet):
        return kept or imagenet
    raise BadInputError(
        f"{run.name} does not say which its {run.model.classes} classes are: it needs the classes.txt of its training"
    )


def open_named(data: str, names: Sequence[str]) -> LabelledDataset:
    """Pictures whose labels are places in these names.

    Raises:
        DataError: If there are none, or of other classes, with the nearest name.
    """
    return open_dataset(data, "validation", classes=sys.maxsize).labelled_as(names)


def open_familiar(data: str, foreign: LabelledDataset) -> Sample:
    """The pictures of a folder that are of the classes whose names the folders of foreign pictures have.

    Raises:
        DataError: If there are none.
    """
    dataset = open_dataset(data, "validation", classes=sys.maxsize)
    names = {foreign.class_names[label] for label in np.unique(foreign.labels)}
    labels = [label for label, name in enumerate(dataset.class_names) if name in names]
    indices = np.flatnonzero(np.isin(dataset.labels, labels))
    if not len(indices):
        raise DataError(f"{dataset.name} holds no picture of the {len(names)} classes of {foreign.name}")
    return Sample(dataset, indices)


def drawn(pictures: Sample, *, limit: int | None, seed: int) -> Sample:
    """So many of these pictures at random, or all."""
    if limit is None:
        return pictures
    return replace(pictures, indices=np.sort(numpy_generator(seed, "evaluation").permutation(pictures.indices)[:limit]))


def restricted(
    network: Classifier,
    run: Trained,
    pictures: Sample,
    labels: np.ndarray,
    *,
    workers: int,
    on_skipped: Callable[[str], None],
) -> Restricted:
    """Predict pictures among the given labels alone.

    Raises:
        DataError: If no picture can be read.
    """
    batches = evaluation_batches(
        pictures.dataset,
        pictures.indices,
        run.crop_share,
        size=network.image_size,
        batch_size=BATCH_SIZE,
        workers=workers,
        on_skipped=on_skipped,
    )
    places = torch.from_numpy(labels)
    confidence, correct = [], []
    with evaluated(network):
        for batch in batches:
            logits = network(batch.images.to(network.mean.device)).cpu()[:, places].double()
            decided = logits.isfinite().all(dim=1)
            largest, predicted = logits.softmax(dim=1).max(dim=1)
            confidence.append(torch.where(decided, largest, 0.0).numpy())
            correct.append(((places[predicted] == batch.labels) & decided).numpy())
    if not confidence:
        raise DataError(f"no picture of {pictures.dataset.name} can be read")
    return Restricted(np.concatenate(confidence), np.concatenate(correct))


def aurra(predictions: Restricted) -> float:
    """Area under the response rate accuracy curve: the mean over k of the accuracy of the k most confident."""
    order = np.argsort(-predictions.confidence, kind="stable")
    return float(np.mean(np.cumsum(predictions.correct[order]) / np.arange(1, len(order) + 1)))


def detect(foreign: Floats, familiar: Floats) -> Detection:
    """Tell foreign pictures by a low confidence.

    Args:
        foreign: Confidence of pictures that are of no class, the positive ones.
        familiar: Confidence of the others.

    Returns:
        Average precision, the area under the ROC curve, and the share of false alarms at which 95 % are found.
    """
    confidence = np.concatenate([foreign, familiar])
    order = np.argsort(confidence, kind="stable")
    positive = np.repeat([1, 0], [len(foreign), len(familiar)])[order]
    ends = np.flatnonzero(np.diff(confidence[order], append=np.inf))  # of each run of equal values
    hits = np.cumsum(positive)[ends]
    alarms = ends + 1 - hits
    recall, false_alarms = hits / len(foreign), alarms / len(familiar)
    precision = hits / (hits + alarms)
    return Detection(
        foreign=len(foreign),
        familiar=len(familiar),
        aupr=100 * float(np.sum(np.diff(recall, prepend=0) * precision)),
        auroc=100 * float(np.trapezoid(np.r_[0, recall], np.r_[0, false_alarms])),
        fpr95=100 * float(false_alarms[np.argmax(recall >= RECALL)]),
    )
