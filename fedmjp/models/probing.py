"""Find the entrance of an unknown vision transformer: candidates by their shapes, then one equation that decides.

The gradient G of a linear patch embedding is D^T X, with X the patches and D the gradient at the tokens, which the
position embedding's gradient shows row by row. Closed forms solve this equation. Whether it holds is measured, on a
copy of the module and a random picture: so names, libraries and layouts need not be known.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedmjp.errors import BadInputError
from fedmjp.patches import grids_of, to_patches

FEWEST_TOKENS = 4
MOST_PREFIX_TOKENS = 8  # class token, distillation token, registers
# Relative error of the equation. Float32 leaves 2e-7 and TF32 rounds by 5e-4; wrong ones were off by 0.27 at least.
AGREES = 1e-2
SPREAD = 0.02  # of what is added to the copy's weights, so that no head or embedding is zero

STATING = ("img_size", "image_size")  # attributes by which modules say the size of their pictures

_NEEDED = (
    "closed forms need pictures cut into square patches, row by row, that one linear layer embeds, and a learned "
    "position embedding that is added right behind it"
)
_LOOKED_FOR = (
    "a Conv2d on 3 channels whose kernel equals its stride, without padding, or a Linear over flattened patches"
)


@dataclass(frozen=True)
class PatchEmbedding:
    """A module that may embed patches: a Conv2d, or a Linear over flattened patches."""

    name: str
    patch_size: int
    dim: int
    flat: bool


@dataclass(frozen=True)
class PositionCandidate:
    """A parameter that may be the position embedding of so many tokens."""

    name: str
    tokens: int
    dim: int


class _Size(NamedTuple):
    """A size of pictures that may be the module's."""

    pixels: tuple[int, int]  # height and width
    prefix_tokens: int


@dataclass(frozen=True)
class EntranceLayout:
    """The entrance of a module, of which the equation of tokens holds."""

    embedding: PatchEmbedding
    positions: PositionCandidate
    pixels: tuple[int, int]  # height and width of its pictures
    pixels_known: bool  # whether the module says so, or takes no other arrangement of as many patches
    prefix_tokens: int
    # What the module does to pictures before it embeds them: a factor and a summand for each channel.
    factor: Tensor
    shift: Tensor
    # How channel (0), row (1) and column (2) follow each other in the patch embedding's weight.
    pixel_order: tuple[int, ...]
    # Name of the parameter that the position embedding's first row is added to, if there is one.
    class_token: str | None
    head: str | None  # name of the Linear that gives the module's output, if there is one


class _Pass(NamedTuple):
    """One pass of a random picture through the copy."""

    picture: Tensor
    entered: Mapping[str, Tensor]  # what each convolution was given, by its name
    gradients: Mapping[str, Tensor]
    head: str | None


def find_entrance(module: nn.Module, pixels: tuple[int, int] | None = None) -> EntranceLayout:
    """Find what embeds patches and positions, by running a copy on a random picture.

    Args:
        module: Takes normalised pictures (batch, 3, height, width).
        pixels: Height and width of its pictures; None takes what the module says, else squares where they fit.

    Raises:
        BadInputError: If nothing has their shape, or the equation of tokens never holds.
    """
    everything = list(_patch_embeddings(module))
    embeddings = [embedding for embedding in everything if not embedding.flat]
    if not embeddings and (oblong := _oblong(module)):
        raise BadInputError(f"found no patch embedding: {oblong}; {_NEEDED}")
    embeddings = embeddings or everything
    if not embeddings:
        raise BadInputError(f"found no patch embedding: looked for {_LOOKED_FOR}; {_NEEDED}")
    dims = {embedding.dim for embedding in embeddings}
    positions = list(_position_embeddings(module, dims))
    if not positions:
        dim = " or ".join(str(size) for size in sorted(dims))
        raise BadInputError(
            f"found no position embedding: looked for a parameter (1, n, {dim}) or (n, {dim}), n being a number of "
            f"patches and up to {MOST_PREFIX_TOKENS} tokens before them; where positions are relative, rotary or "
            "fixed, no upload shows the gradients at the tokens"
        )
    return _first_that_agrees(module, [(e, p) for e, p in product(embeddings, positions) if e.dim == p.dim], pixels)


