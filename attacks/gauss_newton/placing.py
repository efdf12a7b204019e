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
        posterior: PatchPosterior,
        unsure: Tensor,
        space: OpenSpace,
        embedding: TokenEmbedding,
        patch_weight: KnownEntries,
        positions: KnownEntries,
        skipped: int,
    ) -> "PlacementCost":
        """Build from the tokens of a search.

        Args:
            posterior: In any order.
            unsure: (rank, rank) covariance of what the search says of one token.
            space: What tokens show of pictures, and how natural it is.
            embedding: Of the model, with natural patches: they fill what tokens do not show.
            patch_weight: Entries of the patch embedding's gradient (dim, values).
            positions: Entries of the position embedding's gradient (tokens, dim).
            skipped: Tokens before those of patches.
        """
        slopes, entries = posterior.slopes, patch_weight.largest(MOST)
        directions, mean, covariance = space.basis, embedding.prior.mean, embedding.prior.covariance
        shifts = embedding.shifts(directions)
        along = (posterior.along + shifts)[:, None] - shifts
        filling, unseen = filled(directions, covariance)
        patches = mean + (along - directions @ mean) @ filling
        unsure = unsure + UNSURE**2 * posterior.along.square().mean() * torch.eye(len(unsure)).to(unsure)
        unseen = unseen + filling.mT @ unsure @ filling
        rows, columns = entries.rows, entries.columns
        root = unexplained(slopes, entries, unseen)
        contributions = whitened(root, (slopes[:, None, rows] * patches[:, :, columns]).flatten(0, 1))
        stated = whitened(root, entries.values[None])[0]
        natural = _natural(along - space.natural @ directions.mT, unsure, space.root)
        alone = off(slopes, positions, skipped) - 2 * (contributions @ stated).view(along.shape[:2])
        return PlacementCost(alone, contributions @ contributions.mT + natural @ natural.mT)

    def cost(self, places: Tensor) -> float:
        """Return the cost of an order.

        Args:
            places: (tokens,) the order.
        """
        indices = self.indices(places).diagonal()
        return float(self.alone.flatten()[indices].sum() + self.together[indices][:, indices].sum())

    def best(self, starts: Sequence[Tensor], generator: torch.Generator, until: float, most: int = 1) -> list[Tensor]:
        """Search for the likeliest orders by swaps.

        Args:
            starts: Orders to begin with; random ones follow.
            generator: On the CPU.
            until: Of ``time.thread_time()``, after which none is drawn.
            most: Orders that are returned, at most.
        """
        by_order = {tuple(order.tolist()): order for order in map(self.settled, starts)}
        for _ in range(TRIES):
            if time.thread_time() > until:
                break
            order = self.settled(torch.randperm(len(starts[0]), generator=generator).to(starts[0].device))
            by_order[tuple(order.tolist())] = order
        costs = {order: self.cost(places) for order, places in by_order.items()}
        likely = sorted(costs, key=costs.__getitem__)[:most]
        return [by_order[order] for order in likely if costs[order] < costs[likely[0]] + FAR]

    def settled(self, places: Tensor) -> Tensor:
        """Swap two tokens at a time, always the pair that gains most, until no pair gains.

        Args:
            places: (tokens,) the order to begin with.
        """
        swaps, least = Swaps(self, places), SETTLED * abs(self.cost(places))
        while float((more := swaps.more).min()) < -least:
            swaps.take(*divmod(int(more.argmin()), len(places)))
        return swaps.places

    def swaps(self, places: Tensor) -> list[tuple[int, int]]:
        """List pairs of tokens that may have each other's places, the likeliest first.

        Args:
            places: (tokens,) the order.
        """
        more = Swaps(self, places).more
        first, second = torch.triu(more < FAR, diagonal=1).nonzero().T
        order = more[first, second].argsort()
        return list(zip(first[order].tolist(), second[order].tolist(), strict=True))

    def indices(self, places: Tensor) -> Tensor:
        """Return (tokens, tokens): the index, among all tokens in all places, of each token in the place of each.

        Args:
            places: (tokens,) the order.
        """
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
        indices = placing.indices(places).diagonal()
        self._slope = placing.alone.flatten() + 2 * placing.together[indices].sum(dim=0)
        self._apart = self._of_four(torch.arange(len(places), device=places.device))

    @property
    def more(self) -> Tensor:
        """Return (tokens, tokens), by how much each swap raises the cost."""
        slope = self._slope[self._placing.indices(self.places)]
        stands = slope.diagonal()
        more = slope + slope.mT - stands[:, None] - stands + self._apart
        return more.fill_diagonal_(torch.inf)

    def take(self, first: int, second: int) -> None:
        """Swap two tokens."""
        two = torch.tensor([first, second], device=self.places.device)
        old_indices = self._placing.indices(self.places)[two, two]
        self.places[two] = self.places[two.flip(0)]
        new_indices = self._placing.indices(self.places)[two, two]
        pair_costs = self._placing.together
        self._slope += 2 * (pair_costs[new_indices].sum(dim=0) - pair_costs[old_indices].sum(dim=0))
        rows = self._of_four(two)
        self._apart[two], self._apart[:, two] = rows, rows.mT

    def _of_four(self, tokens: Tensor) -> Tensor:
        """Return (some tokens, tokens), what the four changes of a swap are to each other."""
        swapped = self._placing.indices(self.places)
        standing = swapped.diagonal()
        changes = (1, swapped[tokens]), (1, swapped.mT[tokens]), (-1, standing[tokens, None]), (-1, standing[None])
        interaction = torch.zeros(len(tokens), len(standing)).to(self._slope)
        for sign, index in changes:
            for other_sign, other_index in changes:
                interaction += sign * other_sign * self._placing.together[index, other_index]
        return interaction


