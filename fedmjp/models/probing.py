"""Find the entrance of an unknown vision transformer: candidates by their shapes, then one equation that decides.

The gradient G of a linear patch embedding is D^T X, with X the patches and D the gradient at the tokens, which the
position embedding's gradient shows row by row. Closed forms solve this equation. Whether it holds is measured, on a
copy of the module and a random picture: so names, libraries and layouts need not be known.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedmjp.errors import BadInputError
from fedmjp.patches import to_patches

MOST_PREFIX_TOKENS = 8  # class token, distillation token, registers
# Relative error of the equation. Float32 leaves 2e-7 and TF32 rounds by 5e-4; wrong ones were off by 0.27 at least.
AGREES = 1e-2
SPREAD = 0.02  # of what is added to the copy's weights, so that no head or embedding is zero

_NEEDED = (
    "closed forms need square pictures cut into patches, row by row, that one linear layer embeds, and a learned "
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
    """A parameter that may be a position embedding of ``grid`` x ``grid`` patches after some prefix tokens."""

    name: str
    grid: int
    prefix_tokens: int
    dim: int


@dataclass(frozen=True)
class EntranceLayout:
    """The entrance of a module, of which the equation of tokens holds."""

    embedding: PatchEmbedding
    positions: PositionCandidate
    # How channel (0), row (1) and column (2) follow each other in the patch embedding's weight.
    pixel_order: tuple[int, ...]
    # Name of the parameter that the position embedding's first row is added to, if there is one.
    class_token: str | None
    head: str | None  # name of the Linear that gives the module's output, if there is one


class _Pass(NamedTuple):
    """One pass of a random picture through the copy."""

    picture: Tensor
    gradients: Mapping[str, Tensor]
    head: str | None


def find_entrance(module: nn.Module) -> EntranceLayout:
    """Find what embeds patches and positions, by running a copy on a random picture.

    Args:
        module: Takes normalised pictures (batch, 3, size, size).

    Raises:
        BadInputError: If nothing has their shape, or the equation of tokens never holds.
    """
    everything = list(_patch_embeddings(module))
    embeddings = [embedding for embedding in everything if not embedding.flat] or everything
    if not embeddings:
        raise BadInputError(f"found no patch embedding: looked for {_LOOKED_FOR}; {_NEEDED}")
    dims = {embedding.dim for embedding in embeddings}
    positions = list(_position_embeddings(module, dims))
    if not positions:
        dim = " or ".join(str(size) for size in sorted(dims))
        raise BadInputError(
            f"found no position embedding: looked for a parameter (1, n, {dim}) or (n, {dim}), n being a square number "
            f"of patches and up to {MOST_PREFIX_TOKENS} tokens before them; where positions are relative, rotary or "
            "fixed, no upload shows the gradients at the tokens"
        )
    return _first_that_agrees(module, [(e, p) for e, p in product(embeddings, positions) if e.dim == p.dim])


def _first_that_agrees(module: nn.Module, pairs: list[tuple[PatchEmbedding, PositionCandidate]]) -> EntranceLayout:
    probe, error, reason = _generic_copy(module), math.inf, ""
    for size in sorted({e.patch_size * p.grid for e, p in pairs}):
        try:
            passed = _run(probe, size)
        except Exception as failure:  # noqa: BLE001  (somebody else's code, perhaps on a size that is not its own)
            first_line = (str(failure) or type(failure).__name__).splitlines()[0][:200]
            reason = reason or f"running the module on a picture of {size} x {size} failed: {first_line}"
            continue
        for embedding, positions in pairs:
            if embedding.patch_size * positions.grid == size:
                order, off = _best_order(passed, embedding, positions)
                if off < AGREES:
                    token = _class_token(passed, positions)
                    return EntranceLayout(embedding, positions, order, token, passed.head)
                error = min(error, off)
    if math.isfinite(error):
        reason = f"on a random picture the gradients do not satisfy the equation (relative error {error:.2g})"
    raise BadInputError(_nothing_agrees(*pairs[0], reason or "no gradient reaches both"))


def _nothing_agrees(embedding: PatchEmbedding, positions: PositionCandidate, reason: str) -> str:
    finding = f"{embedding.name} and {positions.name} look like patch and position embedding, but {reason}"
    if embedding.flat:
        finding = f"found no patch embedding: looked for {_LOOKED_FOR}; a Linear like {embedding.name} is none"
    return f"{finding}; {_NEEDED}: give the transformer itself, not a module around it that changes pictures"


def _patch_embeddings(module: nn.Module) -> Iterator[PatchEmbedding]:
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d) and part.in_channels == 3 and part.groups == 1:
            size = part.kernel_size[0]
            plain = part.padding in ((0, 0), "valid") and part.dilation == (1, 1) and size > 1
            if plain and part.kernel_size == (size, size) == part.stride:
                yield PatchEmbedding(name, size, part.out_channels, flat=False)
        elif isinstance(part, nn.Linear):
            size = math.isqrt(part.in_features // 3)
            if size > 1 and 3 * size**2 == part.in_features:
                yield PatchEmbedding(name, size, part.out_features, flat=True)


def _position_embeddings(module: nn.Module, dims: set[int]) -> Iterator[PositionCandidate]:
    for name, parameter in module.named_parameters():
        owner, _, own_name = name.rpartition(".")
        table = own_name.endswith("weight") and not isinstance(module.get_submodule(owner), nn.Embedding)
        shape = parameter.shape[1:] if parameter.ndim == 3 and parameter.shape[0] == 1 else parameter.shape
        if table or len(shape) != 2 or shape[1] not in dims:
            continue
        grid = math.isqrt(shape[0])
        if grid > 1 and shape[0] - grid**2 <= MOST_PREFIX_TOKENS:
            yield PositionCandidate(name, grid, shape[0] - grid**2, shape[1])


def _generic_copy(module: nn.Module) -> nn.Module:
    probe = copy.deepcopy(module).eval().float().requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.add_(SPREAD * torch.randn(parameter.shape, generator=generator).to(parameter.device))
    return probe


def _run(probe: nn.Module, size: int) -> _Pass:
    generator = torch.Generator().manual_seed(1)
    parameters = dict(probe.named_parameters())
    device = next(iter(parameters.values())).device
    # Neither centred nor of unit variance: else a norm before the embedding would hardly change its patches.
    picture = (2 + 3 * torch.randn(1, 3, size, size, generator=generator)).to(device)
    linear_outputs: dict[str, Any] = {}
    hooks = [
        part.register_forward_hook(lambda _part, _inputs, output, name=name: linear_outputs.update({name: output}))
        for name, part in probe.named_modules()
        if isinstance(part, nn.Linear)
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
    return _Pass(picture, reached, head)


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
    passed: _Pass, embedding: PatchEmbedding, positions: PositionCandidate
) -> tuple[tuple[int, ...], float]:
    """Find the order of pixels under which the equation holds best, and its relative error."""
    rows, right = passed.gradients.get(positions.name), passed.gradients.get(f"{embedding.name}.weight")
    if rows is None or right is None or not right.any():
        return (0, 1, 2), math.inf
    tokens = rows.reshape(-1, positions.dim)[positions.prefix_tokens :]
    size = embedding.patch_size
    patches = to_patches(passed.picture, size)[0].reshape(-1, 3, size, size)
    errors = {
        order: float((right.flatten(1) - tokens.mT @ patches.permute(0, *(1 + a for a in order)).flatten(1)).norm())
        for order in (permutations(range(3)) if embedding.flat else [(0, 1, 2)])
    }
    best = min(errors, key=errors.__getitem__)
    return best, errors[best] / float(right.norm())


def _class_token(passed: _Pass, positions: PositionCandidate) -> str | None:
    first = passed.gradients[positions.name].reshape(-1, positions.dim)[0]
    tokens = {name: grad[0, 0] for name, grad in passed.gradients.items() if grad.shape == (1, 1, positions.dim)}
    return next((name for name, row in tokens.items() if positions.prefix_tokens and torch.allclose(row, first)), None)
