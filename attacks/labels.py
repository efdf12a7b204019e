"""Which labels an upload was computed from, read off the gradient of the classifier's bias."""

import torch
from torch import Tensor

from attacks.base import on_device
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

CERTAIN = 0.05  # of the step 1 / B that one label makes; what is nearer to zero may be noise


def labels_of(upload: Upload, model: VitClassifier, threat: ThreatModel) -> tuple[int, ...]:
    """The labels behind an upload, sorted: those that the attacker was told, else recovered ones.

    With mean cross-entropy the gradient of the head's bias at class c is p_c - n_c / B, where p_c is
    the mean predicted probability and n_c the number of pictures of class c. Every entry that is
    negative beyond noise is therefore a label that occurs. What is left of the batch goes, one
    picture at a time, to the class with the lowest remainder after adding 1 / B per label already
    given. For one picture this is the only negative entry and certain. For a batch it is exact while
    the predictions are far from certain: a repeated label hides where its p_c comes near n_c / B.
    With label smoothing the lowest entry is still the best guess and no longer certain. Of a delta of
    several SGD steps, the mean of their gradients is read.

    Raises:
        AttackNotApplicableError: If the upload has neither labels nor a gradient of the head's bias.

    References:
        Zhao et al., "iDLG: Improved Deep Leakage from Gradients", 2020 (one picture); Yin et al., "See
        through Gradients", CVPR 2021, section 3.1 (batch); the counts follow from the formula above.
    """
    if upload.labels is not None:
        return tuple(sorted(upload.labels))
    bias, pictures = names.HEAD_BIAS, upload.num_examples
    if bias not in upload.tensors:
        raise AttackNotApplicableError(f"labels are unknown and the upload has no tensor {bias!r} to recover them from")
    remainder = mean_gradient(upload, bias, model, threat).clone()
    negative = (remainder < -CERTAIN / pictures).nonzero().flatten()
    labels: list[int] = negative[remainder[negative].argsort()][:pictures].tolist()  # these are certain
    remainder[labels] += 1 / pictures
    while len(labels) < pictures:
        labels.append(int(torch.argmin(remainder)))
        remainder[labels[-1]] += 1 / pictures
    return tuple(sorted(labels))


def mean_gradient(upload: Upload, name: str, model: VitClassifier, threat: ThreatModel) -> Tensor:
    """One tensor of the upload as a gradient, float64: a delta divided by minus steps and learning rate."""
    tensor = on_device(upload, name, model)
    if upload.kind == "gradient":
        return tensor
    return -tensor / (threat.local_steps * threat.local_learning_rate)
