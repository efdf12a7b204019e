"""One picture's tokens, all at once, on the equations of the first block alone.

Loud tokens that are nearly alike, as of a bright sky, are zeros of the first MLP's equations that lie in one valley,
and a search among all tokens may miss them. But the token of a place enters the block as z = s + Z^T c with few
unknowns c, and attention carries it into every other token of its picture. Together the tokens of a picture have many
more equations than unknowns, and no other picture is in them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jvp, vmap

from fedmjp.attacks.first_block.equations import TokenEquations
from fedmjp.attacks.first_block.search import TRUE
from fedmjp.attacks.gauss_newton.levenberg import StoppingRule, minimise

STEPS = 15
CHUNK = 64  # directions that are differentiated at a time


@dataclass(frozen=True)
class PlaceEquations:
    """What the linear facts leave open of the tokens that enter the first block."""

    equations: TokenEquations
    class_token: Tensor  # (dim,) with its position
    still: Tensor  # (patches, dim), s
    moves: Tensor  # (rank, dim), Z

    def refined(self, along: Tensor) -> Tensor:
        """Refine the unknowns of a picture; they stay as they are where the equations explain them.

        Args:
            along: C (patches, rank), near the picture.
        """
        weights = self._weights(along)
        errors = weights[:, None] * self._remainders(along)
        if bool((errors.square().sum(1) <= TRUE**2).all()):
            return along

        def function(unknowns: Tensor) -> Tensor:
            return (weights[:, None] * self._remainders(unknowns.view_as(along))).flatten()

        def slopes(unknowns: Tensor) -> Tensor:
            whole = torch.eye(len(unknowns)).to(unknowns)
            parts = [
                vmap(lambda one: jvp(function, (unknowns,), (one,))[1])(some) for some in torch.split(whole, CHUNK)
            ]
            return torch.cat(parts)

        ended = minimise(
            function, along.flatten(), steps=STEPS, slopes=slopes, ends=StoppingRule(enough=float(len(along)))
        )
        return ended.point.view_as(along)

    def _behind(self, along: Tensor) -> Tensor:
        """Return (patches, dim) whitened tokens behind the attention."""
        first = self.equations.block
        whole = torch.cat([self.class_token[None], self.still + along @ self.moves])
        behind = whole + first.attention(whole, first.keys_values(whole))
        return first.norm2.whiten(behind[1:])[0]

    def _remainders(self, along: Tensor) -> Tensor:
        """Return (patches, equations), zero for true tokens."""
        return self.equations.at(self._behind(along)).remainders

    def _weights(self, along: Tensor) -> Tensor:
        """Return (patches,) one over the length that rounding leaves of each token's equations."""
        return self.equations.expected(self.equations.at(self._behind(along))).rsqrt()
