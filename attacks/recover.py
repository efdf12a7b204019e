"""The closed form by itself: two gradients and a normalisation in, a picture out; the attacks are made of its parts."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedmjp.attacks.linear_systems import NEGLIGIBLE
from fedmjp.attacks.token_gradients import TokenGradients, count_refusal, shown_tokens, solve_patches
from fedmjp.errors import BadInputError
from fedmjp.models.entrance import channel_values, denormalised
from fedmjp.models.probing import MOST_PREFIX_TOKENS
from fedmjp.patches import from_patches

# Share of the patch embedding's gradient that one picture may leave unexplained. One picture left 2e-7 in float32
# and at most 2.1e-3 in bfloat16. Two pictures left 8e-3 to 0.24, and with one label for both at least 2.6e-3.
UNEXPLAINED = 3e-3


def recover(
    patch_gradient: Tensor, position_gradient: Tensor, *, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """Recover the one picture that a vision transformer's gradient was computed from.

    A patch embedding is linear, so its gradient is G = D^T X. X holds the patches, D the gradients at their tokens, and
    the position embedding's gradient shows D row by row. Least squares in float64 gives X, exact up to rounding with
    at most as many patches as dimensions. A factor on both gradients changes nothing, nor do several steps of plain
    SGD on the picture: weight changes serve as well.

    The attack ``patch_embedding`` does the same; ``fedmjp.adopt`` finds the two gradients in any module.

    Args:
        patch_gradient: The gradient of the patch embedding's weight, (dim, 3, patch, patch), as a Conv2d has it.
        position_gradient: That of the position embedding, (1, tokens, dim) or (tokens, dim). Its last rows are of the
            patches, row by row, as many as the largest square number; before them are up to eight others, such as that
            of a class token.
        mean: Subtracted by the client from the three channels of its picture, whose values lie in [0, 1].
        std: The client's divisor of these channels.

    Returns:
        The picture, (3, size, size), float32 in [0, 1].

    Raises:
        BadInputError: If shapes or numbers cannot be such gradients; if they leave the picture open, as with more
            patches than dimensions; or if they are not of one picture, but of a batch, or with noise on them. Nearly
            alike pictures of one label can pass for one.

    Example:
        >>> import torch
        >>> draw = torch.Generator().manual_seed(0)
        >>> embedding = torch.randn(16, 3, 4, 4, generator=draw).requires_grad_()
        >>> positions = torch.zeros(1, 4, 16, requires_grad=True)
        >>> picture = torch.rand(3, 8, 8, generator=draw)
        >>> patches = torch.nn.functional.conv2d((picture[None] - 0.5) / 0.2, embedding, stride=4)
        >>> tokens = patches.flatten(2).mT + positions
        >>> tokens.sin().prod(dim=1).sum().backward()  # stands for the rest of the network
        >>> recovered = recover(embedding.grad, positions.grad, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
        >>> torch.allclose(recovered, picture, atol=1e-3)
        True
    """
    centre, scale = channel_values(mean, std)
    right, rows, prefix_tokens = _checked(patch_gradient, position_gradient)
    tokens = shown_tokens(rows, prefix_tokens)
    refusal = count_refusal(len(tokens.mask), len(right)) or inexact_refusal(tokens, right)
    if refusal:
        raise BadInputError(refusal)
    (patches,) = solve_patches([tokens], [right])
    patch_size = patch_gradient.shape[-1]
    entered = from_patches(patches[None], patch_size * math.isqrt(len(patches)), patch_size)
    return denormalised(entered, *(torch.tensor(values).view(3, 1, 1) for values in (centre, scale)))[0].float()


def inexact_refusal(tokens: TokenGradients, right: Tensor) -> str | None:
    """Say why the closed form cannot be exact for two gradients; None if it is, as far as they show.

    Of one picture, the patch embedding's gradient lies in the span of the tokens' gradients, which has as many
    dimensions as there are tokens. With as many tokens as dimensions any does.

    Args:
        tokens: The gradients at the tokens.
        right: The patch embedding's gradient, (dim, values).
    """
    if not right.any():
        return "the patch embedding's gradient is zero everywhere: nothing to solve for"
    directions, singular, _ = torch.linalg.svd(tokens.unknowns.mT, full_matrices=False)
    rank = int((singular > NEGLIGIBLE * singular[0]).sum())
    span = directions[:, :rank]
    outside = float((right - span @ (span.mT @ right)).norm() / right.norm())
    if outside > UNEXPLAINED:
        return (
            f"the two gradients are not of one picture: {outside:.1%} of the patch embedding's lies outside of what "
            "the tokens' gradients span, as of the mean over a batch, of masked tokens, or with noise"
        )
    if rank < (count := len(tokens.unknowns)):
        return f"the gradients at {count} tokens span {rank} dimensions, which leave the picture open"
    return None


def _checked(patch_gradient: Tensor, position_gradient: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the gradients as (dim, values) and (tokens, dim) float64, and the number of tokens before the patches."""
    shape, table = tuple(patch_gradient.shape), tuple(position_gradient.shape)
    if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
        raise BadInputError(f"the patch embedding's gradient has shape {shape}, not (dim, 3, patch, patch)")
    if len(table) not in (2, 3) or table[:-2] not in ((), (1,)) or table[-1] != shape[0]:
        shapes = f"(1, tokens, {shape[0]}) or (tokens, {shape[0]})"
        raise BadInputError(f"the position embedding's gradient has shape {table}, not {shapes}")
    prefix_tokens = table[-2] - math.isqrt(table[-2]) ** 2
    if prefix_tokens > MOST_PREFIX_TOKENS:
        raise BadInputError(
            f"{table[-2]} tokens are no square number of patches after up to {MOST_PREFIX_TOKENS} other tokens"
        )
    for role, gradient in {"patch": patch_gradient, "position": position_gradient}.items():
        if not torch.isfinite(gradient).all():
            raise BadInputError(f"the {role} embedding's gradient holds NaN or infinite values")
    rows = position_gradient.detach().double().reshape(-1, shape[0])
    return patch_gradient.detach().double().flatten(1), rows, prefix_tokens
