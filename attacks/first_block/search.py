"""All tokens behind the first attention, by search from random points and by taking out those that were met."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.first_block.equations import TokenEquations
from fedmjp.attacks.first_block.minimise import minimise

STEPS, POLISHING = 25, 12
FIRST_DAMPING, POLISHED_DAMPING = 1e-3, 1e-6  # of the mean diagonal
TRUE = 1.6  # excess: up to here a zero counts as a token
SAME = 0.02  # distance of two whitened tokens, of their length, below which they are one
DRY = 6  # rounds without a new token, after which no further one is looked for

Draw = Callable[[int, torch.Generator], Tensor]  # so many whitened tokens (tokens, dim)


@dataclass(frozen=True)
class TokenSet:
    """Whitened tokens behind the first attention, in no order."""

    whitened: Tensor  # (tokens, dim)
    met: int  # of them, proven; the rest are nearest misses


def search(equations: TokenEquations, rounds: int, starts: int, generator: torch.Generator) -> TokenSet:
    """As many tokens as the gradients are sums over."""
    met = meet(equations, rounds, starts, generator)
    return TokenSet(filled(equations, met, starts, generator), len(met))


def meet(
    equations: TokenEquations,
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


def beside(equations: TokenEquations, met: Tensor, guesses: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (tokens, dim) that prove themselves and were not met, and from which of the guesses (rows, dim) each came.

    Rounding turns the weakest directions of the spans: of tokens that are nearly alike one may be a mixture.
    """
    candidates = _polished(equations, guesses)
    excess = equations.excess(equations.at(candidates))
    new = ((excess < TRUE) & ~_near(candidates, met).any(dim=1)).nonzero().flatten()
    new = new[_first_of_each(candidates[new], excess[new])]
    return candidates[new], new


def filled(equations: TokenEquations, met: Tensor, starts: int, generator: torch.Generator) -> Tensor:
    """Tokens and what comes nearest to the equations of those that are left, half of these at a time."""
    while (missing := equations.count - len(met)) > 0:
        candidates, _ = _candidates(equations.without(met), starts, generator)
        other = candidates[~_near(candidates, met).any(dim=1)]
        met = torch.cat([met, other[: (missing + 1) // 2] if len(other) else candidates[:1]])  # one at least
    return met


def _candidates(
    equations: TokenEquations, starts: int, generator: torch.Generator, draw: Draw | None = None
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


def _polished(equations: TokenEquations, whitened: Tensor) -> Tensor:
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