def filled(directions: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix that fills a patch (values,) from its shown part (rank,), and the covariance of the error.

    Args:
        directions: (rank, values) the directions.
        covariance: (values, values), of natural patches.

    Returns:
        A matrix (rank, values), and one (values, values).
    """
    by_shown = covariance @ directions.mT
    filling: Tensor = torch.linalg.solve(directions @ by_shown, by_shown.mT)
    return filling, covariance - by_shown @ filling


def unexplained(slopes: Tensor, entries: KnownEntries, unseen: Tensor) -> Tensor:
    """Return a lower factor of the covariance of the patch embedding's entries.

    Args:
        slopes: (tokens, dim), the loss's gradient at each token.
        entries: Of the patch embedding.
        unseen: (values, values) covariance of a patch.
    """
    rows, columns = entries.rows, entries.columns
    covariance = (slopes.mT @ slopes)[rows][:, rows] * unseen[columns][:, columns]
    covariance.diagonal().add_(1 / entries.precision + UNSURE**2 * entries.values.square().mean())
    root: Tensor = torch.linalg.cholesky(covariance)
    return root


def whitened(root: Tensor, rows: Tensor) -> Tensor:
    """Divide rows by a covariance's root.

    Args:
        root: (values, values), a lower factor.
        rows: (rows, values).
    """
    solved: Tensor = torch.linalg.solve_triangular(root, rows.mT, upper=False)
    return solved.mT


def _natural(away: Tensor, unsure: Tensor, root: Tensor) -> Tensor:
    """Return (tokens * places, unknowns), from how far tokens (tokens, places, rank) are from the mean of places."""
    every = torch.eye(away.shape[1]).to(away)
    lower = torch.linalg.cholesky(root @ root.mT + torch.kron(every, unsure))
    solved = torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False)
    return torch.einsum("upi,tpi->tpu", solved.view(len(lower), *away.shape[1:]), away).flatten(0, 1)


def off(slopes: Tensor, positions: KnownEntries, skipped: int) -> Tensor:
    """Return (tokens, places): how far slopes are from the known entries of a place's gradient.

    Args:
        slopes: (tokens, dim), the loss's gradient at each token.
        positions: Entries of the position embedding's gradient (tokens, dim).
        skipped: Tokens before those of patches.
    """
    at_patches = positions.rows >= skipped
    places, columns = positions.rows[at_patches] - skipped, positions.columns[at_patches]
    variance = 1 / positions.precision[at_patches] + UNSURE**2 * slopes.square().mean()
    distances = (slopes[:, columns] - positions.values[at_patches]).square() / variance
    return torch.zeros(len(slopes), len(slopes)).to(slopes).index_add_(1, places, distances)
