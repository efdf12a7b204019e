"""The search where of gradients signs alone are left: a candidate's entries are to be on the same sides of zero.

An entry says the more the nearer it is to zero, and which are near only the picture tells. So a first search looks at
all of them, by first derivatives, up to a region around zero that gets narrower. Near its end the entries that are
nearest to zero are linear in the picture, and what their sides say is believed.

A belief is a normal distribution. Bounds on linear functions of the unknowns are replaced by normal observations that
have the same effect on what is believed (expectation propagation). Where a function is bounded on one side alone, the
mean of what is left lies well within, the likeliest point on the border.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.attacks.entries import Entries
from fedmjp.attacks.gauss_newton.factors import Factors
from fedmjp.attacks.gauss_newton.levenberg import Minimum
from fedmjp.attacks.gauss_newton.picked import KnownEntries, PickedResiduals, made_entries
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.attacks.gauss_newton.whole import AT_A_TIME, Tell, descend
from fedmjp.models import names

ROUNDS = 40  # at most
SETTLED = 1e-3  # of the mean's norm: what changes less is settled


@dataclass(frozen=True)
class Belief:
    """A normal distribution."""

    mean: Tensor  # (unknowns,) float64
    precision: Tensor  # (unknowns, unknowns) float64


def believed(values: Tensor, slopes: Tensor, at: Tensor, entries: Entries) -> Belief:
    """Compute what entries say of unknowns that had variance 1 each, about 0.

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
        last_mean, mean = mean, torch.cholesky_solve(pull[:, None], factor)[:, 0]
        if float((mean - last_mean).norm()) < SETTLED * float(mean.norm()):
            break
    return Belief(mean, precision)


WIDE, NARROW = (1.0, 0.3, 0.1, 0.03), (0.03, 0.01)  # from a start far off, and from tokens that were found
STEPS = 400  # for each width
NEAREST = 5.0  # entries whose sides are believed, per unknown
BLURRED = 3e-3  # mean magnitudes that a linear entry may be off by
FAR = 5.0  # times the entries on the wrong side: what is believed with so many does not count


@dataclass(frozen=True)
class SignConstraints:
    """Of all entries of some gradients.

    Attributes:
        signs: By tensor, (rows,) or (rows, columns) float32: -1, 0 or 1.
        sizes: By tensor the mean magnitude that was sent.
        residuals: What makes a candidate's gradients.
    """

    signs: Mapping[str, Tensor]
    sizes: Mapping[str, float]
    residuals: PickedResiduals

    @staticmethod
    def of(tensors: Mapping[str, Tensor], residuals: PickedResiduals) -> "SignConstraints":
        """Read the signs; those of the patch embedding do not count.

        Args:
            tensors: By name, signs times their tensor's mean magnitude.
            residuals: Computes a candidate's gradients.
        """
        sent = {name: tensor for name, tensor in tensors.items() if name != names.PATCH_WEIGHT and tensor.any()}
        signs = {name: tensor.sign().float() for name, tensor in sent.items()}
        return SignConstraints(signs, {name: float(tensor.abs().max()) for name, tensor in sent.items()}, residuals)

    @property
    def anywhere(self) -> "SignConstraints":
        """Drop the signs that tell where a token stands."""
        signs = {name: signs for name, signs in self.signs.items() if name != names.POSITION_EMBEDDING}
        return SignConstraints(signs, self.sizes, self.residuals)

    @property
    def count(self) -> int:
        """Count the signs."""
        return sum(signs.numel() for signs in self.signs.values())

    def margins(self, patches: Tensor) -> dict[str, Tensor]:
        """Return how far a candidate's entries are on the right side, in mean magnitudes of its own.

        By its own, no candidate is the better for larger gradients.

        Args:
            patches: (patches, values) of the candidate.
        """
        factors = self.residuals.factors(patches)
        gradients = {name: factors.gradient(name) for name in self.signs}
        return {name: self.signs[name] * gradient / gradient.abs().mean() for name, gradient in gradients.items()}

    def loss(self, patches: Tensor, width: float) -> Tensor:
        """Return twice the logistic loss of a candidate.

        Args:
            patches: (patches, values) of the candidate.
            width: Around zero, in mean magnitudes.
        """
        margins = torch.cat([margins.flatten() for margins in self.margins(patches).values()])
        return 2 * F.softplus(-margins / width).sum()

    def wrong(self, patches: Tensor) -> int:
        """Count a candidate's entries on the wrong side.

        Args:
            patches: (patches, values) of the candidate.
        """
        return sum(int((margins < 0).sum()) for margins in self.margins(patches).values())

    def nearest(self, patches: Tensor, most: int) -> dict[str, KnownEntries]:
        """Select a candidate's entries on the wrong side or nearest to it; values are their signs.

        Args:
            patches: (patches, values) of the candidate.
            most: At most so many.
        """
        margins = self.margins(patches)
        signed_margins = torch.cat([margin[self.signs[name] != 0] for name, margin in margins.items()])
        bound = signed_margins.kthvalue(min(most, len(signed_margins))).values
        return {name: self._those(name, margin <= bound) for name, margin in margins.items()}

    def _those(self, name: str, is_selected: Tensor) -> KnownEntries:
        signs = self.signs[name].view(len(is_selected), -1)
        rows, columns = (is_selected.view(signs.shape) & (signs != 0)).nonzero().T
        values = signs[rows, columns].double()
        return KnownEntries(rows, columns, values, torch.ones_like(values), signs.numel())


