"""Levenberg-Marquardt on the equations of many tokens at once, each a problem of its own."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedmjp.attacks.linear_systems import positive_solution
from fedmjp.attacks.mjp.span.equations import Attended, PatchEquations, PatchPoint

TRIALS = 3  # of larger damping before an iteration is given up
SOFTER, HARDER = 0.2, 10.0
DAMPING_RANGE = (1e-10, 1e8)


@dataclass(frozen=True)
class Zeros:
    """Where minimisations ended."""

    coefficients: Tensor  # (rows, unknowns)
    residual: Tensor  # (rows,), |r| there
    curvature: Tensor  # (rows, unknowns, unknowns), the Gauss-Newton matrix J^T J at the last step

    @staticmethod
    def at(coefficients: Tensor) -> "Zeros":
        """Build from points of which nothing is known yet.

        Args:
            coefficients: (rows, unknowns).
        """
        rows, size = coefficients.shape
        unknown = torch.full_like(coefficients[:, 0], math.inf)
        return Zeros(coefficients, unknown, coefficients.new_zeros(rows, size, size))

    def __len__(self) -> int:
        return len(self.residual)

    def __getitem__(self, rows: Tensor) -> "Zeros":
        """Select some of them."""
        return Zeros(self.coefficients[rows], self.residual[rows], self.curvature[rows])

    def distinct(self, references: "Zeros", share: float) -> Tensor:
        """Select those that are none of the references, nor each other's, the ones of least residual first.

        Two are the same if the way between them changes r, to first order, by less than a share of the
        larger residual.

        Args:
            references: Zeros that are known.
            share: Of the larger residual.
        """
        selected: list[int] = []
        for index in self.residual.argsort().tolist():
            have = torch.cat([references.coefficients, self.coefficients[selected]])
            larger = torch.cat([references.residual, self.residual[selected]]).clamp(min=float(self.residual[index]))
            offsets = have - self.coefficients[index]
            change = ((offsets @ self.curvature[index]) * offsets).sum(dim=1).clamp(min=0).sqrt()
            if bool((change > share * larger).all()):
                selected.append(index)
        return torch.tensor(selected, dtype=torch.int64)

    def joined(self, further: "Zeros") -> "Zeros":
        """Concatenate these and further ones."""
        return Zeros(
            *(torch.cat([getattr(zeros, name) for zeros in (self, further)]) for name in self.__dataclass_fields__)
        )


@dataclass(frozen=True)
class Pull:
    """Cost plus a quadratic pull, a ``Merit``: weight (c - centre)^T metric (c - centre)."""

    weight: float
    centre: Tensor  # (problems, unknowns)
    metric: Tensor  # (unknowns, unknowns)

    def value(self, cost: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
        """Return (rows,) cost and pull."""
        away = coefficients - self.centre[rows]
        return cost + self.weight * ((away @ self.metric) * away).sum(dim=1)

    def adapt(self, matrices: Tensor, gradients: Tensor, cost: Tensor, coefficients: Tensor, rows: Tensor) -> None:
        """Add the pull's matrices and gradients."""
        del cost
        matrices += self.weight * self.metric
        gradients += self.weight * (coefficients - self.centre[rows]) @ self.metric


class Merit(Protocol):
    """What is minimised in place of the plain cost |r|^2: made of it, with Gauss-Newton matrices to match."""

    def value(self, cost: Tensor, coefficients: Tensor, rows: Tensor) -> Tensor:
        """Compute the merit (rows,) from the cost.

        Args:
            cost: (rows,).
            coefficients: (rows, unknowns) where.
            rows: (rows,) which problems these are.
        """

    def adapt(self, matrices: Tensor, gradients: Tensor, cost: Tensor, coefficients: Tensor, rows: Tensor) -> None:
        """Turn Gauss-Newton matrices and gradients of the cost into the merit's, in place.

        Args:
            matrices: (rows, unknowns, unknowns).
            gradients: (rows, unknowns).
            cost: (rows,).
            coefficients: (rows, unknowns) where.
            rows: (rows,) which problems these are.
        """


@dataclass(frozen=True)
class Steps:
    """How far to go."""

    most: int  # iterations
    damping: float = 1e-3  # at the start
    enough: float = 1e-4  # a problem ends when its merit falls by less than this share


def minimise(
    equations: PatchEquations,
    coefficients: Tensor,
    places: Tensor,
    attended: Attended,
    steps: Steps,
    merit: Merit | None = None,
) -> Zeros:
    """Minimise |r|^2, or a merit made of it, from each row of coefficients at its place.

    z + o(z) is taken anew at every trial, but o counts as constant in the derivative: it changes by
    some hundredths of what z does.

    Args:
        equations: Of one upload.
        coefficients: (rows, unknowns) where it begins.
        places: (rows,).
        attended: Adds the attention.
        steps: How far to go.
        merit: What is minimised; |r|^2 if None.
    """

    def evaluate(trial: Tensor, rows: Tensor) -> tuple[PatchPoint, Tensor, Tensor]:
        point = equations.at(attended(equations.tokens(trial, places[rows])))
        cost = point.cost + equations.level_error(trial, places[rows]).square()
        return point, cost, cost if merit is None else merit.value(cost, trial, rows)

    coefficients = coefficients.clone()
    rows = torch.arange(len(coefficients), device=coefficients.device)
    point, cost, value = evaluate(coefficients, rows)
    damping = torch.full_like(cost, steps.damping)
    curvature = coefficients.new_zeros(len(rows), equations.unknowns, equations.unknowns)
    for iteration in range(steps.most):
        if not len(rows) or equations.time_is_up():
            break
        current, old_value = coefficients[rows], value[rows]
        matrices, gradients = equations.normal(point[rows], current, places[rows])
        curvature[rows] = matrices
        if merit is not None:
            merit.adapt(matrices, gradients, cost[rows], current, rows)
        diagonal = matrices.diagonal(dim1=1, dim2=2).clamp(min=1e-12)
        todo = torch.arange(len(rows), device=rows.device)
        for _ in range(TRIALS):
            damped = damping[rows[todo], None] * diagonal[todo] + 1e-13 * diagonal[todo].mean(1, keepdim=True)
            trial = current[todo] - positive_solution(matrices[todo] + torch.diag_embed(damped), gradients[todo])
            trial_rows = rows[todo]
            trial_point, trial_cost, trial_value = evaluate(trial, trial_rows)
            better = trial_value < value[trial_rows]
            moved = trial_rows[better]
            coefficients[moved], cost[moved], value[moved] = trial[better], trial_cost[better], trial_value[better]
            point.replace(moved, trial_point, better)
            damping[trial_rows] *= torch.where(better, SOFTER, HARDER)
            damping.clamp_(*DAMPING_RANGE)
            todo = todo[~better]
            if not len(todo):
                break
        stalled = value[rows] > old_value * (1 - steps.enough)
        rows = rows if iteration <= 1 else rows[~stalled]
    return Zeros(coefficients, cost.sqrt(), curvature)
