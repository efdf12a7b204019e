"""The search where of gradients signs alone are left: a candidate's entries are to be on the same sides of zero.

An entry says the more the nearer it is to zero, and which are near only the picture tells. So a first search looks at
all of them, by first derivatives, up to a region around zero that gets narrower. Near its end the entries that are
nearest to zero are linear in the picture, and what their sides say is believed (``beliefs``).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.attacks.entries import Entries
from fedmjp.attacks.gauss_newton.beliefs import Belief, believed
from fedmjp.attacks.gauss_newton.descent import AT_A_TIME, Tell, descend
from fedmjp.attacks.gauss_newton.factors import Factors
from fedmjp.attacks.gauss_newton.levenberg import Minimum
from fedmjp.attacks.gauss_newton.picked import KnownEntries, PickedResiduals, made_entries
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.models import names

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
        """Of signs times their tensor's mean magnitude; those of the patch embedding do not count."""
        sent = {name: tensor for name, tensor in tensors.items() if name != names.PATCH_WEIGHT and tensor.any()}
        signs = {name: tensor.sign().float() for name, tensor in sent.items()}
        return SignConstraints(signs, {name: float(tensor.abs().max()) for name, tensor in sent.items()}, residuals)

    @property
    def anywhere(self) -> "SignConstraints":
        """Those that do not tell where a token stands."""
        signs = {name: signs for name, signs in self.signs.items() if name != names.POSITION_EMBEDDING}
        return SignConstraints(signs, self.sizes, self.residuals)

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(signs.numel() for signs in self.signs.values())

    def margins(self, patches: Tensor) -> dict[str, Tensor]:
        """How far entries of a candidate (patches, values) are on the right side, in mean magnitudes of its own.

        By its own, no candidate is the better for larger gradients.
        """
        factors = self.residuals.factors(patches)
        gradients = {name: factors.gradient(name) for name in self.signs}
        return {name: self.signs[name] * made / made.abs().mean() for name, made in gradients.items()}

    def loss(self, patches: Tensor, width: float) -> Tensor:
        """Twice the logistic loss of a candidate."""
        margins = torch.cat([margins.flatten() for margins in self.margins(patches).values()])
        return 2 * F.softplus(-margins / width).sum()

    def wrong(self, patches: Tensor) -> int:
        """How many entries of a candidate are on the wrong side."""
        return sum(int((margins < 0).sum()) for margins in self.margins(patches).values())

    def nearest(self, patches: Tensor, most: int) -> dict[str, KnownEntries]:
        """The entries of a candidate that are on the wrong side or nearest to it; values are their signs."""
        margins = self.margins(patches)
        told = torch.cat([each[self.signs[name] != 0] for name, each in margins.items()])
        bound = told.kthvalue(min(most, len(told))).values
        return {name: self._those(name, each <= bound) for name, each in margins.items()}

    def _those(self, name: str, chosen: Tensor) -> KnownEntries:
        signs = self.signs[name].view(len(chosen), -1)
        rows, columns = (chosen.view(signs.shape) & (signs != 0)).nonzero().T
        values = signs[rows, columns].double()
        return KnownEntries(rows, columns, values, torch.ones_like(values), signs.numel())


def search(
    sides: SignConstraints, space: OpenSpace, start: Tensor, widths: Sequence[float], until: float, tell: Tell
) -> Minimum:
    """What is believed at the end of a search, which ``time.thread_time()`` may cut short at ``until``.

    Args:
        sides: Of an upload.
        space: That is searched.
        start: (unknowns,) float64.
        widths: In mean magnitudes, one after the other: where an entry may still be on the other side.
        until: When it is to end.
        tell: Is told how far it is.
    """
    point, taken = start.float(), 0
    for width in widths:
        point = point.detach().requires_grad_()
        cost = partial(_cost, sides, space, width)
        for loss in descend(cost, point, STEPS):
            taken += AT_A_TIME
            tell(taken, len(widths) * STEPS, loss)
            if time.thread_time() > until:
                break
    last = point.detach().double()
    belief = _belief(sides, space, last)
    before, after = (sides.wrong(space.patches(unknowns.float())[0]) for unknowns in (last, belief.mean))
    best = belief.mean if after <= FAR * before else last  # else entries are not linear as far as that
    likelihood = float(sides.loss(space.patches(best.float())[0], widths[-1]))
    return Minimum(best, likelihood + float(best @ best), belief.precision, taken)


def _cost(sides: SignConstraints, space: OpenSpace, width: float, unknowns: Tensor) -> Tensor:
    return sides.loss(space.patches(unknowns)[0], width) + unknowns @ unknowns


def _belief(sides: SignConstraints, space: OpenSpace, point: Tensor) -> Belief:
    """Of the unknowns, by the sides of the entries that are nearest to zero."""
    near = sides.nearest(space.patches(point.float())[0], round(NEAREST * len(point)))

    def margins(factors: Factors) -> Tensor:
        entries = ((known, made_entries(name, known, factors) / sides.sizes[name]) for name, known in near.items())
        return torch.cat([made * known.values.to(made.dtype) for known, made in entries])

    with torch.no_grad():
        here = margins(sides.residuals.factors(space.patches(point.float())[0])).double()
    zero = torch.zeros_like(here)
    bounds = Entries(zero + BLURRED**2, low=zero, high=zero + torch.inf)
    return believed(here, sides.residuals.slopes(margins, space, point), point, bounds)
