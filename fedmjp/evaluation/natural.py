"""ImageNet-A and ImageNet-O: photographs that models get wrong, and photographs of none of their classes.

After Hendrycks et al., "Natural Adversarial Examples", CVPR 2021, and its code.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedmjp.data.datasets import names_of_imagenet, open_dataset
from fedmjp.data.pictures import LabelledDataset
from fedmjp.errors import BadInputError, DataError
from fedmjp.evaluation.consistency import Booleans, Floats, Sample
from fedmjp.evaluation.runs import TrainedModel
from fedmjp.models.classifier import Classifier
from fedmjp.models.inference import evaluated

RECALL = 0.95  # of foreign pictures, at which false alarms are counted


@dataclass(frozen=True)
class AdversarialScore:
    """A model's accuracy and calibration on ImageNet-A; shares in per cent."""

    pictures: int
    classes: int
    accuracy: float
    aurra: float


@dataclass(frozen=True)
class Detection:
    """A model's scores at telling foreign pictures (ImageNet-O) by a low confidence; shares in per cent."""

    foreign: int
    familiar: int
    aupr: float
    auroc: float
    fpr95: float


@dataclass(frozen=True)
class RestrictedPredictions:
    """A model's predictions among some classes alone."""

    confidence: Floats  # the largest probability; 0 where a logit is not finite
    correct: Booleans


def find_class_names(run: TrainedModel, noted: Sequence[str]) -> Sequence[str]:
    """Find what a model's labels mean: the names its training noted, or ImageNet's classes in their order.

    Args:
        run: The trained model.
        noted: Names that its training noted; empty if none.

    Raises:
        BadInputError: If neither is available.
    """
    imagenet = names_of_imagenet()
    if noted or run.model.classes == len(imagenet):
        return noted or imagenet
    raise BadInputError(
        f"{run.name} does not say which its {run.model.classes} classes are: it needs the classes.txt of its training"
    )


def open_labelled(data: str, names: Sequence[str]) -> LabelledDataset:
    """Open pictures under labels that are places in a list of names.

    Args:
        data: A folder of pictures, or another source.
        names: Of the model's classes, in their order.

    Raises:
        DataError: If there are no pictures, or of other classes, with the nearest name.
    """
    return open_dataset(data, "validation", classes=sys.maxsize).labelled_as(names)


def open_familiar(data: str, foreign: LabelledDataset) -> Sample:
    """Open the pictures of a source whose classes are named like folders of the foreign pictures.

    Args:
        data: Source of the familiar pictures, such as ImageNet's validation split.
        foreign: Pictures of no class, in folders named after classes.

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


def predict_restricted(
    network: Classifier,
    run: TrainedModel,
    pictures: Sample,
    labels: np.ndarray,
    *,
    workers: int,
    on_skipped: Callable[[str], None],
) -> RestrictedPredictions:
    """Predict pictures among some labels alone.

    Args:
        network: The model on its device.
        run: Says how pictures are cropped.
        pictures: To predict.
        labels: The candidates (labels,), int.
        workers: Processes that read.
        on_skipped: Called once with the reason for each picture that cannot be read.

    Raises:
        DataError: If no picture can be read.
    """
    batches = pictures.read_batches(network.image_size, run.crop_share, workers=workers, on_skipped=on_skipped)
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
    return RestrictedPredictions(np.concatenate(confidence), np.concatenate(correct))


def compute_aurra(predictions: RestrictedPredictions) -> float:
    """Average over k the accuracy of the k most confident: the area under the response rate accuracy curve."""
    order = np.argsort(-predictions.confidence, kind="stable")
    return float(np.mean(np.cumsum(predictions.correct[order]) / np.arange(1, len(order) + 1)))


def detect(foreign: Floats, familiar: Floats) -> Detection:
    """Tell foreign pictures by a low confidence.

    Args:
        foreign: Confidence of pictures that are of no class, the positives (foreign,).
        familiar: Confidence of pictures of known classes, the negatives (familiar,).

    Returns:
        Average precision, the area under the ROC curve, and the share of false alarms at a recall of 95 %.
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
