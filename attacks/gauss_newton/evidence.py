"""How likely orders of tokens are by all that a search says of them, token by token.

``placing`` compares thousands of orders, since it takes all tokens for equally sure. A token with a faint gradient may
be anywhere, another is known to a hundredth. Here the tokens in an order are estimated anew, with the prior and the
patch embedding's entries, and what is left says how likely the order is. It takes a factorisation for each, so that it
is for orders that are likely already.
"""

import itertools
import time
from collections.abc import Iterable
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

    def likeliest(self, orders: Iterable[Tensor], until: float) -> list[Tensor]:
        """The likeliest first, and those in ``DOUBT``: of some, and of all that swaps of two tokens lead to.

        Swaps are tried as long as ``time.thread_time()`` is before ``until``.
        """
        costs = {tuple(order.tolist()): self.cost(order) for order in orders}
        best = min(costs, key=costs.__getitem__)
        pairs = list(itertools.combinations(range(len(best)), 2))
        tried = 0  # since the last that gained
        for first, second in itertools.cycle(pairs):
            if tried == len(pairs) or time.thread_time() > until:
                break
            swapped = list(best)
            swapped[first], swapped[second] = best[second], best[first]
            order = tuple(swapped)
            if order not in costs:
                costs[order] = self.cost(torch.tensor(order, device=self.alone.device))
            best, tried = (order, 0) if costs[order] < costs[best] else (best, tried + 1)
        doubtful = sorted((order for order in costs if costs[order] < costs[best] + DOUBT), key=costs.__getitem__)
        return [torch.tensor(order, device=self.alone.device) for order in doubtful]
