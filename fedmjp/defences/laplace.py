"""Add Laplace noise in proportion to each tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from fedmjp.defences.noise import RelativeNoise
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor

STEP = 2.0**-24  # of uniform float32 values


class Laplace(RelativeNoise):
    """Laplace noise in proportion to each tensor: more small values and more large ones than Gaussian noise.

    It is the Laplace quantile of uniform values, and ends at 12.4 standard deviations.

    Example:
        >>> import torch
        >>> from fedmjp.defences.base import Client
        >>> from fedmjp.randomness import SeededRandomness
        >>> protected = Laplace({"noise": 0.1}).protect(
        ...     {"weight": torch.ones(10_000)}, Client("gradient"), randomness=SeededRandomness(seed=0)
        ... )
        >>> round(float(protected["weight"].std()), 2)
        0.1
    """

    name = "laplace"
    summary = "Laplace noise in proportion to each tensor's root mean square; no privacy guarantee"

    @override
    def draw(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        import torch

        # The middle of each interval, in doubles: neither end, where the quantile is infinite.
        centred = randomness.uniform(name, tensor.shape).double() + STEP / 2 - 0.5
        return -centred.sign() * torch.log1p(-2 * centred.abs()) / 2**0.5
