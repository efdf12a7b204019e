"""Solve the head's equations: a fixed point for many pictures, Levenberg-Marquardt from several starts for few."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.class_token.head import HeadEquations, HeadState

DEPTH = 8  # of Anderson's acceleration
ITERATIONS = 60
SETTLED = 1e-11  # relative change of the features
SOLVED = 1e-6  # relative misfit, near float32's rounding


@dataclass(frozen=True)
class HeadSolution:
    """Where a search ended, under labels that were assumed."""

    equations: HeadEquations
    labels: tuple[int, ...]  # in the order of the unknowns
    state: HeadState  # of one start

    @property
    def misfit(self) -> float:
        """Return the unexplained part of the gradient, relative to its size."""
        return float(self.state.relative)

    @property
    def fits(self) -> bool:
        """Tell whether nothing but rounding is unexplained."""
        return self.misfit < SOLVED


@dataclass(frozen=True)
class SearchStart:
    """Where a search begins: -G's row of the label, tilted towards the class's weights, with noise."""

    tilt: float
    noise: float


STARTS = (SearchStart(0, 0), SearchStart(0.3, 0.3), SearchStart(0.6, 0.3), SearchStart(1, 0.3), SearchStart(2, 0.3))


def begin(equations: HeadEquations, labels: Tensor, start: SearchStart, generator: torch.Generator) -> Tensor:
    """Compute unknowns (pictures, pictures) to start from.

    Args:
        equations: Of the head.
        labels: (pictures,) int64.
        start: Which start.
        generator: On the CPU.
    """
    rows = -equations.gradient.weight[labels]
    features = rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    classes = equations.head.weight[labels]
    noise = (
        torch.randn(features.shape, generator=generator, dtype=torch.float64).to(features) / features.shape[1] ** 0.5
    )
    features = features + start.tilt * classes / classes.norm(dim=1, keepdim=True) + start.noise * noise
    return equations.unknowns(equations.head.normed(features))


def fixed_point(equations: HeadEquations, labels: Tensor, generator: torch.Generator) -> HeadState:
    """Alternate slopes given features and features given slopes, with Anderson's acceleration.

    Pictures of one label would start alike, and stay so: where labels occur twice, noise tells them apart.

    Args:
        equations: Of the head.
        labels: (pictures,) int64.
        generator: On the CPU.

    References:
        Walker and Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal., 2011.
    """
    targets = equations.gradient.targets(labels)
    unknowns = begin(equations, labels, STARTS[int(len(set(labels.tolist())) < len(labels))], generator)
    best = equations.state(unknowns[None], targets[None])
    points: list[Tensor] = []
    moves: list[Tensor] = []
    for _ in range(ITERATIONS):
        state = equations.state(unknowns[None], targets[None])
        if not bool(torch.isfinite(state.relative)):
            break
        best = state if state.relative < best.relative else best
        features = equations.head.normed(equations.features(equations.solved(state.slopes[0])))
        mapped = equations.unknowns(features)
        move = (mapped - unknowns).flatten()
        points, moves = [*points, mapped.flatten()][-DEPTH:], [*moves, move][-DEPTH:]
        if move.norm() < SETTLED**0.5 * mapped.norm():
            break
        unknowns = _mixed(points, moves).view_as(mapped)
    return _without_norm(equations, best, targets)


def _mixed(points: list[Tensor], moves: list[Tensor]) -> Tensor:
    if len(moves) == 1:
        return points[-1]
    differences = torch.stack([moves[-1] - move for move in moves[:-1]], 1)
    shares = torch.linalg.lstsq(differences, moves[-1][:, None]).solution[:, 0]
    corrections = torch.stack([points[-1] - point for point in points[:-1]], 1)
    mixed: Tensor = points[-1] - corrections @ shares
    return mixed


def _without_norm(equations: HeadEquations, state: HeadState, targets: Tensor) -> HeadState:
    """Take plain steps of the fixed point near its end: LayerNorm's variance is 1 only but for its epsilon."""
    if not bool(torch.isfinite(state.relative)):
        return state
    for _ in range(DEPTH):
        better = equations.state(equations.solved(state.slopes[0])[None], targets[None])
        if not better.relative < state.relative:
            break
        state = better
    return state


