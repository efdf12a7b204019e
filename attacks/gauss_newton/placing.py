"""Which token stands where, by what is left of both embeddings' gradients.

The network takes tokens as a set: where the position embedding's gradient is pruned, a search finds them all and not
their order. The patch embedding's gradient is a sum over tokens of slope times patch. The patch behind a token depends
on its place, because another position embedding was added to it there. So the entries that are left tell the order, and
where they are few, natural pictures tell the rest.

Tokens that were searched in wrong places are where pictures are natural there, not where they stand. How natural they
are elsewhere says little unless the search was sure of them: it is told how sure.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.first_block.places import TokenEmbedding
from fedmjp.attacks.gauss_newton.complete import PatchPosterior
from fedmjp.attacks.gauss_newton.picked import KnownEntries
from fedmjp.attacks.gauss_newton.space import OpenSpace

UNSURE = 3e-3  # of what a search found, at least, and of the entries that follow from it
MOST = 2000  # entries of the patch embedding, the largest: all pairs are kept
TRIES = 150  # orders that are drawn: swaps lead from some of them to the best, seldom from one that is given
FAR = 500.0  # of the cost: an order that takes so much more is not looked at more closely
SETTLED = 1e-9  # of the cost: what rounding makes of a swap that gains nothing


@dataclass(frozen=True)
class PlacementCost:
    """How likely orders are: minus twice the logarithm is a sum over tokens and pairs of them, up to a constant.

    Attributes:
        alone: (tokens, places), what a token costs in each place.
        together: (tokens * places, tokens * places), what two add to that, and each with itself.
    """

    alone: Tensor
    together: Tensor

    @staticmethod
    def of(
        found: PatchPosterior,
        unsure: Tensor,
        space: OpenSpace,
        entrance: TokenEmbedding,
        patch_weight: KnownEntries,
        positions: KnownEntries,
        skipped: int,
    ) -> "PlacementCost":
        """Of the tokens of a search.

        Args:
            found: In any order.
            unsure: (rank, rank) covariance of what the search says of one token.
            space: What tokens show of pictures, and how natural it is.
            entrance: Of the model, with natural patches: they fill what tokens do not show.
            patch_weight: Entries of the patch embedding's gradient (dim, values).
            positions: Entries of the position embedding's gradient (tokens, dim).
            skipped: Tokens before those of patches.
        """
        slopes, entries = found.slopes, patch_weight.largest(MOST)
        shown, mean, covariance = space.basis, entrance.prior.mean, entrance.prior.covariance
        shifts = entrance.shifts(shown)
        along = (found.along + shifts)[:, None] - shifts
        filling, unseen = filled(shown, covariance)
        patches = mean + (along - shown @ mean) @ filling
        unsure = unsure + UNSURE**2 * found.along.square().mean() * torch.eye(len(unsure)).to(unsure)
        unseen = unseen + filling.mT @ unsure @ filling
        rows, columns = entries.rows, entries.columns
        root = unexplained(slopes, entries, unseen)
        made = whitened(root, (slopes[:, None, rows] * patches[:, :, columns]).flatten(0, 1))
        stated = whitened(root, entries.values[None])[0]
        natural = _natural(along - space.natural @ shown.mT, unsure, space.root)
        alone = off(slopes, positions, skipped) - 2 * (made @ stated).view(along.shape[:2])
        return PlacementCost(alone, made @ made.mT + natural @ natural.mT)

    def cost(self, places: Tensor) -> float:
        """Of an order (tokens,) of places."""
        here = self.indices(places).diagonal()
        return float(self.alone.flatten()[here].sum() + self.together[here][:, here].sum())

    def best(self, starts: Sequence[Tensor], generator: torch.Generator, until: float, most: int = 1) -> list[Tensor]:
        """The likeliest orders that swaps lead to, from these and from drawn ones until ``time.thread_time()``."""
        found = {tuple(order.tolist()): order for order in map(self.settled, starts)}
        for _ in range(TRIES):
            if time.thread_time() > until:
                break
            order = self.settled(torch.randperm(len(starts[0]), generator=generator).to(starts[0].device))
            found[tuple(order.tolist())] = order
        costs = {order: self.cost(places) for order, places in found.items()}
        likely = sorted(costs, key=costs.__getitem__)[:most]
        return [found[order] for order in likely if costs[order] < costs[likely[0]] + FAR]

    def settled(self, places: Tensor) -> Tensor:
        """The order that swaps of two tokens lead to, each the one that gains most."""
        swaps, least = Swaps(self, places), SETTLED * abs(self.cost(places))
        while float((more := swaps.more).min()) < -least:
            swaps.take(*divmod(int(more.argmin()), len(places)))
        return swaps.places

    def swaps(self, places: Tensor) -> list[tuple[int, int]]:
        """Pairs of tokens, the likeliest first, that may have each other's places."""
        more = Swaps(self, places).more
        first, second = torch.triu(more < FAR, diagonal=1).nonzero().T
        order = more[first, second].argsort()
        return list(zip(first[order].tolist(), second[order].tolist(), strict=True))

    def indices(self, places: Tensor) -> Tensor:
        """(tokens, tokens), among all tokens in all places, of each token in the place of each."""
        count = len(places)
        return count * torch.arange(count, device=places.device)[:, None] + places


