"""What is believed of unknowns, a normal distribution, when linear functions of them lie between bounds.

Bounds are replaced by normal observations that have the same effect on what is believed (expectation propagation).
Where a function is bounded on one side alone, the mean of what is left lies well within, the likeliest point on the
border.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.entries import Entries

ROUNDS = 40  # at most
SETTLED = 1e-3  # of the mean's norm: what changes less is settled


@dataclass(frozen=True)
class Belief:
    """A normal distribution."""

    mean: Tensor  # (unknowns,) float64
    precision: Tensor  # (unknowns, unknowns) float64


def believed(values: Tensor, slopes: Tensor, at: Tensor, entries: Entries) -> Belief:
    """What entries say of unknowns that were of variance 1 each, about 0.

    Args:
        values: (entries,) where the unknowns are ``at``.
        slopes: (unknowns, entries), of these.
        at: (unknowns,) float64.
        entries: Bounds of each.
    """
    slopes = slopes.double()
    offsets = values.double() - at @ slopes
    mean, precision = torch.zeros_like(at), torch.eye(len(at)).to(at)
    factor, last = precision, None
    for _ in range(ROUNDS):
        spread = torch.linalg.solve_triangular(factor, slopes, upper=False).square().sum(dim=0)
        last = entries.observed(mean @ slopes + offsets, spread, last)
        precision = (slopes * last.precision) @ slopes.mT
        precision.diagonal().add_(1.0)
        factor = torch.linalg.cholesky(precision)
        pull = slopes @ (last.precision * (last.value - offsets))
        before, mean = mean, torch.cholesky_solve(pull[:, None], factor)[:, 0]
        if float((mean - before).norm()) < SETTLED * float(mean.norm()):
            break
    return Belief(mean, precision)
