"""Tokens that enter the block where some of those behind it were not met.

What ``tokens`` reads off sums over all tokens is then read of each by itself. The gradient of the attention's last
weight is a sum over tokens of g_t (heads' output)_t^T, so that

    g_t = s_t + c_t / sigma_t

lies in its column space, which leaves one unknown and many equations for the deviation sigma_t. The attention's output
follows from the tokens themselves, as they follow from it: z_t = sigma_t k_t - o(z), in a few passes. What attention
sees of tokens that were not met is that of the most natural patches in the places that are left.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmjp.attacks.first_mlp.equations import Equations
from fedmjp.attacks.first_mlp.tokens import PROJ_WEIGHT, centred, class_token
from fedmjp.models.classifier import VitClassifier

PASSES = 6  # in which tokens and attention follow from each other


@dataclass(frozen=True)
class Some:
    """Patches' tokens behind the first attention, less their means: not all of the picture's."""

    equations: Equations
    behind: Tensor  # (tokens, dim)
    kept: Tensor  # (whitened tokens,) bool, which of those that were given these are
    known: Tensor  # (1, dim), the class token as it enters

    @staticmethod
    def of(equations: Equations, gradients: Mapping[str, Tensor], whitened: Tensor, model: VitClassifier) -> "Some":
        """From whitened tokens (tokens, dim) that prove themselves, of which the class token is left out."""
        at_outputs, at_inner = equations.slopes(whitened)
        inner = at_inner @ equations.block.fc1.weight * equations.block.norm2.gain
        through = centred(inner) - whitened * (inner * whitened).mean(1, keepdim=True)
        outside = torch.linalg.svd(gradients[PROJ_WEIGHT])[0][:, equations.count :]
        still, moving = at_outputs @ outside, through @ outside
        inverse = -(still * moving).sum(1, keepdim=True) / moving.square().sum(1, keepdim=True)
        every = torch.ones_like(whitened[:, 0], dtype=torch.bool)
        some = Some(equations, whitened / inverse, every, centred(class_token(model))[None])
        away = (some.entering(None) - some.known).norm(dim=1)
        other = (away > away.min()) | (away > some.known.norm())  # the class token may be among those that were not met
        return replace(some, behind=some.behind[other], kept=other)

    def entering(self, patches: Tensor | None) -> Tensor:
        """(tokens, dim) that enter, less their means, where attention sees the class token and those of ``patches``.

        ``patches`` (patches, dim) are all tokens of the picture; None takes the tokens themselves for all.
        """
        block, tokens = self.equations.block, self.behind
        for _ in range(PASSES):
            seen = torch.cat([self.known, tokens if patches is None else patches])
            tokens = self.behind - centred(block.attention(tokens, block.keys_values(seen)))
        return tokens

    def guesses(self, patches: Tensor, places: Tensor) -> Tensor:
        """Whitened tokens (places, dim) behind the attention, of all tokens ``patches`` (patches, dim) that enter."""
        block, tokens = self.equations.block, patches[places]
        looked_at = block.keys_values(torch.cat([self.known, patches]))
        return block.norm2.whiten(tokens + block.attention(tokens, looked_at))[0]
