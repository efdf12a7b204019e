"""Which labels an upload was computed from, read off the gradient of the classifier's bias."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from fedmjp.attacks.base import Attack, on_device
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models import names
from fedmjp.models.entrance import Entrance
from fedmjp.records import Features, Upload
from fedmjp.threat import ThreatModel

CERTAIN = 0.05  # of the step 1 / B that one label makes; what is nearer to zero may be noise
UNSURE = 0.1  # of a batch that the gradient shows: below it the model knows its labels
PLAIN = (0.55, 1.5)  # factors on the loss that unsure predictions alone may seem to show


def labels_of(upload: Upload, model: Entrance, threat: ThreatModel) -> tuple[int, ...]:
    """Return the labels behind an upload, sorted: those that the attacker is granted, else recovered ones.

    With mean cross-entropy the gradient of the head's bias at class c is p_c - n_c / B, where p_c is
    the mean predicted probability and n_c the number of pictures of class c. Every entry that is
    negative beyond noise is therefore a label that occurs. The rest of the batch goes, one
    picture at a time, to the class with the lowest remainder after adding 1 / B per label already
    given. For one picture this is the only negative entry and certain. For a batch it is exact while
    the predictions are far from certain: a repeated label hides where its p_c comes near n_c / B.
    Label smoothing s, which the threat model states, gives s / K to all K classes and leaves 1 - s of
    a label: that is undone first, and one picture's is certain while its prediction is less sure than 1 - s.
    A delta of several SGD steps is read as the mean of their gradients. A factor on the loss (clipping, accumulation,
    a sum in place of a mean) is estimated where it is far from 1, see ``_factor``.

    Args:
        upload: With its labels, or the gradient of the head's bias.
        model: The model that the server had sent.
        threat: States label smoothing and the recipe of a delta.

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
    smoothing = threat.label_smoothing
    gradient = mean_gradient(upload, bias, model, threat)
    return tuple(sorted(_fill_labels(gradient / _factor(gradient, pictures, smoothing), pictures, smoothing)))


def _fill_labels(gradient: Tensor, pictures: int, smoothing: float) -> list[int]:
    """List labels: classes that are negative beyond noise, then whichever class has the lowest remainder."""
    remainder = gradient + smoothing / len(gradient)
    share = (1 - smoothing) / pictures  # what a label takes
    negative = (remainder < -CERTAIN * share).nonzero().flatten()
    labels: list[int] = negative[remainder[negative].argsort()][:pictures].tolist()  # these are certain
    remainder[labels] += share
    while len(labels) < pictures:
        labels.append(int(torch.argmin(remainder)))
        remainder[labels[-1]] += share
    return labels


@dataclass(frozen=True)
class LastLayer:
    """The last linear layer, as the server sent it, and the mean gradient of it; None where a tensor was not sent."""

    weight: Tensor  # (classes, dim); one row where one logit stands for two classes
    bias: Tensor | None  # (classes,)
    weight_gradient: Tensor | None
    bias_gradient: Tensor | None


def count_labels(layer: LastLayer, pictures: int, smoothing: float = 0.0) -> Tensor:
    """Count how many pictures of each class are behind a mean gradient of cross-entropy, as (classes,) int64.

    With weight and bias: each class's mean feature is about the ratio of its two gradients, the layer answers it with
    probabilities P, and the counts n solve (P^T - 1) n = g B, n >= 0 (iLRG). Where the gradient shows less than
    ``UNSURE`` of a batch the model is sure, the ratio is of nothing, and ``labels_of`` is exact more often. With the
    weight alone the gradient is about an outer product of g and the mean feature, whose largest entry is taken for a
    class without pictures. One logit z is the pair (0, z); its mean probability is taken from the bias.

    Args:
        layer: Whose gradient was sent.
        pictures: How many are counted.
        smoothing: Of the labels.

    Raises:
        AttackNotApplicableError: If neither gradient tells the classes.

    References:
        Ma et al., "Instance-wise Batch Label Restoration via Gradients in Federated Learning", ICLR 2023.
    """
    if len(layer.weight) == 1:
        if layer.bias_gradient is None or layer.bias is None:
            raise AttackNotApplicableError("one logit without a bias does not tell its two classes")
        positives = pictures * float(torch.sigmoid(layer.bias.double()) - layer.bias_gradient.double())
        return _round_counts(torch.tensor([pictures - positives, positives]), pictures)
    gradient, weights = layer.bias_gradient, layer.weight_gradient
    if gradient is None:
        if weights is None or not weights.any():
            raise AttackNotApplicableError("neither weight nor bias of the last layer was sent")
        gradient = _gradient_of_bias(weights.double())
    gradient = gradient.double() / _factor(gradient.double(), pictures, smoothing)
    shown_share = float(gradient.clamp_max(0).abs().sum())
    if weights is None or layer.bias is None or layer.bias_gradient is None or shown_share < UNSURE:
        return torch.bincount(torch.tensor(_fill_labels(gradient, pictures, smoothing)), minlength=len(gradient))
    unsmoothed = (gradient + smoothing / len(gradient)) / (1 - smoothing) - smoothing / len(gradient)
    means = (weights.double() / layer.bias_gradient.double()[:, None]).nan_to_num(0.0, 0.0, 0.0)
    answers = torch.softmax(means @ layer.weight.double().mT + layer.bias.double(), 1)
    present = gradient < 0
    answers[~present] = answers[present].mean(0)
    equations = torch.cat([answers.mT - torch.eye(len(gradient)), torch.ones(1, len(gradient))])
    right = torch.cat([unsmoothed * pictures, torch.tensor([float(pictures)])])
    from scipy.optimize import nnls  # noqa: PLC0415 (takes a quarter of a second to import)

    return _round_counts(torch.from_numpy(nnls(equations.numpy(), right.numpy())[0]), pictures)


