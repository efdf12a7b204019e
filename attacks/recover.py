"""The closed form by itself: two gradients and a normalisation in, a picture out; the attacks are made of its parts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedmjp.attacks.linear_systems import NEGLIGIBLE
from fedmjp.attacks.token_gradients import TokenGradients, count_refusal, shown_tokens, solve_patches
from fedmjp.errors import AttackNotApplicableError, BadInputError
from fedmjp.models import names
from fedmjp.models.entrance import channel_values, count_patches, denormalised, require_pixels
from fedmjp.models.probing import MOST_PREFIX_TOKENS
from fedmjp.patches import from_patches, grids_of, seams_of

if TYPE_CHECKING:
    from fedmjp.attacks.base import Attack
    from fedmjp.models.adopt import Adopted
    from fedmjp.records import Upload
    from fedmjp.threat import ThreatModel

# Share of the patch embedding's gradient that one picture may leave unexplained. One picture left 2e-7 in float32
# and at most 2.1e-3 in bfloat16. Two pictures left 8e-3 to 0.24, and with one label for both at least 2.6e-3.
UNEXPLAINED = 3e-3
PRECISE = 1e-5  # the same share up to which rounding spoils no value much
# Another arrangement of patches than a square is taken where its seams are less uneven than this share of the square's.
# Over twelve photographs in patches of 4 to 16 pixels the true one had 0.51 of them at most, a wrong one 1.35 at least.
FITS_BETTER = 0.8
# What a client's normalisation may leave outside of [0, 1] at either end: of augmented pictures, or of rounding.
BEYOND = 0.25
QUANTILES = (0.005, 0.995)
# Highest values of pictures that enter as they are stored, and of those that a module divides once more.
SCALES = (1 / 255, 255, 65_535)


def recover(
    patch_gradient: Tensor,
    position_gradient: Tensor,
    *,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    pixels: tuple[int, int] | None = None,
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
            patches, row by row; before them are up to eight others, such as that of a class token.
        mean: Subtracted by the client from the three channels of its picture, whose values lie in [0, 1]. Pictures
            whose values turn out to lie in 0..255 are read so. None where nobody knows: its own range is stretched.
        std: The client's divisor of these channels, or None.
        pixels: Height and width of the picture. None takes as many patches as the largest square number, and lays them
            in a square unless their edges fit much better in other rows.

    Returns:
        The picture, (3, height, width), float32 in [0, 1]. Patches without any gradient are grey.

    Raises:
        BadInputError: If shapes or numbers cannot be such gradients; if they leave the picture open, as with more
            patches than dimensions; if they are not of one picture, but of a batch, or with noise on them; or if mean
            and std take its values far from [0, 1]. Nearly alike pictures of one label can pass for one.

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
    stated = None if mean is None or std is None else channel_values(mean, std)
    right, rows, prefix_tokens = _checked(patch_gradient, position_gradient, pixels)
    tokens = shown_tokens(rows, prefix_tokens)
    refusal = count_refusal(len(tokens.mask), len(right)) or inexact_refusal(tokens, right)
    if refusal:
        raise BadInputError(refusal)
    (patches,) = solve_patches([tokens], [right])
    patch_size = patch_gradient.shape[-1]
    if pixels is None:
        side = patch_size * math.isqrt(len(patches))
        pixels = likely_pixels(patches, tokens.mask, patch_size, (side, side))
    entered = from_patches(patches[None], pixels, patch_size)
    visible, rough = patches[~tokens.mask], _unexplained(tokens, right)[0] > PRECISE
    normalisation = (
        _stretched(visible, *channel_values((0,) * 3, (1,) * 3))
        if stated is None
        else likely_range(visible, *stated, rough=rough)
    )
    return denormalised(entered, *(torch.tensor(values).view(3, 1, 1) for values in normalisation))[0].float()


def fit_entrance(
    attack: "Attack[Any, Any]", upload: "Upload", model: "Adopted", threat: "ThreatModel"
) -> tuple["Adopted", list[str]]:
    """Hold what is known of a user's model against an upload, as the closed form reads it.

    Args:
        attack: That is to read the upload.
        upload: Of the model.
        model: As it was adopted.
        threat: What the server knows.

    Returns:
        The model with the height and width, and the range of values, that the picture shows; and what to say of it.

    Raises:
        AttackNotApplicableError: If the closed form cannot be exact for one picture, and the attack has nothing else
            to go by; or if mean and std cannot be the client's.
    """
    reads = attack.role == "attack" and attack.reveals == "pictures" and not attack.needs_network
    stated = (upload.kind, upload.num_examples) == (threat.update, threat.pictures)
    if not (reads and stated and threat.local_optimiser == "sgd"):
        return model, []  # nothing is solved for here, or the attack itself says what does not fit
    tokens = shown_tokens(upload.tensors[names.POSITION_EMBEDDING][0].double(), model.prefix_tokens)
    right = upload.tensors[names.PATCH_WEIGHT].double().flatten(1)
    refusal = inexact_refusal(tokens, right) if threat.pictures == 1 else None
    if refusal and "noisy" not in attack.handles(model, threat):
        raise AttackNotApplicableError(
            f"{attack.name}: {refusal}; give the number of pictures of a batch (--batch-size, or examples in Python: a "
            "mixture comes back), or take patch_embedding_wiener, which has a prior of natural pictures"
        )
    if refusal or count_patches(model) > len(right):
        return model, [refusal] if refusal else []
    notes = []
    outside = _unexplained(tokens, right)[0] if threat.pictures == 1 else math.inf
    if PRECISE < outside < math.inf:
        notes.append(
            f"one picture leaves {outside:.2%} of the patch embedding's gradient unexplained, as half precision, TF32 "
            "or a small difference of weights do, but a picture of another size than the module's too"
        )
    if hidden := int(tokens.mask.sum()):
        notes.append(
            f"{hidden} of {len(tokens.mask)} patches have no gradient, as of dropped tokens: nothing shows them"
        )
    (patches,) = solve_patches([tokens], [right])
    if not model.pixels_known:
        pixels = likely_pixels(patches, tokens.mask, model.patch_size, model.pixels)
        if pixels != model.pixels:
            notes.append(
                f"the module takes other sizes too: the patches fit together as {pixels[0]} x {pixels[1]} pixels"
            )
        model = replace(model, pixels=pixels)
    mean, std = (values.flatten().tolist() for values in (model.mean, model.std))
    try:
        fitting = likely_range(patches[~tokens.mask], mean, std, rough=outside > PRECISE)
    except BadInputError as error:
        raise AttackNotApplicableError(f"{attack.name}: {error}") from None
    if fitting != (mean, std):
        notes.append(f"mean and std take values up to {std[0] / fitting[1][0]:.3g} instead of 1: read on that scale")
        centre, scale = (torch.tensor(values).view(3, 1, 1).to(model.mean) for values in fitting)
        model = replace(model, mean=centre, std=scale)
    return model, notes


def likely_pixels(patches: Tensor, hidden: Tensor, patch_size: int, usual: tuple[int, int]) -> tuple[int, int]:
    """Tell height and width of a picture by how the edges of its patches fit together.

    Args:
        patches: (patches, 3 * patch_size ** 2), row by row.
        hidden: (patches,) bool, those that are not known.
        patch_size: Pixels per side of a patch.
        usual: Height and width that are taken unless others fit much better.
    """
    tiles = patches.masked_fill(hidden[:, None], math.nan).reshape(len(patches), -1, patch_size, patch_size)
    grids = grids_of(len(patches))
    seams = {(rows * patch_size, columns * patch_size): seams_of(tiles, columns) for rows, columns in grids}
    best = min(seams, key=seams.__getitem__, default=usual)
    return best if best != usual and seams[best] < FITS_BETTER * seams.get(usual, 0.0) else usual


def likely_range(
    patches: Tensor, mean: Sequence[float], std: Sequence[float], *, rough: bool
) -> tuple[list[float], list[float]]:
    """Return the mean and std that take a picture's patches to [0, 1]: those stated, or of values as they are stored.

    Args:
        patches: (patches, 3 * patch_size ** 2), as they entered the network.
        mean: As stated, of the three channels.
        std: The same.
        rough: Whether several pictures or rounding leave only the middle of the values to go by.

    Raises:
        BadInputError: If neither do; it says which ones would.
    """
    low, high = _ends(patches, mean, std, (0.5, 0.5) if rough else QUANTILES)
    for highest in SCALES[1:] if rough else SCALES:
        if low >= -highest / 1000 and highest / 16 < high <= highest * (1 + 1 / 1000):
            return [value / highest for value in mean], [value / highest for value in std]
    if rough or (low >= -BEYOND and high <= 1 + BEYOND):
        return list(mean), list(std)
    stretched = _stretched(patches, mean, std)
    raise BadInputError(
        f"with mean {_three(mean)} and std {_three(std)} the picture's values run from {low:.3g} to {high:.3g} instead "
        f"of 0 to 1: its client normalised it otherwise, as by its own mean and deviation; take mean "
        f"{_three(stretched[0])} and std {_three(stretched[1])}, which stretch it to that range"
    )


def _stretched(patches: Tensor, mean: Sequence[float], std: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return a mean and std as those given, but that stretch the values of a picture's patches to [0, 1]."""
    low, high = _ends(patches, mean, std, QUANTILES)
    extent = max(high - low, NEGLIGIBLE)
    return [(value - low) / extent for value in mean], [value / extent for value in std]


