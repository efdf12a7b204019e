"""The attention output as a function of the token that asks, given the tokens known so far."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.mjp.span.equations import Equations

Attended = Callable[[Tensor], Tensor]  # z (tokens, dim) to z + o(z)


@dataclass(frozen=True)
class Known:
    """Tokens taken as known besides the class token.

    Attributes:
        places: (visible,) places of patches that are not masked.
        visible: (visible, unknowns), their coefficients.
        masked: (masked, unknowns), coefficients of masked patches, in no particular order.
    """

    places: Tensor
    visible: Tensor
    masked: Tensor


def attended(equations: Equations, known: Known) -> Attended:
    """The map z -> z + o(z), with o from the keys and values of what is known, and a common correction.

    As long as tokens are missing, o is off by nearly the same vector everywhere. The mean of o with the
    shares as weights is known exactly, so that the correction follows from the class token and the
    visible patches, whose shares are known. With every token known there is nothing to correct.
    """
    block = equations.block
    seen = torch.cat([equations.class_token, equations.tokens(known.visible, known.places)])
    hidden = equations.tokens(known.masked, equations.hole[: len(known.masked)])
    looked_at = block.keys_values(torch.cat([seen, hidden]))
    correction = torch.zeros_like(equations.mean_attention)
    if len(seen) + len(hidden) < 1 + len(equations.mask):
        shares = torch.cat([equations.shares[:1], equations.shares[1 + known.places]])
        correction = equations.mean_attention - shares @ block.attention(seen, looked_at) / shares.sum()
    return lambda tokens: tokens + block.attention(tokens, looked_at) + correction
