"""How likely orders of tokens are by all that a search says of them, token by token.

``placing`` compares thousands of orders, since it takes all tokens for equally sure. A token with a faint gradient may
be anywhere, another is known to a hundredth. Here the tokens in an order are estimated anew, with the prior and the
patch embedding's entries, and what is left says how likely the order is. It takes a factorisation for an order, and a
tenth of that for each that differs from it in two tokens, so that it is for orders that are likely already.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedmjp.attacks.first_block.places import TokenEmbedding
from fedmjp.attacks.gauss_newton.complete import PatchPosterior
from fedmjp.attacks.gauss_newton.picked import KnownEntries
from fedmjp.attacks.gauss_newton.placing import MOST, filled, off, unexplained, whitened
from fedmjp.attacks.gauss_newton.space import OpenSpace

DOUBT = 20.0  # of the cost: by so much it may prefer a wrong order, being of normal distributions


@dataclass(frozen=True)
class Evidence:
    """Minus twice the logarithm of how likely orders are, up to a constant.

    Attributes:
        posterior: Of a search's tokens, in any order.
        shifts: (patches, rank), by what a place's position moves a token's patch.
        natural: (patches, rank), the most natural picture.
        precision: (patches, rank, patches, rank), of natural pictures.
        contributions: (patches * rank, entries), what tokens add to the patch embedding's entries, in units of noise.
        remainder: (entries,), what is left to be explained by tokens.
        alone: (tokens, places), what a token costs in each place.
    """

    posterior: PatchPosterior
    shifts: Tensor
    natural: Tensor
    precision: Tensor
    contributions: Tensor
    remainder: Tensor
    alone: Tensor

    @staticmethod
    def of(
        posterior: PatchPosterior,
        space: OpenSpace,
        embedding: TokenEmbedding,
        patch_weight: KnownEntries,
        positions: KnownEntries,
        skipped: int,
    ) -> "Evidence":
        """Build from the tokens of a search.

        Args:
            posterior: Of the tokens, in any order.
            space: What tokens show of pictures, and how natural it is.
            embedding: Of the model, with natural patches: they fill what tokens do not show.
            patch_weight: Entries of the patch embedding's gradient (dim, values).
            positions: Entries of the position embedding's gradient (tokens, dim).
            skipped: Tokens before those of patches.
        """
        slopes, entries = posterior.slopes, patch_weight.largest(MOST)
        directions, mean, covariance = space.basis, embedding.prior.mean, embedding.prior.covariance
        filling, unseen = filled(directions, covariance)
        root = unexplained(slopes, entries, unseen)
        constant = mean - (directions @ mean) @ filling
        remainder = entries.values - slopes.sum(dim=0)[entries.rows] * constant[entries.columns]
        contributions = (slopes[:, None, entries.rows] * filling[:, entries.columns]).flatten(0, 1)
        count, rank = posterior.along.shape
        precision = torch.cholesky_inverse(torch.linalg.cholesky(space.root @ space.root.mT))
        return Evidence(
            posterior,
            embedding.shifts(directions),
            space.natural @ directions.mT,
            precision.view(count, rank, count, rank),
            whitened(root, contributions),
            whitened(root, remainder[None])[0],
            off(slopes, positions, skipped),
        )

    @cached_property
    def _explained(self) -> Tensor:
        """Return (patches * rank, patches * rank), what the patch embedding's entries say."""
        return self.contributions @ self.contributions.mT

    def along(self, places: Tensor) -> Tensor:
        """Return (tokens, rank), the patches of tokens in an order of places.

        Args:
            places: (tokens,) the order.
        """
        return self.posterior.along + self.shifts - self.shifts[places]

    def away(self, places: Tensor) -> Tensor:
        """Return (tokens * rank,), how far patches are from the most natural picture.

        Args:
            places: (tokens,) the order.
        """
        return (self.along(places) - self.natural[places]).flatten()

    def begun(self, places: Tensor, drawn: Tensor, remainder: Tensor) -> tuple[Tensor, Tensor]:
        """Return an order's cost with tokens as found, and the slope (tokens * rank,) by which they are estimated anew.

        Args:
            places: (tokens,) the order.
            drawn: (tokens * rank,) how far patches are from the most natural picture, times its precision.
            remainder: (entries,), what patches leave unexplained of the patch embedding's.
        """
        cost = self.away(places) @ drawn + remainder @ remainder + self.alone.gather(1, places[:, None]).sum()
        return cost, self.posterior.pull.flatten() - drawn + self.contributions @ remainder

    def weighed(self, places: Tensor) -> "WeighedOrder":
        """Weigh an order, so that neighbouring orders are quick to weigh.

        Args:
            places: (tokens,) the order.
        """
        precision = self.precision[places][:, :, places].flatten(2).flatten(0, 1)
        likelihood = self.posterior.precision.flatten(2).flatten(0, 1)
        factor = torch.linalg.cholesky(likelihood + precision + self._explained)
        remainder = self.remainder - self.along(places).flatten() @ self.contributions
        return WeighedOrder(self, places, precision, precision @ self.away(places), remainder, factor)

    def likeliest(
        self, orders: Iterable[Tensor], swaps: Callable[[Tensor], Iterable[tuple[int, int]]], until: float
    ) -> list[Tensor]:
        """Return the orders within ``DOUBT``, the likeliest first: given ones, and all that swaps of two tokens reach.

        Args:
            orders: (tokens,) of places, each.
            swaps: Of an order, the pairs that are tried.
            until: Of ``time.thread_time()``, after which none is tried.
        """
        costs = {tuple(order.tolist()): self.weighed(order).cost for order in orders}
        best = min(costs, key=costs.__getitem__)
        weighed, pairs = self.weighed(self._order(best)), iter(swaps(self._order(best)))
        while time.thread_time() < until and (pair := next(pairs, None)):
            swapped = list(best)
            swapped[pair[0]], swapped[pair[1]] = best[pair[1]], best[pair[0]]
            order = tuple(swapped)
            if order not in costs:
                costs[order] = weighed.swapped(pair)
            if costs[order] < costs[best]:
                best, weighed, pairs = order, self.weighed(self._order(order)), iter(swaps(self._order(order)))
        doubtful = sorted((order for order in costs if costs[order] < costs[best] + DOUBT), key=costs.__getitem__)
        return [self._order(order) for order in doubtful]

    def _order(self, places: tuple[int, ...]) -> Tensor:
        return torch.tensor(places, device=self.alone.device)