def _first_that_agrees(
    module: nn.Module, pairs: list[tuple[PatchEmbedding, PositionCandidate]], pixels: tuple[int, int] | None
) -> EntranceLayout:
    probe, error, reason = _generic_copy(module), math.inf, ""
    stated = _stated_sizes(module) if pixels is None else [pixels]
    likely = [[(*pair, size) for pair in pairs for size in _sizes(*pair, stated, pixels)]]
    if pixels is not None and not likely[0]:
        embedding, positions = pairs[0]
        raise BadInputError(
            f"pictures of {pixels[0]} x {pixels[1]} are not what {positions.name} is of: {positions.tokens} patches of "
            f"{embedding.patch_size} pixels, and tokens before them; give height and width of the client's pictures"
        )
    if pixels is None:  # other sizes only where none of the likely ones can be run
        likely.append([(*pair, size) for pair in pairs for size in _oblong_sizes(*pair)])
    for candidates in likely:
        for sides in dict.fromkeys(size.pixels for _, _, size in candidates):
            try:
                passed = _run(probe, sides)
            except Exception as failure:  # noqa: BLE001  (somebody else's code, perhaps on a size that is not its own)
                first_line = (str(failure) or type(failure).__name__).splitlines()[0][:200]
                reason = reason or f"running the module on a picture of {sides[0]} x {sides[1]} failed: {first_line}"
                continue
            for embedding, positions, size in candidates:
                if size.pixels == sides:
                    order, off = _best_order(passed, embedding, positions, size.prefix_tokens)
                    if off < AGREES:
                        certain = sides in stated or not _takes_another(probe, sides, embedding.patch_size)
                        inside = _inside(probe, passed, embedding)
                        token = _class_token(passed, positions, size.prefix_tokens)
                        return EntranceLayout(
                            embedding, positions, sides, certain, size.prefix_tokens, *inside, order, token, passed.head
                        )
                    error = min(error, off)
        if math.isfinite(error):
            reason = f"on a random picture the gradients do not satisfy the equation (relative error {error:.2g})"
            break
    raise BadInputError(_nothing_agrees(*pairs[0], reason or "no gradient reaches both"))


def _stated_sizes(module: nn.Module) -> list[tuple[int, int]]:
    """List the sizes of pictures that parts of a module, or their configuration, say."""
    holders = [holder for part in module.modules() for holder in (part, getattr(part, "config", None))]
    values = [vars(holder).get(name) for holder in holders if hasattr(holder, "__dict__") for name in STATING]
    sides = [(value, value) if isinstance(value, int) else value for value in values]
    pairs = [(pair[0], pair[1]) for pair in sides if isinstance(pair, tuple | list) and len(pair) == 2]
    return list(dict.fromkeys(pairs))


