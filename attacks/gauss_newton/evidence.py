"""How likely orders of tokens are by all that a search says of them, token by token.

``placing`` compares thousands of orders, since it takes all tokens for equally sure. A token with a faint gradient may
be anywhere, another is known to a hundredth. Here the tokens in an order are estimated anew, with the prior and the
patch embedding's entries, and what is left says how likely the order is. It takes a factorisation for each, so that it
is for orders that are likely already.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attacks.first_mlp.places import Entrance
from attacks.gauss_newton.complete import Stated
from attacks.gauss_newton.picked import Known
from attacks.gauss_newton.placing import MOST, filled, off, unexplained, whitened
from attacks.gauss_newton.space import OpenSpace

DOUBT = 20.0  # of the cost: by so much it may prefer a wrong order, being of normal distributions


@dataclass(frozen=True)
class Evidence:
    """Minus twice the logarithm of how likely orders are, up to a constant.

    Attributes:
        found: By a search, in any order.
        shifts: (patches, rank), by what a place's position moves a token's patch.
        natural: (patches, rank), the most natural picture.
        precision: (patches, rank, patches, rank), of natural pictures.
        made: (patches * rank, entries), what tokens add to the patch embedding's entries, in units of noise.
        left: (entries,), what is left to be explained by tokens.
        alone: (tokens, places), what a token costs in each place.
    """

    found: Stated
    shifts: Tensor
    natural: Tensor
    precision: Tensor
    made: Tensor
    left: Tensor
    alone: Tensor

    @staticmethod
    def of(
        found: Stated, space: OpenSpace, entrance: Entrance, patch_weight: Known, positions: Known, skipped: int
    ) -> "Evidence":
        """Of the tokens of a search; the arguments are those of ``Placing.of``."""
        slopes, entries = found.slopes, patch_weight.largest(MOST)
        shown, mean, covariance = space.basis, entrance.prior.mean, entrance.prior.covariance
        filling, unseen = filled(shown, covariance)
        root = unexplained(slopes, entries, unseen)
        constant = mean - (shown @ mean) @ filling
        left = entries.values - slopes.sum(dim=0)[entries.rows] * constant[entries.columns]
        made = (slopes[:, None, entries.rows] * filling[:, entries.columns]).flatten(0, 1)
        count, rank = found.along.shape
        precision = torch.cholesky_inverse(torch.linalg.cholesky(space.root @ space.root.mT))
        return Evidence(
            found,
            entrance.shifts(shown),
            space.natural @ shown.mT,
            precision.view(count, rank, count, rank),
            whitened(root, made),
            whitened(root, left[None])[0],
            off(slopes, positions, skipped),
        )

    @cached_property
    def _explained(self) -> Tensor:
        """(patches * rank, patches * rank), what the patch embedding's entries say."""
        return self.made @ self.made.mT

    def cost(self, places: Tensor) -> float:
        """Of an order (tokens,) of places."""
        along = self.found.along + self.shifts - self.shifts[places]
        away = (along - self.natural[places]).flatten()
        natural = self.precision[places][:, :, places].flatten(2).flatten(0, 1)
        left = self.left - along.flatten() @ self.made
        pull = self.found.pull.flatten() - natural @ away + self.made @ left
        said = self.found.precision.flatten(2).flatten(0, 1)
        factor = torch.linalg.cholesky(said + natural + self._explained)
        gained = torch.linalg.solve_triangular(factor, pull[:, None], upper=False).square().sum()
        before = away @ (natural @ away) + left @ left + self.alone.gather(1, places[:, None]).sum()
        return float(before - gained + 2 * factor.diagonal().log().sum())

    def likeliest(
        self, orders: Iterable[Tensor], swaps: Callable[[Tensor], Iterable[tuple[int, int]]], until: float
    ) -> list[Tensor]:
        """The likeliest first, and those in ``DOUBT``: of some, and of all that swaps of two tokens lead to.

        Args:
            orders: (tokens,) of places, each.
            swaps: Of an order, the pairs that are tried.
            until: Of ``time.thread_time()``, after which none is tried.
        """
        costs = {tuple(order.tolist()): self.cost(order) for order in orders}
        best = min(costs, key=costs.__getitem__)
        pairs = iter(swaps(self._order(best)))
        while time.thread_time() < until and (pair := next(pairs, None)):
            swapped = list(best)
            swapped[pair[0]], swapped[pair[1]] = best[pair[1]], best[pair[0]]
            order = tuple(swapped)
            if order not in costs:
                costs[order] = self.cost(self._order(order))
            if costs[order] < costs[best]:
                best, pairs = order, iter(swaps(self._order(order)))
        doubtful = sorted((order for order in costs if costs[order] < costs[best] + DOUBT), key=costs.__getitem__)
        return [self._order(order) for order in doubtful]

    def _order(self, places: tuple[int, ...]) -> Tensor:
        return torch.tensor(places, device=self.alone.device)