def search(
    sides: SignConstraints, space: OpenSpace, start: Tensor, widths: Sequence[float], until: float, tell: Tell
) -> Minimum:
    """Search for the unknowns that signs allow; return what is believed at the end.

    Args:
        sides: Of an upload.
        space: That is searched.
        start: (unknowns,) float64.
        widths: In mean magnitudes, one after the other: where an entry may still be on the other side.
        until: When it is to end.
        tell: Is told how far it is.
    """
    point, step_count = start.float(), 0
    for width in widths:
        point = point.detach().requires_grad_()
        cost = partial(_cost, sides, space, width)
        for loss in descend(cost, point, STEPS):
            step_count += AT_A_TIME
            tell(step_count, len(widths) * STEPS, loss)
            if time.thread_time() > until:
                break
    last = point.detach().double()
    belief = _belief(sides, space, last)
    wrong_before, wrong_after = (sides.wrong(space.patches(unknowns.float())[0]) for unknowns in (last, belief.mean))
    best = belief.mean if wrong_after <= FAR * wrong_before else last  # else entries are not linear as far as that
    likelihood = float(sides.loss(space.patches(best.float())[0], widths[-1]))
    return Minimum(best, likelihood + float(best @ best), belief.precision, step_count)


def _cost(sides: SignConstraints, space: OpenSpace, width: float, unknowns: Tensor) -> Tensor:
    return sides.loss(space.patches(unknowns)[0], width) + unknowns @ unknowns


def _belief(sides: SignConstraints, space: OpenSpace, point: Tensor) -> Belief:
    """Compute what the sides of the entries nearest to zero say of the unknowns."""
    near = sides.nearest(space.patches(point.float())[0], round(NEAREST * len(point)))

    def margins(factors: Factors) -> Tensor:
        parts = []
        for name, entries in near.items():
            values = made_entries(name, entries, factors) / sides.sizes[name]
            parts.append(values * entries.values.to(values.dtype))
        return torch.cat(parts)

    with torch.no_grad():
        current = margins(sides.residuals.factors(space.patches(point.float())[0])).double()
    zero = torch.zeros_like(current)
    bounds = Entries(zero + BLURRED**2, low=zero, high=zero + torch.inf)
    return believed(current, sides.residuals.slopes(margins, space, point), point, bounds)