def label_tensor(equations: HeadEquations, labels: tuple[int, ...]) -> Tensor:
    """Put labels (pictures,) int64 beside the gradient.

    Args:
        equations: Of the head.
        labels: Of the pictures.
    """
    return torch.tensor(labels, device=equations.gradient.weight.device)


def from_starts(equations: HeadEquations, labels: tuple[int, ...], generator: torch.Generator) -> HeadSolution:
    """Return the best end of Levenberg-Marquardt from several starts with the same labels.

    Args:
        equations: Of the head.
        labels: Of the pictures.
        generator: On the CPU.
    """
    assumed = label_tensor(equations, labels)
    begun = torch.stack([begin(equations, assumed, start, generator) for start in STARTS])
    targets = equations.gradient.targets(assumed)[None]
    state = minimise(equations, begun, targets.expand(len(begun), -1, -1))
    best = equations.state(state.unknowns[state.cost.nan_to_num(torch.inf).argmin()][None], targets)
    return HeadSolution(equations, labels, polish(equations, best, targets))


def minimise(equations: HeadEquations, unknowns: Tensor, targets: Tensor, *, iterations: int = ITERATIONS) -> HeadState:
    """Run Levenberg-Marquardt from several starts at once, until one reaches rounding or none moves.

    Args:
        equations: Of the head.
        unknowns: (starts, pictures, pictures).
        targets: (starts, pictures, classes).
        iterations: At most.
    """
    state = equations.state(unknowns, targets)
    damping = torch.full_like(state.cost, 1e-2)
    for _ in range(iterations):
        matrix, slope = equations.normal(state)
        state, damping, moved = _step(equations, state, targets, matrix, slope, damping)
        if not moved or bool((state.relative < SOLVED).any()):
            break
    return state


def polish(equations: HeadEquations, state: HeadState, targets: Tensor, *, iterations: int = 4) -> HeadState:
    """Take Gauss-Newton steps without the variance, which LayerNorm's epsilon makes a little less than 1.

    Args:
        equations: Of the head.
        state: Where it begins.
        targets: (1, pictures, classes).
        iterations: At most.
    """
    for _ in range(iterations):
        matrix, slope = equations.normal(state, variance=False)
        matrix.diagonal(dim1=-2, dim2=-1).mul_(1 + 1e-12)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if failed.any():
            break
        change = torch.cholesky_solve(slope[..., None], factor)[..., 0]
        better = equations.state(state.unknowns - change.view_as(state.unknowns), targets)
        if not better.relative < state.relative:
            break
        state = better
    return state


def _step(
    equations: HeadEquations, state: HeadState, targets: Tensor, matrix: Tensor, slope: Tensor, damping: Tensor
) -> tuple[HeadState, Tensor, bool]:
    """Take one step of every start that finds a better place; raise the damping of all that do not."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).clamp_min(1e-14)
    unknowns, cost = state.unknowns.clone(), state.cost
    old_cost = cost.clone()
    waiting = torch.ones_like(cost, dtype=torch.bool)
    for _ in range(6):
        damped = matrix + torch.diag_embed(damping[:, None] * diagonal)
        factor, failed = torch.linalg.cholesky_ex(damped)
        change = torch.cholesky_solve(slope[..., None], factor)[..., 0].view_as(unknowns)
        trial = state.unknowns - change
        costs = torch.where(failed > 0, torch.inf, equations.state(trial, targets).cost).nan_to_num(torch.inf)
        better = waiting & (costs < cost)
        unknowns = torch.where(better[:, None, None], trial, unknowns)
        cost = torch.where(better, costs, cost)
        damping = torch.where(waiting, torch.where(better, damping / 5, damping * 4), damping)
        waiting = waiting & ~better
        if not waiting.any():
            break
    moved = bool((cost < old_cost * (1 - 1e-6)).any())
    return equations.state(unknowns, targets), damping, moved