def _ends(
    patches: Tensor, mean: Sequence[float], std: Sequence[float], shares: tuple[float, float]
) -> tuple[float, float]:
    """Return two quantiles of a picture's values, brought back by mean and std."""
    centre, scale = (patches.new_tensor(values)[:, None] for values in (mean, std))
    values = (patches.reshape(len(patches), 3, -1) * scale + centre).flatten().sort().values
    low, high = (float(values[round(share * (len(values) - 1))]) for share in shares)
    return low, high


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
    outside, rank = _unexplained(tokens, right)
    if outside > UNEXPLAINED:
        return (
            f"the two gradients are not of one picture: {outside:.1%} of the patch embedding's lies outside of what "
            "the tokens' gradients span, as of a batch or accumulated pictures, of masked tokens, of a step of Adam or "
            "with weight decay, of another size, or with noise"
        )
    if rank < (count := len(tokens.unknowns)):
        return f"the gradients at {count} tokens span {rank} dimensions, which leave the picture open"
    return None


def _unexplained(tokens: TokenGradients, right: Tensor) -> tuple[float, int]:
    """Return the share of the patch embedding's gradient outside of what the tokens' gradients span, and their rank."""
    directions, singular, _ = torch.linalg.svd(tokens.unknowns.mT, full_matrices=False)
    rank = int((singular > NEGLIGIBLE * singular[0]).sum())
    span = directions[:, :rank]
    return float((right - span @ (span.mT @ right)).norm() / right.norm()), rank


