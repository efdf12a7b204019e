"""Gradients behind steps of AdamW.

The first step of a new AdamW moves a weight, but for weight decay, by g / (|g| + epsilon) of the learning rate. It
seems to leave the sign alone of entries far above epsilon. But each falls short of a whole step by epsilon / (|g| +
epsilon), and weights in float32 tell a millionth of a usual step. So an entry is known as well as that: exactly near
epsilon, to some percent a thousand times above it, and from some size on by its sign and a lower bound.

The same holds of several steps where one of them alone has a gradient, or each the same: how far a weight moved is then
a function of that gradient, which grows with it. Gradients of an honest server's weights are mostly too large, and
those of every step others. A server that sends weights of its own making can have both
(``fedmjp.server.modifications``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError
from fedmjp.threat import FLOAT32, ThreatModel

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.models.entrance import Entrance
    from fedmjp.records import Upload

FIRST_MOMENT, SECOND_MOMENT, EPSILON = 0.9, 0.999, 1e-8  # torch's defaults, which recipes keep
COMPUTED = 6 * FLOAT32  # relative error of a step as float32 arithmetic computes it
SHOWN = 0.1  # of a tensor's norm: what may be unknown of a gradient that counts as one
# What leaves the entries of an update as they are.
WHOLE: frozenset[Mark] = frozenset({"shuffled", "masked", "withheld"})


class Moves(NamedTuple):
    """The distance that the entries of a tensor moved against their gradient, in learning rates, and its error."""

    share: Tensor  # float64
    error: Tensor  # float64, at most


def changed_entries(threat: ThreatModel) -> str | None:
    """Say why a delta of AdamW does not show its last digits.

    Args:
        threat: States the defences.

    Returns:
        The refusal, which names the first defence that changes entries; None without one.
    """
    changed = [defence.name for defence in threat.pipeline.defences if not defence.marks <= WHOLE]
    return f"reads steps of AdamW to their last digits, which {changed[0]} changes" if changed else None


def adamw_refusal(threat: ThreatModel) -> str | None:
    """Say why a delta of an honest server's weights shows no gradient, whatever its size.

    Args:
        threat: States optimiser, steps and defences.

    Returns:
        The refusal; None if the delta may show the gradient.
    """
    if threat.local_optimiser != "adamw":
        return None
    if threat.local_steps > 1:
        return (
            f"reads one step of AdamW, not {threat.local_steps}: later ones are at weights that the server never saw, "
            "and divide every entry by the sizes that it had so far"
        )
    return changed_entries(threat)


def as_gradient(threat: ThreatModel) -> ThreatModel:
    """Return the threat model of the uploads that ``gradient_behind`` returns.

    Args:
        threat: The threat model of the weight deltas.
    """
    recipe = {"local_optimiser": "sgd", "local_weight_decay": 0.0, "local_steps": 1, "local_batch_size": None}
    return threat.model_copy(update={"update": "gradient", **recipe})


def gradient_behind(
    upload: Upload, model: Entrance, threat: ThreatModel, *, at: Sequence[int] = (1,), signs: bool = False
) -> Upload:
    """Turn a weight delta of AdamW into the gradient that its steps show, in float32.

    The client's further uploads are kept if the server had sent the same weights for them.

    Args:
        upload: The weight delta.
        model: With the weights that the server had sent.
        threat: States the recipe.
        at: Which steps, from 1, had this gradient; all others had none.
        signs: Whether the reader asks for signs alone. Entries of which no size is shown are then 1 or -1.

    Raises:
        AttackFailedError: If the sizes of a tensor's entries are not shown.
    """
    tensors = {name: tensor_behind(upload, name, model, threat, at=at, signs=signs) for name in upload.tensors}
    matching = [sibling for sibling in upload.others if sibling.weights == upload.weights]
    siblings = tuple(gradient_behind(sibling, model, threat, at=at, signs=signs) for sibling in matching)
    return replace(upload, tensors=tensors, kind="gradient", others=siblings)


def tensor_behind(
    upload: Upload, name: str, model: Entrance, threat: ThreatModel, *, at: Sequence[int] = (1,), signs: bool = False
) -> Tensor:
    """Turn one tensor of a weight delta into a gradient, as ``gradient_behind`` does.

    Args:
        upload: The weight delta.
        name: The tensor's name.
        model: With the weights that the server had sent.
        threat: States the recipe.
        at: Which steps, from 1, had this gradient.
        signs: Whether signs alone are needed.

    Raises:
        AttackFailedError: If the sizes of its entries are not shown.
    """
    share, error = moves(upload, name, model, threat)
    size = share.abs()
    least, most = magnitude((size - error).clamp(min=0), threat, at), magnitude(size + error, threat, at)
    gradient = share.sign() * magnitude(size, threat, at).where(most.isfinite(), 1.0)
    if not signs and (most - least).norm() > SHOWN * gradient.norm():
        sharp = (most - least <= SHOWN * least).double().mean()
        raise AttackFailedError(
            f"a step of AdamW shows too little of the gradient of {name}: {100 * float(sharp):.0f} % of its entries to "
            "a tenth, of others little more than the sign"
        )
    return gradient.float()


def moves(upload: Upload, name: str, model: Entrance, threat: ThreatModel) -> Moves:
    """Measure how far the entries of a tensor moved beyond weight decay: exactly zero where decay alone acted.

    Args:
        upload: The weight delta.
        name: The tensor's name.
        model: With the weights that the server had sent.
        threat: States steps, learning rate and weight decay.
    """
    import torch

    sent = model.get_parameter(name).detach()
    delta = upload.tensors[name].to(sent.device)
    decayed = sent
    for _ in range(threat.local_steps):  # rounded after each, as the client's
        decayed = decayed * (1 - threat.local_weight_decay * threat.local_learning_rate)
    returned = sent.double() + delta.double()
    share = (decayed.double() - returned) / threat.local_learning_rate
    rounded = FLOAT32 * (threat.local_steps * returned.abs() + delta.double().abs()) / threat.local_learning_rate
    error = torch.where(share == 0, 0.0, rounded + COMPUTED * share.abs())
    return Moves(share, error)


def magnitude(moved: Tensor, threat: ThreatModel, at: Sequence[int] = (1,)) -> Tensor:
    """Invert the step of AdamW: return the size of the gradient that moves a weight so far.

    Args:
        moved: Distances in learning rates, at least 0.
        threat: States the recipe.
        at: Which steps, from 1, had this gradient.

    Returns:
        Sizes, infinite where the distance no longer tells them.
    """
    import torch

    far = _far(tuple(at), threat.local_steps, threat.local_weight_decay * threat.local_learning_rate).to(moved.device)
    sizes = _sizes().to(moved.device)
    place = torch.searchsorted(far, moved.contiguous()).clamp(1, len(far) - 1)
    part = (moved - far[place - 1]) / (far[place] - far[place - 1])
    between = EPSILON * (sizes[place - 1] + part * (sizes[place] - sizes[place - 1]))
    below = EPSILON * sizes[0] * moved / far[0]
    return torch.where(moved < far[0], below, between).masked_fill(moved >= far[-1], torch.inf)


@cache
def _sizes() -> Tensor:
    """Return the sizes of gradients, over epsilon, that the table tells apart."""
    import torch

    return torch.logspace(-10, 9, 200_000, dtype=torch.float64)


@lru_cache(maxsize=16)
def _far(at: tuple[int, ...], steps: int, decay: float) -> Tensor:
    """Tabulate the distance that gradients of these sizes move a weight."""
    import torch

    gradients = torch.zeros(steps, 1, dtype=torch.float64)
    gradients[[step - 1 for step in at]] = 1.0
    return total_move(gradients * EPSILON * _sizes(), decay)


def total_move(gradients: Tensor, decay: float) -> Tensor:
    """Add up the steps of AdamW, without weight decay itself, float64, in learning rates.

    Args:
        gradients: (steps, ...), one for every step.
        decay: Weight decay times learning rate: earlier moves decay with the weights.
    """
    import torch

    moved, first, second = (torch.zeros_like(gradients[0]) for _ in range(3))
    for step, gradient in enumerate(gradients, start=1):
        first = FIRST_MOMENT * first + (1 - FIRST_MOMENT) * gradient
        second = SECOND_MOMENT * second + (1 - SECOND_MOMENT) * gradient.square()
        mean, square = first / (1 - FIRST_MOMENT**step), second / (1 - SECOND_MOMENT**step)
        moved = moved * (1 - decay) + mean / (square.sqrt() + EPSILON)
    return moved
