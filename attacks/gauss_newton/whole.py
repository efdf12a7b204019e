"""All entries that noise is on at once, by first derivatives, from where some of them led.

Their Jacobian would be dear. That of some says how the cost curves along every direction, but for how many more there
are of them. In coordinates in which it curves alike everywhere, first derivatives need tens of steps.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.gauss_newton.levenberg import Minimum, jacobian
from attacks.gauss_newton.picked import PickedResiduals
from attacks.gauss_newton.space import OpenSpace

STEPS, AT_A_TIME = 400, 20  # of L-BFGS; and before anybody looks at the clock
HISTORY = 20  # steps that it remembers
SETTLED = 5e-6  # of the cost: what so many steps gain that ends the search
CHUNK = 252  # directions that are differentiated at a time

Tell = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Whole:
    """A search that compares all entries.

    Attributes:
        every: That are compared.
        some: Drawn from them, whose Jacobian stands for that of all.
    """

    every: PickedResiduals
    some: PickedResiduals

    def search(self, space: OpenSpace, start: Tensor, gram: Tensor, until: float, tell: Tell) -> Minimum:
        """From a start near by, till nothing is gained; ``time.thread_time()`` may cut it short at ``until``.

        Args:
            space: That is searched.
            start: (unknowns,) float64.
            gram: How the cost curves there.
            until: When it is to end.
            tell: Is told how far it is: steps done, of so many, cost.
        """
        root = torch.linalg.cholesky(gram)
        moved = torch.zeros_like(start).requires_grad_()

        def point() -> Tensor:
            away: Tensor = torch.linalg.solve_triangular(root.mT, moved[:, None], upper=True)[:, 0]
            return start + away

        optimiser = torch.optim.LBFGS(
            [moved],
            max_iter=AT_A_TIME,
            history_size=HISTORY,
            line_search_fn="strong_wolfe",
            tolerance_grad=0.0,
            tolerance_change=0.0,
        )

        def cost() -> Tensor:
            optimiser.zero_grad()
            unknowns = point()
            left = self.every(space.patches(unknowns)[0])
            made = left @ left + unknowns @ unknowns
            made.backward()  # type: ignore[no-untyped-call]
            return made

        taken, costs = 0, list[float]()
        for taken in range(AT_A_TIME, STEPS + 1, AT_A_TIME):
            costs.append(float(optimiser.step(cost).detach()))  # type: ignore[no-untyped-call]
            tell(taken, STEPS, costs[-1])
            if (costs[1:] and costs[-2] - costs[-1] < SETTLED * costs[-1]) or time.thread_time() > until:
                break
        found = point().detach()
        with torch.no_grad():
            left = self.every(space.patches(found)[0])
            reached = float(left @ left + found @ found)
        if not reached < costs[0]:  # nor where rounding has left no number
            found, reached = start, costs[0]
        return Minimum(found, reached, self.gram(space, found), taken)

    def gram(self, space: OpenSpace, point: Tensor) -> Tensor:
        """(unknowns, unknowns), J^T J of all entries and the prior, by those of some."""
        slopes = jacobian(lambda unknowns: self.some(space.patches(unknowns)[0]), point, CHUNK).double()
        gram: Tensor = slopes @ slopes.mT
        gram.diagonal().add_(1.0)
        return self.of_all(gram)

    def of_all(self, gram: Tensor) -> Tensor:
        """J^T J of all entries and the prior, by that of some entries and the prior."""
        prior = torch.eye(len(gram)).to(gram)
        return (gram - prior) * (self.every.count / self.some.count) + prior