def _sizes(
    embedding: PatchEmbedding,
    positions: PositionCandidate,
    stated: list[tuple[int, int]],
    pixels: tuple[int, int] | None,
) -> Iterator[_Size]:
    """Yield the sizes that are stated and fit, and without a demand for one of them the largest square."""
    side = embedding.patch_size
    for height, width in stated:
        prefix_tokens = positions.tokens - (height // side) * (width // side)
        if height % side == width % side == 0 and 0 <= prefix_tokens <= MOST_PREFIX_TOKENS:
            yield _Size((height, width), prefix_tokens)
    grid = math.isqrt(positions.tokens)
    if pixels is None and grid > 1 and positions.tokens - grid**2 <= MOST_PREFIX_TOKENS:
        yield _Size((grid * side, grid * side), positions.tokens - grid**2)


def _oblong_sizes(embedding: PatchEmbedding, positions: PositionCandidate) -> Iterator[_Size]:
    for prefix_tokens in range(min(MOST_PREFIX_TOKENS, positions.tokens) + 1):
        for rows, columns in grids_of(positions.tokens - prefix_tokens):
            yield _Size((rows * embedding.patch_size, columns * embedding.patch_size), prefix_tokens)


def _takes_another(probe: nn.Module, sides: tuple[int, int], patch_size: int) -> bool:
    """Tell whether the module also runs on another arrangement of as many patches."""
    grid = (sides[0] // patch_size, sides[1] // patch_size)
    for rows, columns in grids_of(grid[0] * grid[1]):
        if (rows, columns) != grid:
            try:
                with torch.no_grad():
                    probe(_picture((rows * patch_size, columns * patch_size), seed=1).to(_device(probe)))
            except Exception:  # noqa: BLE001, S112
                continue
            return True
    return False


def _inside(probe: nn.Module, passed: _Pass, embedding: PatchEmbedding) -> tuple[Tensor, Tensor]:
    """Measure what the module does to a picture's channels before it embeds them: factors and summands, (3, 1, 1)."""
    if torch.equal(passed.picture, passed.entered.get(embedding.name, passed.picture)):
        return torch.ones(3, 1, 1), torch.zeros(3, 1, 1)
    factor, shift = _affine(passed.picture, passed.entered[embedding.name])
    # Of one picture, its own mean and deviation are a factor and a summand too: not of another.
    second = 0.5 * passed.picture.flip(2) - 1
    entered: list[Tensor] = []
    hook = probe.get_submodule(embedding.name).register_forward_hook(
        lambda _part, inputs, _out: entered.append(inputs[0])
    )
    with torch.no_grad():
        probe(second)
    hook.remove()
    off = float((entered[0] - (second * factor + shift)).norm() / entered[0].norm())
    if off > AGREES:
        raise BadInputError(
            f"the module changes pictures before {embedding.name} embeds them, and not each channel by one factor and "
            f"summand (relative error {off:.2g}), as where each picture is normalised by itself: give the transformer "
            "alone, and a mean and std of what enters it"
        )
    return factor.cpu(), shift.cpu()


def before_embedding(entrance: EntranceLayout, mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Compose a client's normalisation with what its module does to pictures: mean and deviation, (3, 1, 1).

    Args:
        entrance: Of the module.
        mean: Subtracted by the client from pictures in [0, 1].
        std: What it divides them by then.
    """
    centre, scale = (torch.tensor(values, dtype=torch.float32).view(3, 1, 1) for values in (mean, std))
    return centre - entrance.shift * scale / entrance.factor, scale / entrance.factor


def _affine(picture: Tensor, entered: Tensor) -> tuple[Tensor, Tensor]:
    """Fit factors and summands of the channels, (3, 1, 1) each."""
    centred, target = (values - values.mean((2, 3), keepdim=True) for values in (picture, entered))
    factor = (centred * target).sum((2, 3)) / centred.square().sum((2, 3))
    shift = entered.mean((2, 3)) - factor * picture.mean((2, 3))
    return factor.view(3, 1, 1), shift.view(3, 1, 1)


def _nothing_agrees(embedding: PatchEmbedding, positions: PositionCandidate, reason: str) -> str:
    finding = f"{embedding.name} and {positions.name} look like patch and position embedding, but {reason}"
    if embedding.flat:
        finding = f"found no patch embedding: looked for {_LOOKED_FOR}; a Linear like {embedding.name} is none"
    return f"{finding}; {_NEEDED}: give the transformer itself, not a module around it that changes pictures"


def _patch_embeddings(module: nn.Module) -> Iterator[PatchEmbedding]:
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d) and part.in_channels == 3 and part.groups == 1:
            size = part.kernel_size[0]
            if size > 1 and _cuts(part) and part.kernel_size == (size, size):
                yield PatchEmbedding(name, size, part.out_channels, flat=False)
        elif isinstance(part, nn.Linear):
            size = math.isqrt(part.in_features // 3)
            if size > 1 and 3 * size**2 == part.in_features:
                yield PatchEmbedding(name, size, part.out_features, flat=True)


def _cuts(part: nn.Conv2d) -> bool:
    """Tell whether a convolution cuts pictures into patches."""
    plain = part.padding in ((0, 0), "valid") and part.dilation == (1, 1)
    return plain and part.kernel_size == part.stride


def _oblong(module: nn.Module) -> str | None:
    """Name a convolution that cuts patches which are no squares, if there is one."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d) and part.in_channels == 3 and _cuts(part) and len(set(part.kernel_size)) > 1:
            return f"{name} cuts patches of {' x '.join(map(str, part.kernel_size))} pixels"
    return None


def _position_embeddings(module: nn.Module, dims: set[int]) -> Iterator[PositionCandidate]:
    for name, parameter in module.named_parameters():
        owner, _, own_name = name.rpartition(".")
        table = own_name.endswith("weight") and not isinstance(module.get_submodule(owner), nn.Embedding)
        shape = parameter.shape[1:] if parameter.ndim == 3 and parameter.shape[0] == 1 else parameter.shape
        if table or len(shape) != 2 or shape[1] not in dims:
            continue
        if shape[0] >= FEWEST_TOKENS:
            yield PositionCandidate(name, shape[0], shape[1])


def _generic_copy(module: nn.Module) -> nn.Module:
    probe = copy.deepcopy(module).eval().float().requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.add_(SPREAD * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return probe


def _device(probe: nn.Module) -> torch.device:
    return next(probe.parameters()).device


def _picture(sides: tuple[int, int], *, seed: int) -> Tensor:
    """Draw a picture that is neither centred nor of unit variance: else a norm would hardly change its patches."""
    return 2 + 3 * torch.randn(1, 3, *sides, generator=torch.Generator().manual_seed(seed))


def _run(probe: nn.Module, sides: tuple[int, int]) -> _Pass:
    generator = torch.Generator().manual_seed(2)
    parameters = dict(probe.named_parameters())
    picture = _picture(sides, seed=1).to(_device(probe))
    linear_outputs: dict[str, Any] = {}
    entered: dict[str, Any] = {}
    hooks = [
        part.register_forward_hook(lambda _part, _inputs, output, name=name: linear_outputs.update({name: output}))
        for name, part in probe.named_modules()
        if isinstance(part, nn.Linear)
    ] + [
        part.register_forward_hook(lambda _part, inputs, _output, name=name: entered.update({name: inputs[0].detach()}))
        for name, part in probe.named_modules()
        if isinstance(part, nn.Conv2d)
    ]
    with torch.enable_grad():
        outputs = [tensor for tensor in tensors_of(probe(picture)) if tensor.requires_grad]
        if not outputs:
            raise BadInputError("its output does not depend on its weights")
        parts = [(tensor * torch.randn(tensor.shape, generator=generator).to(tensor)).sum() for tensor in outputs]
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(torch.stack(parts).sum(), list(parameters.values()), allow_unused=True)
    reached = {name: tensor for name, tensor in zip(parameters, gradients, strict=True) if tensor is not None}
    head = next((name for name, output in linear_outputs.items() if any(output is tensor for tensor in outputs)), None)
    pictures = {name: tensor for name, tensor in entered.items() if tensor.shape == picture.shape}
    return _Pass(picture, pictures, reached, head)


def tensors_of(output: object) -> Iterator[Tensor]:
    """Yield every tensor in what a module returned.

    Args:
        output: A tensor, a tuple, a dictionary or a library's own kind of these.
    """
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_of(part)


def _best_order(
    passed: _Pass, embedding: PatchEmbedding, positions: PositionCandidate, prefix_tokens: int
) -> tuple[tuple[int, ...], float]:
    """Find the order of pixels under which the equation holds best, and its relative error."""
    rows, right = passed.gradients.get(positions.name), passed.gradients.get(f"{embedding.name}.weight")
    if rows is None or right is None or not right.any():
        return (0, 1, 2), math.inf
    tokens = rows.reshape(-1, positions.dim)[prefix_tokens:]
    size = embedding.patch_size
    patches = to_patches(passed.entered.get(embedding.name, passed.picture), size)[0].reshape(-1, 3, size, size)
    errors = {
        order: float((right.flatten(1) - tokens.mT @ patches.permute(0, *(1 + a for a in order)).flatten(1)).norm())
        for order in (permutations(range(3)) if embedding.flat else [(0, 1, 2)])
    }
    best = min(errors, key=errors.__getitem__)
    return best, errors[best] / float(right.norm())


def _class_token(passed: _Pass, positions: PositionCandidate, prefix_tokens: int) -> str | None:
    first = passed.gradients[positions.name].reshape(-1, positions.dim)[0]
    tokens = {name: grad[0, 0] for name, grad in passed.gradients.items() if grad.shape == (1, 1, positions.dim)}
    return next((name for name, row in tokens.items() if prefix_tokens and torch.allclose(row, first)), None)
