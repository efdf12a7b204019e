"""What a client does to its update before it leaves: prune it, add noise, round it, in this order.

Each tensor is treated alone, whatever else is in the update: a part of an update is degraded as the
whole is.

- *Pruning* keeps the share ``kept`` of the entries that are largest in magnitude (all that equal the
  smallest of these as well); the others become zero.
- *Noise* is Gaussian on every entry, zeros included; its standard deviation is ``noise`` times the root
  mean square of what pruning left.
- *Rounding* to ``precision``. float16 ends at 6e-8, where gradients begin: before rounding, a tensor is
  scaled by the power of two that brings its largest entry just below 2**15, as loss scaling does for a
  whole update, and scaled back after. Either way the tensors stay float32: they hold the values that
  arrive, exactly. Attackers know the precision from the threat model, not from the type of a tensor.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from fedmjp.config import Precision
from fedmjp.seeds import torch_generator

HEADROOM = 15  # the largest float16 is just below 2**16
FARTHEST = 100  # powers of two that float32 has, and their inverses


class Degradation(Protocol):
    """How updates are degraded, as ``FederationConfig`` and ``ThreatModel`` state it."""

    @property
    def precision(self) -> Precision:
        """That they are rounded to."""

    @property
    def noise(self) -> float:
        """Standard deviation of what is added, relative to each tensor's root mean square."""

    @property
    def kept(self) -> float:
        """Share of each tensor's entries that pruning leaves."""


def degrade(update: Mapping[str, Tensor], degradation: Degradation, *, generator: torch.Generator) -> dict[str, Tensor]:
    """An update as it leaves the client.

    Args:
        update: Tensors by name. They are not changed.
        degradation: What is done.
        generator: Its initial seed is the source of the noise, which depends on that and on the tensor's
            name alone.

    Returns:
        Tensors of the same names, shapes and types.
    """
    seed = generator.initial_seed()
    return {name: _degraded(tensor, degradation, torch_generator(seed, name)) for name, tensor in update.items()}


def _degraded(tensor: Tensor, degradation: Degradation, generator: torch.Generator) -> Tensor:
    if degradation.kept < 1:
        tensor = _pruned(tensor, degradation.kept)
    if degradation.noise:
        drawn = torch.randn(tensor.shape, generator=generator).to(tensor)
        tensor = tensor + degradation.noise * tensor.square().mean().sqrt() * drawn
    return tensor if degradation.precision == "float32" else _rounded(tensor, degradation.precision)


def _pruned(tensor: Tensor, kept: float) -> Tensor:
    magnitudes = tensor.abs()
    left = max(1, round(kept * tensor.numel()))
    smallest = magnitudes.flatten().kthvalue(tensor.numel() - left + 1).values
    return torch.where(magnitudes >= smallest, tensor, 0)


def _rounded(tensor: Tensor, precision: Precision) -> Tensor:
    if precision == "bfloat16":
        return tensor.to(torch.bfloat16).to(tensor.dtype)
    _, exponent = torch.frexp(tensor.abs().max())  # largest < 2 ** exponent
    shift = (HEADROOM - exponent).clamp(max=FARTHEST)
    return torch.ldexp(torch.ldexp(tensor, shift).to(torch.float16).to(tensor.dtype), -shift)
