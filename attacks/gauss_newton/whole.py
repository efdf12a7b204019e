"""All entries that noise is on at once, by first derivatives, from where some of them led.

Their Jacobian would be dear. That of some says how the cost curves along every direction, but for how many more there
are of them. In coordinates in which it curves alike everywhere, first derivatives need few steps.
"""

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmjp.attacks.gauss_newton.descent import AT_A_TIME, Tell, descend
from fedmjp.attacks.gauss_newton.levenberg import Minimum, squared
from fedmjp.attacks.gauss_newton.picked import PickedResiduals
from fedmjp.attacks.gauss_newton.space import OpenSpace

STEPS = 400  # of L-BFGS, at most, with one look at how the cost curves
LOOKS = 3  # at most: the cost curves otherwise where a search that has not ended is by then
SETTLED = 5e-6  # of the cost: what so many steps gain that ends the search


@dataclass(frozen=True)
class FullSearch:
    """A search that compares all entries.

    Attributes:
        every: That are compared.
        some: Drawn from them, whose Jacobian stands for that of all.
    """

    every: PickedResiduals
    some: PickedResiduals

    def search(
        self, space: OpenSpace, start: Tensor, gram: Tensor, until: float, tell: Tell, below: float = math.inf
    ) -> Minimum:
        """From a start near by, till nothing is gained, or ``time.thread_time()`` is ``until``.

        Args:
            space: That is searched.
            start: (unknowns,) float64.
            gram: How the cost curves there.
            until: When it is to end.
            tell: Is told how far it is: steps done, of so many, cost.
            below: Of a minimum that costs as much nothing more is asked: its ``gram`` is that of the start.
        """
        steps = 0
        for _ in range(LOOKS):
            found = self._descended(space, start, gram, until, tell)
            start, steps, ended = found.point, steps + found.steps, found.steps < STEPS
            if not found.cost < below:
                break
            gram = self.gram(space, start)
            if ended or time.thread_time() > until:
                break
        return replace(found, gram=gram, steps=steps)

    def _descended(self, space: OpenSpace, start: Tensor, gram: Tensor, until: float, tell: Tell) -> Minimum:
        root = torch.linalg.cholesky(gram)
        away = torch.zeros_like(start).requires_grad_()

        def point(away: Tensor) -> Tensor:
            moved: Tensor = torch.linalg.solve_triangular(root.mT, away[:, None], upper=True)[:, 0]
            return start + moved

        def cost(away: Tensor) -> Tensor:
            unknowns = point(away)
            left = self.every(space.patches(unknowns)[0])
            return left @ left + unknowns @ unknowns

        costs: list[float] = []
        for before in descend(cost, away, STEPS):
            costs.append(before)
            tell(AT_A_TIME * len(costs), STEPS, before)
            if (costs[1:] and costs[-2] - before < SETTLED * before) or time.thread_time() > until:
                break
        with torch.no_grad():
            found, reached = point(away), float(cost(away))
        if not reached < costs[0]:  # nor where rounding has left no number
            found, reached = start, costs[0]
        return Minimum(found, reached, gram, AT_A_TIME * len(costs))

    def near(self, patches: Tensor, least: float) -> "FullSearch":
        """With the noise that random rounding puts on this candidate's entries; see ``PickedResiduals.near``."""
        return FullSearch(self.every.near(patches, least), self.some.near(patches, least))

    def gram(self, space: OpenSpace, point: Tensor) -> Tensor:
        """(unknowns, unknowns), J^T J of all entries and the prior, by those of some."""
        gram = squared(self.some.slopes(self.some.compared, space, point))
        gram.diagonal().add_(1.0)
        return self.of_all(gram)

    def of_all(self, gram: Tensor) -> Tensor:
        """J^T J of all entries and the prior, by that of some entries and the prior."""
        prior = torch.eye(len(gram)).to(gram)
        return (gram - prior) * (self.every.count / self.some.count) + prior
