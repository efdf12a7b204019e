"""L-BFGS, some steps at a time, so that somebody can look at the clock between them."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

AT_A_TIME = 25
HISTORY = 20  # steps that it remembers

Tell = Callable[[int, int, float], None]  # (steps done, of so many, cost)


def descend(cost: Callable[[Tensor], Tensor], point: Tensor, steps: int) -> Iterator[float]:
    """Move a point (unknowns,), which requires its gradient, downhill.

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
        made = cost(point)
        made.backward()  # type: ignore[no-untyped-call]
        return made

    for _ in range(0, steps, AT_A_TIME):
        yield float(optimiser.step(evaluate).detach())  # type: ignore[no-untyped-call]
