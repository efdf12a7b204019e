"""Add Gaussian noise in proportion to each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fedmjp.defences.noise import RelativeNoise
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor


class Gaussian(RelativeNoise):
    """Gaussian noise in proportion to each tensor.

    Example:
        >>> import torch
        >>> from fedmjp.defences.base import Client
        >>> from fedmjp.randomness import SeededRandomness
        >>> protected = Gaussian({"noise": 0.1}).protect(
        ...     {"weight": torch.ones(10_000)}, Client("gradient"), randomness=SeededRandomness(seed=0)
        ... )
        >>> round(float(protected["weight"].std()), 2)
        0.1
    """

    name = "gaussian"
    summary = "Gaussian noise in proportion to each tensor's root mean square; no privacy guarantee"

    @override
    def draw(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        return randomness.normal(name, tensor.shape)
