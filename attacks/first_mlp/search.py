"""All tokens behind the first attention, by search from random points and by taking out those that were met."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.first_mlp.equations import Equations, Point
from fedmjp.attacks.linear_systems import positive_solution

STEPS, POLISHING = 25, 12
FIRST_DAMPING, POLISHED_DAMPING = 1e-3, 1e-6  # of the mean diagonal
EASIER, HARDER, TRIES = 0.2, 10.0, 3  # factors of the damping, and how often it is raised for one step
SLOW = 1e-5  # gain of a step, of the cost, that ends a row
TRUE = 1.6  # excess: up to here a zero counts as a token
SAME = 0.02  # distance of two whitened tokens, of their length, below which they are one
DRY = 6  # rounds without a new token, after which no further one is looked for
CHUNK = 2**25  # entries of Jacobians that are held at a time

Draw = Callable[[int, torch.Generator], Tensor]  # so many whitened tokens (tokens, dim)


@dataclass(frozen=True)
class Tokens:
    """Whitened tokens behind the first attention, in no order."""

    whitened: Tensor  # (tokens, dim)
    met: int  # of them, proven; the rest are nearest misses


def search(equations: Equations, rounds: int, starts: int, generator: torch.Generator) -> Tokens:
    """As many tokens as the gradients are sums over."""
    met = meet(equations, rounds, starts, generator)
    return Tokens(filled(equations, met, starts, generator), len(met))


def meet(
    equations: Equations,
    rounds: int,
    starts: int,
    generator: torch.Generator,
    *,
    dry_rounds: int = DRY,
    draw: Draw | None = None,
) -> Tensor:
    """Whitened tokens (tokens, dim) that prove themselves, as many as are met before rounds add nothing any more.

    Each round searches in the equations of what is left when the tokens met so far are taken out, where those are no
    zeros any more and the space is smaller, and then polishes in the equations of all. Searches start where ``draw``
    says or in directions drawn alike, whichever added more tokens the last time; without it in directions drawn alike.
    """
    met = equations.basis.new_zeros(0, equations.basis.shape[1])
    excess, dry = met[:, 0], 0
    draws = [None] if draw is None else [draw, None]
    added = dict.fromkeys(range(len(draws)), equations.count)
    for _ in range(rounds):
        kind = max(added, key=lambda index: added[index])
        candidates = _polished(equations, _candidates(equations.without(met), starts, generator, draws[kind])[0])
        left = equations.excess(equations.at(candidates))
        likely = left < TRUE
        before = len(met)
        met, excess = _distinct(torch.cat([met, candidates[likely]]), torch.cat([excess, left[likely]]))
        met, excess = met[: equations.count], excess[: equations.count]
        added[kind] = len(met) - before
        dry = 0 if added[kind] else dry + 1
        if len(met) == equations.count or dry == dry_rounds or equations.time_is_up():
            break
    return met


def beside(equations: Equations, met: Tensor, guesses: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (tokens, dim) that prove themselves and were not met, and from which of the guesses (rows, dim) each came.

    Rounding turns the weakest directions of the spans: of tokens that are nearly alike one may be a mixture.
    """
    candidates = _polished(equations, guesses)
    excess = equations.excess(equations.at(candidates))
    new = ((excess < TRUE) & ~_near(candidates, met).any(dim=1)).nonzero().flatten()
    new = new[_first_of_each(candidates[new], excess[new])]
    return candidates[new], new


