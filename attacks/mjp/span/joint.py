"""Gauss-Newton on all known tokens together, with the derivative of the attention output.

Token by token, o counts as constant and is brought up to date afterwards. Where a shift that all tokens
share moves o against them, that iteration goes astray. Here the unknowns are the coefficients of all
patches at once, o and its common correction are functions of all of them, and the normal equations
(J^T J + damping) step = -J^T r are solved by conjugate gradients, preconditioned with the blocks of
the token-by-token iteration. J is never formed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from fedmjp.attacks.linear_systems import NEGLIGIBLE
from fedmjp.attacks.mjp.closing import conjugate_gradients
from fedmjp.attacks.mjp.span.equations import PatchEquations, PatchSet, attended
from fedmjp.attacks.mjp.span.minimise import HARDER, SOFTER, Pull

TRIALS = 4
ENOUGH = 1e-3  # the iteration ends when its merit falls by less than this share
CONJUGATE, TOLERANCE = 20, 0.03  # steps of conjugate gradients, and where they may end


@dataclass(frozen=True)
class _Problem:
    """All known patches; ``values`` are the coefficients of the visible ones, then of the masked ones."""

    equations: PatchEquations
    known: PatchSet
    pull: Pull | None

    @property
    def places(self) -> Tensor:
        return self.known.all_places(self.equations)

    def attended(self, values: Tensor) -> Tensor:
        return attended(self.equations, self.known.moved(values))(self.equations.tokens(values, self.places))

    def residuals(self, values: Tensor) -> Tensor:
        """Return (patches, equations)."""
        point = self.equations.at(self.attended(values))
        level = self.equations.level_error(values, self.places)[:, None]
        return torch.cat([point.remainders, level], dim=1)

    def merit(self, values: Tensor, residuals: Tensor) -> Tensor:
        cost = residuals.square().sum(dim=1)
        rows = torch.arange(len(values), device=values.device)
        return (cost if self.pull is None else self.pull.value(cost, values, rows)).sum()

    def solver(self, values: Tensor, residuals: Tensor) -> Callable[[float], Tensor | None]:
        """Return steps from these values by damping: (J^T J + pull + damping) step = -J^T r.

        None is no step: the system is not positive definite in floating point.
        """
        point = self.equations.at(self.attended(values))
        blocks, _ = self.equations.normal(point, values, self.places)
        # J v comes from J^T: w -> J^T w is linear, and its transpose is J.
        _, transposed = transpose_of(self.residuals, values)
        _, forward = transpose_of(transposed, torch.zeros_like(residuals))
        gradient, extra = transposed(residuals), torch.zeros_like(blocks)
        if self.pull is not None:
            rows = torch.arange(len(values), device=values.device)
            self.pull.adapt(extra, gradient, gradient, values, rows)
        blocks = blocks + extra  # nearly the diagonal of the system
        diagonal = blocks.diagonal(dim1=1, dim2=2)

        def step(damping: float) -> Tensor | None:
            damped = torch.diag_embed(damping * diagonal + NEGLIGIBLE * diagonal.mean(1, keepdim=True))
            factors, failures = torch.linalg.cholesky_ex(blocks + damped)
            if failures.any():
                return None

            def times(vector: Tensor) -> Tensor:
                return transposed(forward(vector)) + ((extra + damped) @ vector[:, :, None])[:, :, 0]

            def precondition(vector: Tensor) -> Tensor:
                solved: Tensor = torch.cholesky_solve(vector[:, :, None], factors)[:, :, 0]
                return solved

            return conjugate_gradients(times, -gradient, precondition, steps=CONJUGATE, precise=TOLERANCE)

        return step


def transpose_of(function: Callable[[Tensor], Tensor], values: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return a function's value, and the transpose of its derivative there."""
    pair: Any = vjp(function, values)
    result: Tensor = pair[0]
    return result, lambda weights: pair[1](weights)[0]


def solve_jointly(
    equations: PatchEquations, patches: PatchSet, *, steps: int, pull: Pull | None = None, damping: float = 1e-3
) -> tuple[PatchSet, Tensor]:
    """Minimise the sum of |r|^2 over all known patches; return the patches, and (visible + masked,) residuals.

    Args:
        equations: Of one upload.
        patches: Where it begins.
        steps: At most.
        pull: Added to the cost, if any.
        damping: At the start.
    """
    problem, values = _Problem(equations, patches, pull), patches.coefficients
    residuals = problem.residuals(values)
    merit = problem.merit(values, residuals)
    for _ in range(steps):
        if equations.time_is_up():
            break
        solver, old_merit = problem.solver(values, residuals), merit
        for _ in range(TRIALS):
            if equations.time_is_up():
                break
            step = solver(damping)
            if step is not None:
                new_residuals = problem.residuals(values + step)
                if problem.merit(values + step, new_residuals) < merit:
                    values, residuals, merit = values + step, new_residuals, problem.merit(values + step, new_residuals)
                    damping *= SOFTER
                    break
            damping *= HARDER
        if merit >= old_merit * (1 - ENOUGH):
            break
    return patches.moved(values), residuals.norm(dim=1)