@dataclass(frozen=True)
class WeighedOrder:
    """An order that was weighed, from which orders that differ in two tokens are quick to weigh.

    Where two tokens change places, what natural pictures say changes in the rows and columns of these two alone: a
    change of low rank, which moves a determinant and an inverse by a small matrix.

    Attributes:
        evidence: By which.
        places: (tokens,) the order.
        precision: (tokens * rank, tokens * rank), of natural pictures, in the order of tokens.
        drawn: (tokens * rank,), ``precision`` times how far the patches are from the most natural picture.
        remainder: (entries,), what patches leave unexplained of the patch embedding's.
        factor: (tokens * rank, tokens * rank), a lower one of all precision together.
    """

    evidence: Evidence
    places: Tensor
    precision: Tensor
    drawn: Tensor
    remainder: Tensor
    factor: Tensor

    @property
    def cost(self) -> float:
        """Return the cost of the order."""
        cost_as_found, pull = self.evidence.begun(self.places, self.drawn, self.remainder)
        gained = torch.linalg.solve_triangular(self.factor, pull[:, None], upper=False).square().sum()
        return float(cost_as_found - gained + self._volume)

    def swapped(self, pair: tuple[int, int]) -> float:
        """Return the cost of the order in which two tokens have each other's places."""
        evidence, two, places = self.evidence, list(pair), self.places.clone()
        places[two] = self.places[two[::-1]]
        values = torch.arange(len(self.factor), device=places.device).view_as(evidence.natural)[two].flatten()
        more = evidence.precision[places][:, :, places[two]].flatten(2).flatten(0, 1) - self.precision[:, values]
        along, away = evidence.along(places), evidence.away(places)
        drawn = more @ away[values]
        drawn[values] = more.mT @ away
        drawn += self.drawn + self.precision[:, values] @ (away - evidence.away(self.places))[values]
        remainder = (
            self.remainder - (along - evidence.along(self.places)).flatten()[values] @ evidence.contributions[values]
        )
        cost_as_found, pull = evidence.begun(places, drawn, remainder)
        # The precision changes by U both^-1 U^T, where U has the unit vectors of these values, and ``more``.
        by_change = torch.cat([self._inverse[:, values], self._inverse @ more], dim=1)
        every = torch.eye(len(values)).to(more)
        both = torch.cat([torch.cat([0 * every, every], dim=1), torch.cat([every, more[values]], dim=1)])
        small = both + torch.cat([by_change[values], more.mT @ by_change])
        change_pull = by_change.mT @ pull
        gained = pull @ (self._inverse @ pull) - change_pull @ torch.linalg.solve(small, change_pull)
        return float(cost_as_found - gained + self._volume + torch.linalg.slogdet(small).logabsdet)

    @property
    def _volume(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.cholesky_inverse(self.factor)