def filled(equations: Equations, met: Tensor, starts: int, generator: torch.Generator) -> Tensor:
    """Tokens and what comes nearest to the equations of those that are left, half of these at a time."""
    while (missing := equations.count - len(met)) > 0:
        candidates, _ = _candidates(equations.without(met), starts, generator)
        other = candidates[~_near(candidates, met).any(dim=1)]
        met = torch.cat([met, other[: (missing + 1) // 2] if len(other) else candidates[:1]])  # one at least
    return met


def _candidates(
    equations: Equations, starts: int, generator: torch.Generator, draw: Draw | None = None
) -> tuple[Tensor, Tensor]:
    """(ends, dim) different whitened tokens and (ends,) costs, ascending, where searches from random points ended."""
    basis = equations.basis
    if draw is None:
        start = torch.randn(starts, len(basis), generator=generator, dtype=torch.float64).to(basis)
    else:
        start = draw(starts, generator) @ basis.mT
    start = start * (equations.radius / start.norm(dim=1, keepdim=True))
    ended, point = minimise(equations, start, steps=STEPS, damping=FIRST_DAMPING, on_sphere=True)
    return _distinct(ended @ basis, point.cost)


def _polished(equations: Equations, whitened: Tensor) -> Tensor:
    """The zeros near whitened tokens; their length is free, because of the LayerNorm's epsilon."""
    start = whitened @ equations.basis.mT
    start = start * (equations.radius / start.norm(dim=1, keepdim=True))
    start, _ = minimise(equations, start, steps=POLISHING, damping=FIRST_DAMPING, on_sphere=True)
    start, _ = minimise(equations, start, steps=POLISHING, damping=POLISHED_DAMPING, on_sphere=False)
    return start @ equations.basis


def _distinct(whitened: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """One of each group of tokens that are the same, the first in this order."""
    kept = _first_of_each(whitened, order)
    return whitened[kept], order[kept]


def _first_of_each(whitened: Tensor, order: Tensor) -> list[int]:
    kept: list[int] = []
    near = _near(whitened, whitened)
    for index in order.argsort().tolist():
        if not near[index, kept].any():
            kept.append(index)
    return kept


def _near(whitened: Tensor, others: Tensor) -> Tensor:
    """(tokens, others) bool: which are the same."""
    near: Tensor = torch.cdist(whitened, others) < SAME * whitened.shape[1] ** 0.5
    return near


def minimise(
    equations: Equations, start: Tensor, *, steps: int, damping: float, on_sphere: bool
) -> tuple[Tensor, Point]:
    """Levenberg-Marquardt of rows (rows, unknowns), each with a damping of its own."""
    solved = [
        _minimise(equations, some.clone(), steps, damping, on_sphere=on_sphere)
        for some in torch.split(start, max(1, CHUNK // (len(equations.first) * start.shape[1])))
    ]
    ended = torch.cat(solved)
    return ended, equations.at(ended @ equations.basis)


def _minimise(equations: Equations, unknowns: Tensor, steps: int, first: float, *, on_sphere: bool) -> Tensor:
    point = equations.at(unknowns @ equations.basis)
    cost, damping = point.cost, torch.full_like(unknowns[:, 0], first)
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
            chosen = rows[todo]
            damped = matrices[todo] + torch.diag_embed(
                (damping[chosen] * scale[todo])[:, None].expand(-1, matrices.shape[1])
            )
            trial = unknowns[chosen] - positive_solution(damped, gradients[todo])
            if on_sphere:
                trial = trial * (equations.radius / trial.norm(dim=1, keepdim=True))
            made = equations.at(trial @ equations.basis).cost
            better = made < cost[chosen]
            moved = chosen[better]
            alive[moved] = made[better] < (1 - SLOW) * cost[moved]
            unknowns[moved], cost[moved] = trial[better], made[better]
            damping[moved] *= EASIER
            damping[chosen[~better]] *= HARDER
            waiting[todo[better]] = False
        alive[rows[waiting]] = False
    return unknowns


def _tangential(matrices: Tensor, gradients: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
    """The same within the sphere's tangents; along the normals (rows, unknowns) only the damping's scale is left."""
    scale = torch.diagonal(matrices, dim1=1, dim2=2).mean(1)[:, None, None]
    along = torch.linalg.vecdot(matrices, normals[:, None])[:, :, None] * normals[:, None]
    twice = torch.linalg.vecdot(torch.linalg.vecdot(matrices, normals[:, None]), normals)[:, None, None]
    outer = normals[:, :, None] * normals[:, None]
    projected = matrices - along - along.mT + (twice + scale) * outer
    return projected, gradients - torch.linalg.vecdot(gradients, normals)[:, None] * normals
