"""All tokens behind the first attention: search from random points, and take out of the sums what was found."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.first_block.equations import TokenEquations
from fedmjp.attacks.first_block.minimise import minimise

STEPS, POLISHING = 25, 12
FIRST_DAMPING, POLISHED_DAMPING = 1e-3, 1e-6  # of the mean diagonal
TRUE = 1.6  # excess: up to here a zero counts as a token
SAME = 0.02  # distance of two whitened tokens, of their length, below which they are the same token
DRY = 6  # rounds without a new token after which the search stops
ROUNDS, STARTS = 25, 96  # of a search for tokens, where its caller has no budget of its own

Draw = Callable[[int, torch.Generator], Tensor]  # draws so many whitened tokens (tokens, dim)


@dataclass(frozen=True)
class TokenSet:
    """Whitened tokens behind the first attention, in no order."""

    whitened: Tensor  # (tokens, dim)
    proven: int  # the first so many are proven tokens, the remaining ones nearest misses


def search(equations: TokenEquations, rounds: int, starts: int, generator: torch.Generator) -> TokenSet:
    """Return as many tokens as the gradients are sums over: proven ones first, then the nearest misses.

    Args:
        equations: The equations of tokens.
        rounds: At most.
        starts: Points that each round starts from.
        generator: Draws the starts, on the CPU.
    """
    tokens = find_tokens(equations, rounds, starts, generator)
    proven = len(tokens)
    while (missing := equations.count - len(tokens)) > 0:  # half of the missing ones at a time
        candidates, _ = _candidates(equations.without(tokens), starts, generator)
        new = candidates[~_near(candidates, tokens).any(dim=1)]
        tokens = torch.cat([tokens, new[: (missing + 1) // 2] if len(new) else candidates[:1]])
    return TokenSet(tokens, proven)


def find_tokens(
    equations: TokenEquations,
    rounds: int,
    starts: int,
    generator: torch.Generator,
    *,
    dry_rounds: int = DRY,
    draw: Draw | None = None,
) -> Tensor:
    """Find whitened tokens (tokens, dim) that prove themselves, until rounds add nothing any more.

    Each round takes the tokens found so far out of the sums and searches in the remaining equations, where these are
    no zeros any more and the space is smaller. It then polishes the candidates in the equations of all tokens.

    Args:
        equations: The equations of tokens.
        rounds: At most.
        starts: Points that each round starts from.
        generator: Draws the starts, on the CPU.
        dry_rounds: Rounds without a new token after which the search stops.
        draw: Draws starts. A round uses it or isotropic starts, whichever added more tokens the last time; isotropic
            starts alone if None.
    """
    tokens = equations.basis.new_zeros(0, equations.basis.shape[1])
    excess, dry = tokens[:, 0], 0
    draws = [None] if draw is None else [draw, None]
    added = dict.fromkeys(range(len(draws)), equations.count)
    for _ in range(rounds):
        kind = max(added, key=lambda index: added[index])
        candidates = _polished(equations, _candidates(equations.without(tokens), starts, generator, draws[kind])[0])
        candidate_excess = equations.excess(equations.at(candidates))
        likely = candidate_excess < TRUE
        count = len(tokens)
        tokens, excess = _distinct(
            torch.cat([tokens, candidates[likely]]), torch.cat([excess, candidate_excess[likely]])
        )
        tokens, excess = tokens[: equations.count], excess[: equations.count]
        added[kind] = len(tokens) - count
        dry = 0 if added[kind] else dry + 1
        if len(tokens) == equations.count or dry == dry_rounds or equations.time_is_up():
            break
    return tokens


def find_near(equations: TokenEquations, tokens: Tensor, guesses: Tensor) -> tuple[Tensor, Tensor]:
    """Find further tokens near guesses; return them (new, dim), and the row of the guess (new,) that each came from.

    Rounding turns the weakest directions of the spans: where tokens are nearly alike, one may be a mixture.

    Args:
        equations: The equations of tokens.
        tokens: (tokens, dim) that were found already.
        guesses: (guesses, dim) whitened tokens.
    """
    candidates = _polished(equations, guesses)
    excess = equations.excess(equations.at(candidates))
    new = ((excess < TRUE) & ~_near(candidates, tokens).any(dim=1)).nonzero().flatten()
    new = new[_first_of_each(candidates[new], excess[new])]
    return candidates[new], new


def _candidates(
    equations: TokenEquations, starts: int, generator: torch.Generator, draw: Draw | None = None
) -> tuple[Tensor, Tensor]:
    """Search from random points; return different whitened tokens (ends, dim) and costs (ends,), ascending."""
    basis = equations.basis
    if draw is None:
        start = torch.randn(starts, len(basis), generator=generator, dtype=torch.float64).to(basis)
    else:
        start = draw(starts, generator) @ basis.mT
    start = start * (equations.radius / start.norm(dim=1, keepdim=True))
    unknowns, point = minimise(equations, start, steps=STEPS, damping=FIRST_DAMPING, on_sphere=True)
    return _distinct(unknowns @ basis, point.cost)


def _polished(equations: TokenEquations, whitened: Tensor) -> Tensor:
    """Return the zeros near whitened tokens; their length is free, because of the LayerNorm's epsilon."""
    start = whitened @ equations.basis.mT
    start = start * (equations.radius / start.norm(dim=1, keepdim=True))
    start, _ = minimise(equations, start, steps=POLISHING, damping=FIRST_DAMPING, on_sphere=True)
    start, _ = minimise(equations, start, steps=POLISHING, damping=POLISHED_DAMPING, on_sphere=False)
    return start @ equations.basis


def _distinct(whitened: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Keep one of each group of tokens that are the same, the first in this order."""
    rows = _first_of_each(whitened, order)
    return whitened[rows], order[rows]


def _first_of_each(whitened: Tensor, order: Tensor) -> list[int]:
    """Return the row of the first token of each group, in this order."""
    rows: list[int] = []
    near = _near(whitened, whitened)
    for index in order.argsort().tolist():
        if not near[index, rows].any():
            rows.append(index)
    return rows


def _near(whitened: Tensor, references: Tensor) -> Tensor:
    """Tell (tokens, references) which are the same."""
    near: Tensor = torch.cdist(whitened, references) < SAME * whitened.shape[1] ** 0.5
    return near
