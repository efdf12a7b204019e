"""What one step of AdamW shows of the gradient behind it.

The first step of a new AdamW moves a weight, but for weight decay, by g / (|g| + epsilon) of the learning rate. Of
entries far above epsilon it seems to leave the sign alone. But each falls short of a whole step by epsilon / (|g| +
epsilon), and weights in float32 tell a millionth of a usual step. So an entry is known as well as that: exactly near
epsilon, to some percent a thousand times above it, and from some size on by its sign and a lower bound.

Gradients of an honest server's weights are mostly too large. One that sends weights of its own making can make them
small (``server.modifications``).

What the weights were before, and the recipe, the server knows. Later steps are at weights that it never saw, so that a
sum of several is not taken apart.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError
from fedmjp.models.entrance import Entrance
from fedmjp.records import Upload
from fedmjp.threat import FLOAT32, ThreatModel

EPSILON = 1e-8  # torch's default, which recipes keep
COMPUTED = 6 * FLOAT32  # relative error of a step as float32 arithmetic computes it
SHOWN = 0.1  # of a tensor's norm: what may be unknown of a gradient that counts as one
# What leaves the entries of an update as they are.
WHOLE: frozenset[Mark] = frozenset({"shuffled", "masked", "withheld"})


class Moves(NamedTuple):
    """How far the entries of a tensor moved against their gradient, in learning rates, and how well that is known."""

    share: Tensor  # float64, of magnitude 1 at most
    error: Tensor  # float64, at most

    @property
    def least(self) -> Tensor:
        """The smallest magnitude of the gradient's entries."""
        return _magnitude((self.share.abs() - self.error).clamp(min=0))

    @property
    def most(self) -> Tensor:
        """The largest; endless where nothing is missing of a whole step."""
        return _magnitude(self.share.abs() + self.error)

    @property
    def gradient(self) -> Tensor:
        """The likeliest gradient; where there is no largest magnitude, a sign."""
        inside = self.most.isfinite()
        return self.share.sign() * _magnitude(self.share.abs().where(inside, 0.0)).where(inside, 1.0)


def adamw_refusal(threat: ThreatModel) -> str | None:
    """Why a delta of AdamW shows no gradient, whatever its size; None if it may, or AdamW took no step."""
    if threat.local_optimiser != "adamw":
        return None
    if threat.local_steps > 1:
        return (
            f"reads one step of AdamW, not {threat.local_steps}: later ones are at weights that the server never saw, "
            "and divide every entry by the sizes that it had so far"
        )
    if changed := [defence.name for defence in threat.pipeline.made if not defence.marks <= WHOLE]:
        return f"reads a step of AdamW to its last digits, which {changed[0]} changes"
    return None


def as_gradient(threat: ThreatModel) -> ThreatModel:
    """The threat model of the uploads that ``gradient_behind`` makes."""
    shown = {"update": "gradient", "local_optimiser": "sgd", "local_weight_decay": 0.0}
    return threat.model_copy(update=shown)


def gradient_behind(upload: Upload, model: Entrance, threat: ThreatModel, *, signs: bool = False) -> Upload:
    """The upload as the gradient that its step shows, float32.

    Others of the client are kept if the server had sent the same weights for them.

    Args:
        upload: The weight delta of one step.
        model: With the weights that the server had sent.
        threat: States the recipe; ``adamw_refusal`` of it is None.
        signs: Whether the reader asks for signs alone. Entries of which no size is shown are then 1 or -1.

    Raises:
        AttackFailedError: If the sizes of a tensor's entries are not shown.
    """
    tensors = {}
    for name in upload.tensors:
        moved = moves(upload, name, model, threat)
        if not signs and (moved.most - moved.least).norm() > SHOWN * moved.gradient.norm():
            known = (moved.most - moved.least <= SHOWN * moved.least).double().mean()
            raise AttackFailedError(
                f"a step of AdamW shows too little of the gradient of {name}: {100 * float(known):.0f} % of its "
                "entries to a tenth, of others little more than the sign"
            )
        tensors[name] = moved.gradient.float()
    same = [other for other in upload.others if other.weights == upload.weights]
    others = tuple(gradient_behind(other, model, threat, signs=signs) for other in same)
    return replace(upload, tensors=tensors, kind="gradient", others=others)


def moves(upload: Upload, name: str, model: Entrance, threat: ThreatModel) -> Moves:
    """How far the entries of one tensor of an upload moved; those that weight decay alone moved did not, exactly."""
    before = model.get_parameter(name).detach()
    delta = upload.tensors[name].to(before.device)
    decayed = before * (1 - threat.local_weight_decay * threat.local_learning_rate)
    after = before.double() + delta.double()
    steps = (decayed.double() - after) / threat.local_learning_rate
    rounded = FLOAT32 * (after.abs() + delta.double().abs()) / threat.local_learning_rate
    error = torch.where(steps == 0, 0.0, rounded + COMPUTED * steps.abs())
    return Moves(steps.clamp(-1, 1), error)


def _magnitude(share: Tensor) -> Tensor:
    """The size of a gradient that moves by a share of the learning rate; endless from a whole one on."""
    below = share < 1
    return torch.where(below, EPSILON * share / (1 - share.where(below, 0.0)), torch.inf)