class Swaps:
    """All swaps of two tokens of an order, and what each would add to the cost.

    A swap takes two tokens from their places and puts them into two others: four changes, each by the slope of the
    cost, and what these four are to each other. After a swap the slopes follow from four rows of ``together``, and the
    latter is as before but for the two tokens that moved.
    """

    def __init__(self, placing: PlacementCost, places: Tensor) -> None:
        """Begin with an order (tokens,) of places."""
        self.places, self._placing = places.clone(), placing
        here = placing.indices(places).diagonal()
        self._slope = placing.alone.flatten() + 2 * placing.together[here].sum(dim=0)
        self._apart = self._of_four(torch.arange(len(places), device=places.device))

    @property
    def more(self) -> Tensor:
        """(tokens, tokens), by how much each costs more than none."""
        slope = self._slope[self._placing.indices(self.places)]
        stands = slope.diagonal()
        more = slope + slope.mT - stands[:, None] - stands + self._apart
        return more.fill_diagonal_(torch.inf)

    def take(self, first: int, second: int) -> None:
        """Swap two tokens."""
        two = torch.tensor([first, second], device=self.places.device)
        before = self._placing.indices(self.places)[two, two]
        self.places[two] = self.places[two.flip(0)]
        after = self._placing.indices(self.places)[two, two]
        together = self._placing.together
        self._slope += 2 * (together[after].sum(dim=0) - together[before].sum(dim=0))
        rows = self._of_four(two)
        self._apart[two], self._apart[:, two] = rows, rows.mT

    def _of_four(self, tokens: Tensor) -> Tensor:
        """(some tokens, tokens), what the four changes of a swap are to each other."""
        there = self._placing.indices(self.places)
        here = there.diagonal()
        changes = (1, there[tokens]), (1, there.mT[tokens]), (-1, here[tokens, None]), (-1, here[None])
        made = torch.zeros(len(tokens), len(here)).to(self._slope)
        for sign, one in changes:
            for other, two in changes:
                made += sign * other * self._placing.together[one, two]
        return made


def filled(shown: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """What is likeliest of a patch (values,) by what is shown (rank,) of it, and the covariance of what it is off.

    Args:
        shown: (rank, values) the directions.
        covariance: (values, values), of natural patches.

    Returns:
        A matrix (rank, values), and one (values, values).
    """
    by_shown = covariance @ shown.mT
    filling: Tensor = torch.linalg.solve(shown @ by_shown, by_shown.mT)
    return filling, covariance - by_shown @ filling


def unexplained(slopes: Tensor, entries: KnownEntries, unseen: Tensor) -> Tensor:
    """A lower factor of the covariance of the patch embedding's entries, where ``unseen`` is that of a patch's values.

    Slopes (tokens, dim) are each token's.
    """
    rows, columns = entries.rows, entries.columns
    covariance = (slopes.mT @ slopes)[rows][:, rows] * unseen[columns][:, columns]
    covariance.diagonal().add_(1 / entries.precision + UNSURE**2 * entries.values.square().mean())
    root: Tensor = torch.linalg.cholesky(covariance)
    return root


def whitened(root: Tensor, rows: Tensor) -> Tensor:
    """Rows (rows, values) in units of a covariance with a lower factor (values, values)."""
    solved: Tensor = torch.linalg.solve_triangular(root, rows.mT, upper=False)
    return solved.mT


def _natural(away: Tensor, unsure: Tensor, root: Tensor) -> Tensor:
    """(tokens * places, unknowns) of tokens that are (tokens, places, rank) away from the mean of their places."""
    every = torch.eye(away.shape[1]).to(away)
    lower = torch.linalg.cholesky(root @ root.mT + torch.kron(every, unsure))
    solved = torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False)
    return torch.einsum("upi,tpi->tpu", solved.view(len(lower), *away.shape[1:]), away).flatten(0, 1)


def off(slopes: Tensor, positions: KnownEntries, skipped: int) -> Tensor:
    """(tokens, places): how far slopes are from the entries that are left of a place's gradient."""
    at_patches = positions.rows >= skipped
    places, columns = positions.rows[at_patches] - skipped, positions.columns[at_patches]
    variance = 1 / positions.precision[at_patches] + UNSURE**2 * slopes.square().mean()
    apart = (slopes[:, columns] - positions.values[at_patches]).square() / variance
    return torch.zeros(len(slopes), len(slopes)).to(slopes).index_add_(1, places, apart)