def _gradient_of_bias(weights: Tensor) -> Tensor:
    """Estimate the bias's gradient (classes,) from the weight's (classes, dim): the factor of its nearest product."""
    left_vectors, _, right = torch.linalg.svd(weights, full_matrices=False)
    direction = left_vectors[:, 0] * torch.sign(right[0].sum())  # features behind a ReLU are positive
    gradient: Tensor = direction / (len(direction) * direction.max().clamp_min(torch.finfo(direction.dtype).tiny))
    return gradient


def _round_counts(counts: Tensor, pictures: int) -> Tensor:
    """Round counts (classes,) to whole numbers with the right sum: the largest remainders are rounded up."""
    positive = counts.double().clamp_min(0)
    scaled = positive * pictures / positive.sum().clamp_min(1e-30)
    whole = scaled.floor()
    whole[(scaled - whole).argsort(descending=True)[: pictures - int(whole.sum())]] += 1
    return whole.long()


def _factor(gradient: Tensor, pictures: int, smoothing: float) -> float:
    """Estimate the factor on the loss behind the gradient (classes,) of the head's bias; 1 where it may be that.

    Classes without a label show their mean probability p, and it is about the same for those with one: there p - g_c is
    n_c / B, and adds up to the factor. Predictions that are confident and right look like a small factor, and counts
    come out right for both. Fewer classes than pictures leave too few without a label.
    """
    negative = gradient < -CERTAIN * gradient.abs().max()
    if len(gradient) < pictures or bool(negative.all()) or not bool(negative.any()):
        return 1.0
    factor = float((gradient[~negative].mean() - gradient[negative]).sum()) / (1 - smoothing)
    return factor if math.isfinite(factor) and not PLAIN[0] <= factor <= PLAIN[1] else 1.0


def mean_gradient(upload: Upload, name: str, model: Entrance, threat: ThreatModel) -> Tensor:
    """Return one tensor of an upload as a gradient, float64: a delta divided by minus steps and learning rate.

    Args:
        upload: A gradient or a weight delta of SGD.
        name: The tensor's name.
        model: States the device.
        threat: States steps and learning rate.
    """
    tensor = on_device(upload, name, model)
    if upload.kind == "gradient":
        return tensor
    return -tensor / (threat.gradients_in_delta * threat.local_learning_rate)


class Labels(Attack[Entrance, Features]):
    """Labels of a batch, or of the batches of several clients, from the gradient of the head's bias alone.

    Example:
        >>> import fedmjp
        >>> scenario = fedmjp.Scenario(model={"name": "deit_micro", "image_size": 32, "patch_size": 8})
        >>> exchange = scenario.exchange(fedmjp.bundled_pictures(1, size=32))
        >>> fedmjp.attack("labels", exchange.upload, scenario).labels == exchange.private.labels
        tensor([True])
    """

    name = "labels"
    paper = "Zhao et al., iDLG, 2020 (one picture); Yin et al., See through Gradients, CVPR 2021, section 3.1 (batch)"
    summary = "labels of the whole batch, with multiplicity, from the gradient of the head's bias"
    requires = "the gradient of the head's bias; labels that are not told"
    exploits = "mean cross-entropy: the gradient at a class is its mean probability less its share of the batch"
    reveals = "labels"
    takes_sums = True
    reads_signs = True
    # Puzzles and masks move probabilities, never labels; to noise it is blind.
    handled = frozenset({"shuffled", "masked", "summed"})

    def tensors(self, model: Entrance) -> Sequence[str]:
        """Name the gradient of the head's bias."""
        del model
        return [names.HEAD_BIAS]

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Refuse labels that the server is granted anyway."""
        del model
        return "the server is told the labels: there is nothing to find out" if threat.labels_known else None

    @override
    def reconstruct(self, upload: Upload, model: Entrance, threat: ThreatModel, generator: torch.Generator) -> Features:
        del generator  # nothing is drawn
        return Features(torch.tensor(labels_of(upload, model, threat)))
