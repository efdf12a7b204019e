"""From whitened tokens behind the first attention to the tokens that enter it, by linear algebra alone.

With all a_t = GELU(fc1 h_t) the slopes s_t at the MLP's output follow from G2, and with them those at its input. Behind
norm2, at u_t = sigma_t k_t, they are known up to the deviation sigma_t of each token,

    g_t = s_t + c_t / sigma_t,    c_t from f_t through the LayerNorm,

and sum_t g_t, the gradient of the attention's last bias, has more entries than there are tokens: it tells every
sigma_t. The weight's gradient sum_t g_t (heads' output)_t^T then tells the attention's output o_t, and z_t = u_t - o_t.
No LayerNorm sees the mean of a token over its dimensions, and so the network does not either: it stays open.

Where some tokens were not met (``PartialTokens``), sums over all tokens do not help, and each token is read by itself.
The gradient of the attention's last weight is a sum over tokens of g_t (heads' output)_t^T, so that
g_t = s_t + c_t / sigma_t lies in its column space: one unknown and many equations for the deviation sigma_t. The
attention's output and the tokens follow from each other in a few passes: z_t = sigma_t k_t - o(z). Attention also sees
the tokens that were not met; they are taken from the most natural patches in the remaining places.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmjp.attacks.first_block.block import (
    FC2_WEIGHT,
    PROJ_BIAS,
    PROJ_WEIGHT,
    first_block,
    gelu,
    gelu_slope,
    linear_of,
)
from fedmjp.attacks.first_block.equations import TokenEquations
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier

PASSES = 6  # in which tokens and attention follow from each other


def centred(rows: Tensor) -> Tensor:
    """Subtract the mean over the dimensions, which no LayerNorm sees of a token.

    Args:
        rows: (rows, dim).
    """
    return rows - rows.mean(-1, keepdim=True)


@dataclass(frozen=True)
class EnteringTokens:
    """What the first block takes in, and what its attention makes of it."""

    tokens: Tensor  # (tokens, dim), less their means
    attended: Tensor  # (tokens, dim), the heads' outputs, before they are projected


def entering(model: VitClassifier, gradients: Mapping[str, Tensor], whitened: Tensor) -> EnteringTokens:
    """Solve for the tokens that enter the block, from all tokens that the gradients are sums over.

    Args:
        model: With the weights of the upload.
        gradients: The uploaded ones of the first block, float64.
        whitened: (tokens, dim) behind the attention.
    """
    block, fc2 = first_block(model), linear_of(model, "0.mlp.fc2")
    before_gelu = block.fc1(whitened * block.norm2.gain + block.norm2.bias)
    at_outputs = torch.linalg.lstsq(gelu(before_gelu).mT, gradients[FC2_WEIGHT].mT).solution
    inner = (at_outputs @ fc2.weight * gelu_slope(before_gelu)) @ block.fc1.weight * block.norm2.gain
    through = centred(inner) - whitened * (inner * whitened).mean(1, keepdim=True)
    open_sum = gradients[PROJ_BIAS] - at_outputs.sum(0)
    inverse = torch.linalg.lstsq(through.mT, open_sum[:, None]).solution
    slopes = at_outputs + inverse * through
    heads = torch.linalg.lstsq(slopes.mT, gradients[PROJ_WEIGHT]).solution
    return EnteringTokens(centred(whitened / inverse - block.proj(heads)), heads)


def class_token(model: VitClassifier) -> Tensor:
    """Return the class token with its position, (dim,): the token that everybody knows."""
    token, positions = (model.get_parameter(name).detach() for name in (names.CLASS_TOKEN, names.POSITION_EMBEDDING))
    return (token[0, 0] + positions[0, 0]).double()


@dataclass(frozen=True)
class PartialTokens:
    """Patches' tokens behind the first attention, less their means: not all of the picture's."""

    equations: TokenEquations
    behind: Tensor  # (tokens, dim)
    rows: Tensor  # (whitened tokens,) bool, which of the whitened tokens these are
    class_token: Tensor  # (1, dim), as it enters

    @staticmethod
    def of(
        equations: TokenEquations, gradients: Mapping[str, Tensor], whitened: Tensor, model: VitClassifier
    ) -> "PartialTokens":
        """Build from whitened tokens that prove themselves; the class token is left out.

        Args:
            equations: The equations that the tokens solve.
            gradients: The uploaded ones of the first block, float64.
            whitened: (tokens, dim) behind the attention.
            model: With the weights of the upload.
        """
        at_outputs, at_inner = equations.slopes(whitened)
        inner = at_inner @ equations.block.fc1.weight * equations.block.norm2.gain
        through = centred(inner) - whitened * (inner * whitened).mean(1, keepdim=True)
        outside = torch.linalg.svd(gradients[PROJ_WEIGHT])[0][:, equations.count :]
        still, moving = at_outputs @ outside, through @ outside
        inverse = -(still * moving).sum(1, keepdim=True) / moving.square().sum(1, keepdim=True)
        every = torch.ones_like(whitened[:, 0], dtype=torch.bool)
        some = PartialTokens(equations, whitened / inverse, every, centred(class_token(model))[None])
        away = (some.entering(None) - some.class_token).norm(dim=1)
        # The class token may be among those that were not found.
        is_patch = (away > away.min()) | (away > some.class_token.norm())
        return replace(some, behind=some.behind[is_patch], rows=is_patch)

    def entering(self, patches: Tensor | None) -> Tensor:
        """Solve for the tokens (tokens, dim) that enter the block, less their means.

        Args:
            patches: (patches, dim) all tokens of the picture, which attention sees beside the class token; if None, it
                sees these tokens themselves.
        """
        block, tokens = self.equations.block, self.behind
        for _ in range(PASSES):
            context = torch.cat([self.class_token, tokens if patches is None else patches])
            tokens = self.behind - centred(block.attention(tokens, block.keys_values(context)))
        return tokens

    def guesses(self, patches: Tensor, places: Tensor) -> Tensor:
        """Compute whitened tokens (places, dim) behind the attention, as guesses of tokens that were not found.

        Args:
            patches: (patches, dim) all tokens that enter.
            places: (places,) those wanted.
        """
        block, tokens = self.equations.block, patches[places]
        looked_at = block.keys_values(torch.cat([self.class_token, patches]))
        return block.norm2.whiten(tokens + block.attention(tokens, looked_at))[0]
