"""The client's computation behind one upload: which update, of how many pictures, by which steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field

from fedmjp.arithmetic import Arithmetic
from fedmjp.config import Config, LocalOptimiser, UpdateKind


class SgdRule(NamedTuple):
    """Settings of one step of SGD, as torch.optim.SGD takes them."""

    rate: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


class UnrolledSgd(NamedTuple):
    """Weights after steps of SGD, as a multiple of the first weights less a weighted sum of the steps' gradients."""

    kept: float  # factor of the first weights: below 1 with weight decay
    shares: tuple[float, ...]  # factor of each step's gradient


def unroll_sgd(rules: Sequence[SgdRule]) -> UnrolledSgd:
    """Express SGD's last weights by its first weights and its gradients: all that it does is linear in these.

    Args:
        rules: Settings of each step, in order; the first step begins without momentum.
    """
    import numpy as np  # noqa: PLC0415 (commands that need no numbers start without it)

    weights, velocity = np.eye(1, 1 + len(rules))[0], np.zeros(1 + len(rules))  # of the first weights, each gradient
    for step, rule in enumerate(rules):
        move = rule.weight_decay * weights
        move[1 + step] += 1.0
        velocity = rule.momentum * velocity + (1.0 - (rule.dampening if step else 0.0)) * move
        weights = weights - rule.rate * (move + rule.momentum * velocity if rule.nesterov else velocity)
    return UnrolledSgd(float(weights[0]), tuple((-weights[1:]).tolist()))


# An option that was not used is stated by no record and no digest, as before the option existed.
class ClientStep(Config):
    """The work of a client behind one upload: a gradient, or the weight delta of some steps on one batch."""

    update: UpdateKind = Field("gradient", description="FedSGD gradient or FedAvg delta")
    batch_size: int = Field(1, ge=1, description="pictures of one client behind one update")
    local_steps: int = Field(1, ge=1, description="optimiser steps behind one weight delta, all on the same batch")
    local_learning_rate: float = Field(0.01, gt=0, allow_inf_nan=False, description="of these steps")
    local_momentum: float = Field(0.0, ge=0, lt=1, exclude_if=operator.not_, description="of these steps")
    local_batch_size: int | None = Field(
        None, ge=1, exclude_if=operator.not_, description="pictures of a step, in turn; by default all"
    )
    local_optimiser: LocalOptimiser = Field(
        "sgd", exclude_if="sgd".__eq__, description="of these steps; its state is new in every round"
    )
    local_weight_decay: float = Field(0.0, ge=0.0, lt=1.0, exclude_if=operator.not_, description="of these steps")
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0, description="of the loss, as torch's cross-entropy takes it")
    mixup: float = Field(
        0.0,
        ge=0.0,
        allow_inf_nan=False,
        exclude_if=operator.not_,
        description="alpha of the one share that mixes pairs",
    )
    crop_scale: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        exclude_if=operator.not_,
        description="smallest share of a picture that a random crop keeps, drawn for each upload",
    )
    arithmetic: Arithmetic = Field(
        "float32", exclude_if="float32".__eq__, description="of the clients' networks; tf32 on CUDA alone"
    )

    @property
    def unrolled(self) -> UnrolledSgd:
        """Return what the steps of SGD leave of the first weights, and the shares of gradients in learning rates."""
        decay = self.local_learning_rate * self.local_weight_decay
        return unroll_sgd([SgdRule(1.0, self.local_momentum, weight_decay=decay)] * self.local_steps)

    def require_consistent(self) -> None:
        """Refuse values that contradict each other.

        Raises:
            ValueError: With the reason and the value to change.
        """
        gradient, adamw, steps = self.update == "gradient", self.local_optimiser == "adamw", self.local_steps
        momentum, decay, part = self.local_momentum, self.local_weight_decay, self.local_batch_size
        of_one_step = next((name for name in ("mixup", "crop_scale") if getattr(self, name) and steps > 1), "")
        contradictions = (
            (gradient and steps > 1, f"{steps} local steps make a weight delta: set update to delta"),
            (
                self.batch_size % (part or 1),
                f"local_batch_size {part} does not divide {self.batch_size} pictures: make batch_size a multiple of it",
            ),
            (
                gradient and (momentum or part),
                "local_momentum and local_batch_size are of local steps: set update to delta",
            ),
            (gradient and decay and not adamw, "local_weight_decay is of local steps: set update to delta"),
            (gradient and adamw, "local_optimiser adamw is of local steps: set update to delta"),
            (momentum and adamw, f"local_momentum {momentum:g} is of SGD, AdamW has its own: set it to 0"),
            (
                self.mixup and self.batch_size % 2,
                f"mixup mixes pairs, which {self.batch_size} pictures are not: set an even batch_size",
            ),
            (
                of_one_step,
                f"{of_one_step} is of one step, not of {steps}: leave one of the two out",
            ),
        )
        for contradicts, reason in contradictions:
            if contradicts:
                raise ValueError(reason)
