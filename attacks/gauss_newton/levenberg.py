"""Levenberg-Marquardt: least squares of a function whose Jacobian is dear and whose value is cheap.

At a point with residuals r and Jacobian J the damped step -(J^T J + d)^-1 J^T r is a path over the damping d. A
Cholesky factor gives a point of it, so the path is searched for the least cost: factor and value cost a fraction of a
Jacobian, and no rule can say in advance how far the model holds. Each step is bent by the second derivative along it
(geodesic acceleration), which takes one value more and lets it follow a curved valley.

References:
    Transtrum and Sethna, "Improvements to the Levenberg-Marquardt algorithm for nonlinear least-squares", 2012.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import jvp, vmap

Function = Callable[[Tensor], Tensor]
# Directions that are differentiated at a time: the memory of so many forward and backward passes. A GPU waits for the
# next instruction where they are few.
CHUNK = {"cpu": 64, "cuda": 192}
COLUMNS = 8192  # of the Jacobian that are widened at a time
ROWS = 256  # of J^T J that are made at a time: what stands above the diagonal need not be
FIRST_DAMPING = 1e-2  # of the trace of J^T J; relative, as all that follow
LEAST_DAMPING = 1e-16
FACTOR = 10.0  # between two dampings that are tried
UPWARDS = 12  # dampings tried, each the factor larger, before the point counts as a minimum
PROBE = 0.1  # share of a step at which its second derivative is measured
MOST_BEND = 0.75  # of the step's length, twice the bend: beyond it the expansion means nothing
EXPLAINED = 1e-3  # of the cost: where the model promises less than that, a minimum is reached
SLOW = 0.02  # gain of a step that is one


@dataclass(frozen=True)
class Minimum:
    """Where a search ended."""

    point: Tensor  # (unknowns,) float64
    cost: float  # squared norm of the residuals
    gram: Tensor  # (unknowns, unknowns) float64, J^T J at the point, or at the last before it
    steps: int


@dataclass(frozen=True)
class StoppingRule:
    """When a search ends before all of its steps are done.

    Attributes:
        enough: Cost at which no further Jacobian is worth its while.
        fine: Share of the usual gains that still counts: below 1 where most of the cost is noise.
        patience: Slow steps, one after the other, with which it ends.
        until: Of ``time.thread_time()``, after which no step but the first is begun.
    """

    enough: float = 0.0
    fine: float = 1.0
    patience: int = 6
    until: float = math.inf


ENDS = StoppingRule()


def minimise(
    residuals: Function,
    start: Tensor,
    *,
    steps: int,
    slopes: Function | None = None,
    ends: StoppingRule = ENDS,
    on_step: Callable[[int, float], None] = lambda *_: None,
) -> Minimum:
    """Search from ``start`` until nothing is gained.

    Args:
        residuals: Of (unknowns,) float32 or float64, differentiable forwards, in the same precision.
        start: (unknowns,) float64.
        steps: Jacobians at most.
        slopes: The Jacobian, as ``jacobian`` has it, where there is a cheaper way to it.
        ends: When to end before.
        on_step: Called with the number of steps done and the cost.
    """
    point, errors = start, residuals(start)
    cost, damping, patience, step_count = float(errors @ errors), FIRST_DAMPING, ends.patience, 0
    if not len(start):
        return Minimum(start, cost, start[:, None], 0)
    for step_count in range(1, steps + 1):
        path = _Path.at(residuals, point, errors, slopes(point) if slopes else jacobian(residuals, point))
        if not path.promised > ends.fine * EXPLAINED * cost:
            break
        best = _search(path, damping, cost)
        if best is None:
            break
        patience = patience - 1 if best.cost > (1 - ends.fine * SLOW) * cost else ends.patience
        point, errors, cost, damping = best.point, best.residuals, best.cost, best.damping
        on_step(step_count, cost)
        if not patience or cost <= ends.enough or time.thread_time() > ends.until:
            break
    return Minimum(point, cost, path.gram, step_count)


def jacobian(residuals: Function, point: Tensor) -> Tensor:
    """Compute the Jacobian (unknowns, residuals) in float32: row i is the derivative by unknown i.

    Args:
        residuals: A function of (unknowns,), differentiable forwards.
        point: (unknowns,).
    """
    point = point.float()

    def along(direction: Tensor) -> Tensor:
        slope: Tensor = jvp(residuals, (point,), (direction,))[1]
        return slope

    chunk = CHUNK[point.device.type]
    directions = torch.eye(len(point), device=point.device)
    parts = (directions[first : first + chunk] for first in range(0, len(point), chunk))
    return torch.cat([vmap(along)(some) for some in parts])


def squared(slopes: Tensor) -> Tensor:
    """Compute J^T J of such a Jacobian in float64: small eigenvalues would drown in float32's rounding.

    Args:
        slopes: (unknowns, residuals) float32.
    """
    lower = torch.zeros(len(slopes), len(slopes), dtype=torch.float64, device=slopes.device)
    for part in _parts(slopes):
        wide = slopes[:, part].double()
        for first in range(0, len(wide), ROWS):
            lower[first:, first : first + ROWS] += wide[first:] @ wide[first : first + ROWS].mT
    return lower.tril() + lower.tril(-1).mT


@dataclass(frozen=True)
class _Trial:
    """A point of the path, with its residuals."""

    point: Tensor
    residuals: Tensor
    cost: float
    damping: float


@dataclass(frozen=True)
class _Path:
    """The damped steps from one point."""

    function: Function
    point: Tensor
    here: Tensor  # residuals at the point
    slopes: Tensor  # (unknowns, residuals) float32
    gram: Tensor

    @staticmethod
    def at(function: Function, point: Tensor, errors: Tensor, slopes: Tensor) -> "_Path":
        return _Path(function, point, errors, slopes, squared(slopes))

    @property
    def promised(self) -> float:
        """Return how much of the cost a linear function would lose, at the least damping with a step; 0 if none has."""
        pull, damping = self.pull, LEAST_DAMPING
        while damping < 1:
            if (factor := self._factor(damping)) is not None:
                return float(pull @ _solved(factor, pull))
            damping *= FACTOR
        return 0.0

    def trial(self, damping: float) -> _Trial:
        """Evaluate one damping, its step bent if it bends little; the cost is infinite where rounding leaves no step.

        Args:
            damping: Relative to the trace of J^T J.
        """
        factor = self._factor(damping)
        if factor is None:
            return _Trial(self.point, self.here, math.inf, damping)
        step = -_solved(factor, self.pull)
        ahead = self.function(self.point + PROBE * step)
        curved = self._pull((ahead - self.here) / PROBE**2) - self.gram @ step / PROBE
        bend = -_solved(factor, curved)
        if 2 * float(bend.norm()) <= MOST_BEND * float(step.norm()):
            step = step + bend
        residuals = self.function(self.point + step)
        cost = float(residuals @ residuals)
        return _Trial(self.point + step, residuals, cost if math.isfinite(cost) else math.inf, damping)

    @cached_property
    def pull(self) -> Tensor:
        """Return (unknowns,) half the cost's gradient at the point."""
        return self._pull(self.here)

    def _pull(self, residuals: Tensor) -> Tensor:
        pull = torch.zeros_like(self.point)
        for part in _parts(self.slopes):
            pull += self.slopes[:, part].double() @ residuals[part].double()
        return pull

    def _factor(self, damping: float) -> Tensor | None:
        """Return the Cholesky factor of J^T J with damping; None if rounding has made that indefinite."""
        damped = self.gram.clone()
        damped.diagonal().add_(damping * self.gram.trace())
        factor, failed = torch.linalg.cholesky_ex(damped)
        return None if failed else factor


def _solved(factor: Tensor, right: Tensor) -> Tensor:
    return torch.cholesky_solve(right[:, None], factor)[:, 0]


def _parts(slopes: Tensor) -> list[slice]:
    return [slice(first, first + COLUMNS) for first in range(0, slopes.shape[1], COLUMNS)]


def _search(path: _Path, damping: float, cost: float) -> _Trial | None:
    """Return the best trial near the last damping; None if all dampings up to a large one lead upwards."""
    best = path.trial(max(damping / FACTOR, LEAST_DAMPING))
    for _ in range(UPWARDS):
        if best.cost < cost:
            break
        best = path.trial(best.damping * FACTOR)
    if not best.cost < cost:
        return None
    for factor in (1 / FACTOR, FACTOR):
        first = best
        while (further := path.trial(max(best.damping * factor, LEAST_DAMPING))).cost < best.cost:
            best = further
        if best is not first:
            break
    return best