def _three(values: Sequence[float]) -> str:
    return ",".join(f"{value:.4g}" for value in values)


def _checked(
    patch_gradient: Tensor, position_gradient: Tensor, pixels: tuple[int, int] | None
) -> tuple[Tensor, Tensor, int]:
    """Return the gradients as (dim, values) and (tokens, dim) float64, and the number of tokens before the patches."""
    shape, table = tuple(patch_gradient.shape), tuple(position_gradient.shape)
    if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
        raise BadInputError(f"the patch embedding's gradient has shape {shape}, not (dim, 3, patch, patch)")
    if len(table) not in (2, 3) or table[:-2] not in ((), (1,)) or table[-1] != shape[0]:
        shapes = f"(1, tokens, {shape[0]}) or (tokens, {shape[0]})"
        raise BadInputError(f"the position embedding's gradient has shape {table}, not {shapes}")
    side = shape[-1]
    if pixels is not None:
        require_pixels(pixels)
    if pixels is not None and (min(pixels) < side or pixels[0] % side or pixels[1] % side):
        raise BadInputError(f"pixels {pixels} are no multiples of the patch size {side}: give height and width")
    patches = math.isqrt(table[-2]) ** 2 if pixels is None else (pixels[0] // side) * (pixels[1] // side)
    prefix_tokens = table[-2] - patches
    if not 0 <= prefix_tokens <= MOST_PREFIX_TOKENS:
        number = "no square number of" if pixels is None else f"not {patches}"
        remedy = "; of a picture that is no square give pixels, its height and width" if pixels is None else ""
        raise BadInputError(
            f"{table[-2]} tokens are {number} patches after up to {MOST_PREFIX_TOKENS} other tokens{remedy}"
        )
    for role, gradient in {"patch": patch_gradient, "position": position_gradient}.items():
        if not torch.isfinite(gradient).all():
            raise BadInputError(f"the {role} embedding's gradient holds NaN or infinite values")
    rows = position_gradient.detach().double().reshape(-1, shape[0])
    return patch_gradient.detach().double().flatten(1), rows, prefix_tokens
