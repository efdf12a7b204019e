"""All entries that noise is on at once, by first derivatives, from where some of them led.

Their Jacobian would be dear. That of some says how the cost curves along every direction, but for how many more there
are of them. In coordinates in which it curves alike everywhere, first derivatives need few steps.

L-BFGS takes some steps at a time, so that the search can look at the clock between them.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmjp.attacks.gauss_newton.levenberg import Minimum, squared
from fedmjp.attacks.gauss_newton.picked import PickedResiduals
from fedmjp.attacks.gauss_newton.space import OpenSpace

AT_A_TIME = 25
HISTORY = 20  # steps that it remembers

Tell = Callable[[int, int, float], None]  # (steps done, of so many, cost)


def descend(cost: Callable[[Tensor], Tensor], point: Tensor, steps: int) -> Iterator[float]:
    """Move a point (unknowns,), which requires its gradient, downhill.

    Args:
        cost: What is minimised.
        point: Changed in place.
        steps: At most.

    Yields:
        After each ``AT_A_TIME`` steps the cost before them.
    """
    optimiser = torch.optim.LBFGS(
        [point],
        max_iter=AT_A_TIME,
        history_size=HISTORY,
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,
        tolerance_change=0.0,
    )

    def evaluate() -> Tensor:
        optimiser.zero_grad()
        value = cost(point)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    for _ in range(0, steps, AT_A_TIME):
        yield float(optimiser.step(evaluate).detach())  # type: ignore[no-untyped-call]


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
        """Search from a start near by, until nothing is gained or the time is up.

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
            result = self._descended(space, start, gram, until, tell)
            start, steps, ended = result.point, steps + result.steps, result.steps < STEPS
            if not result.cost < below:
                break
            gram = self.gram(space, start)
            if ended or time.thread_time() > until:
                break
        return replace(result, gram=gram, steps=steps)

    def _descended(self, space: OpenSpace, start: Tensor, gram: Tensor, until: float, tell: Tell) -> Minimum:
        """Search with one look at how the cost curves."""
        root = torch.linalg.cholesky(gram)
        away = torch.zeros_like(start).requires_grad_()

        def point(away: Tensor) -> Tensor:
            moved: Tensor = torch.linalg.solve_triangular(root.mT, away[:, None], upper=True)[:, 0]
            return start + moved

        def cost(away: Tensor) -> Tensor:
            unknowns = point(away)
            remainders = self.every(space.patches(unknowns)[0])
            return remainders @ remainders + unknowns @ unknowns

        costs: list[float] = []
        for last_cost in descend(cost, away, STEPS):
            costs.append(last_cost)
            tell(AT_A_TIME * len(costs), STEPS, last_cost)
            if (costs[1:] and costs[-2] - last_cost < SETTLED * last_cost) or time.thread_time() > until:
                break
        with torch.no_grad():
            end_point, end_cost = point(away), float(cost(away))
        if not end_cost < costs[0]:  # nor where rounding has left no number
            end_point, end_cost = start, costs[0]
        return Minimum(end_point, end_cost, gram, AT_A_TIME * len(costs))

    def near(self, patches: Tensor, least: float) -> "FullSearch":
        """Set the noise that random rounding puts on a candidate's entries; see ``PickedResiduals.near``.

        Args:
            patches: (patches, values) of the candidate.
            least: Of that noise, in squared steps.
        """
        return FullSearch(self.every.near(patches, least), self.some.near(patches, least))

    def gram(self, space: OpenSpace, point: Tensor) -> Tensor:
        """Return (unknowns, unknowns), J^T J of all entries and the prior, by those of some entries.

        Args:
            space: That is searched.
            point: (unknowns,).
        """
        gram = squared(self.some.slopes(self.some.compared, space, point))
        gram.diagonal().add_(1.0)
        return self.of_all(gram)

    def of_all(self, gram: Tensor) -> Tensor:
        """Scale J^T J of some entries and the prior to that of all entries and the prior.

        Args:
            gram: (unknowns, unknowns).
        """
        prior = torch.eye(len(gram)).to(gram)
        return (gram - prior) * (self.every.count / self.some.count) + prior
