"""Levenberg-Marquardt on the equations of many tokens at once, each a problem of its own."""

import torch
from torch import Tensor

from fedmjp.attacks.first_block.equations import MlpPoint, TokenEquations
from fedmjp.attacks.linear_systems import positive_solution

EASIER, HARDER, TRIES = 0.2, 10.0, 3  # factors of the damping, and how often it is raised for one step
SLOW = 1e-5  # gain of a step, of the cost, that ends a row
CHUNK = 2**25  # entries of Jacobians that are in memory at a time


def minimise(
    equations: TokenEquations, start: Tensor, *, steps: int, damping: float, on_sphere: bool
) -> tuple[Tensor, MlpPoint]:
    """Minimise the cost of each row by Levenberg-Marquardt; return where the rows end and the equations there.

    Args:
        equations: The equations of tokens.
        start: (rows, unknowns), where each row starts.
        steps: At most, for each row.
        damping: At the start, of the mean diagonal; each row has its own afterwards.
        on_sphere: Whether rows move on the sphere of whitened tokens, or freely.
    """
    solved = [
        _minimise(equations, rows.clone(), steps, damping, on_sphere=on_sphere)
        for rows in torch.split(start, max(1, CHUNK // (len(equations.first) * start.shape[1])))
    ]
    unknowns = torch.cat(solved)
    return unknowns, equations.at(unknowns @ equations.basis)


def _minimise(equations: TokenEquations, unknowns: Tensor, steps: int, first: float, *, on_sphere: bool) -> Tensor:
    """Minimise so many rows that their Jacobians fit into memory; ``unknowns`` is changed in place."""
    cost, damping = equations.at(unknowns @ equations.basis).cost, torch.full_like(unknowns[:, 0], first)
    alive = torch.ones_like(cost, dtype=torch.bool)
    for _ in range(steps):
        rows = alive.nonzero().flatten()
        if not len(rows) or equations.time_is_up():
            break
        matrices, gradients = equations.normal(equations.at(unknowns[rows] @ equations.basis))
        if on_sphere:
            matrices, gradients = _tangential(matrices, gradients, unknowns[rows] / equations.radius)
        scale = torch.diagonal(matrices, dim1=1, dim2=2).mean(1)
        waiting = torch.ones_like(rows, dtype=torch.bool)
        for _ in range(TRIES):
            todo = waiting.nonzero().flatten()
            if not len(todo):
                break
            current = rows[todo]
            damped = matrices[todo] + torch.diag_embed(
                (damping[current] * scale[todo])[:, None].expand(-1, matrices.shape[1])
            )
            trial = unknowns[current] - positive_solution(damped, gradients[todo])
            if on_sphere:
                trial = trial * (equations.radius / trial.norm(dim=1, keepdim=True))
            trial_cost = equations.at(trial @ equations.basis).cost
            better = trial_cost < cost[current]
            moved = current[better]
            alive[moved] = trial_cost[better] < (1 - SLOW) * cost[moved]
            unknowns[moved], cost[moved] = trial[better], trial_cost[better]
            damping[moved] *= EASIER
            damping[current[~better]] *= HARDER
            waiting[todo[better]] = False
        alive[rows[waiting]] = False
    return unknowns


def _tangential(matrices: Tensor, gradients: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
    """Restrict both to the sphere's tangents; along the normals (rows, unknowns) only the damping's scale remains."""
    scale = torch.diagonal(matrices, dim1=1, dim2=2).mean(1)[:, None, None]
    along = torch.linalg.vecdot(matrices, normals[:, None])[:, :, None] * normals[:, None]
    twice = torch.linalg.vecdot(torch.linalg.vecdot(matrices, normals[:, None]), normals)[:, None, None]
    outer = normals[:, :, None] * normals[:, None]
    projected = matrices - along - along.mT + (twice + scale) * outer
    return projected, gradients - torch.linalg.vecdot(gradients, normals)[:, None] * normals
