"""Which labels an upload was computed from, read off the gradient of the classifier's bias."""

import math
from collections.abc import Sequence

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
    remainder = gradient / _factor(gradient, pictures, smoothing) + smoothing / len(gradient)
    share = (1 - smoothing) / pictures  # what a label takes
    negative = (remainder < -CERTAIN * share).nonzero().flatten()
    labels: list[int] = negative[remainder[negative].argsort()][:pictures].tolist()  # these are certain
    remainder[labels] += share
    while len(labels) < pictures:
        labels.append(int(torch.argmin(remainder)))
        remainder[labels[-1]] += share
    return tuple(sorted(labels))


def _factor(gradient: Tensor, pictures: int, smoothing: float) -> float:
    """Estimate the factor on the loss behind the gradient (classes,) of the head's bias; 1 where it may be that.

    Classes without a label show their mean probability p, and it is about the same for those with one: there p - g_c is
    n_c / B, and adds up to the factor. Predictions that are confident and right look like a small factor, and counts
    come out right for both. Fewer classes than pictures leave too few without a label.
    """
    negative = gradient < -CERTAIN * gradient.abs().max()
    if len(gradient) < pictures or bool(negative.all()) or not bool(negative.any()):
        return 1.0
    shown = float((gradient[~negative].mean() - gradient[negative]).sum()) / (1 - smoothing)
    return shown if math.isfinite(shown) and not PLAIN[0] <= shown <= PLAIN[1] else 1.0


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
