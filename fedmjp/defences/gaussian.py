"""Adds Gaussian noise in proportion to each tensor."""

from torch import Tensor
from typing_extensions import override

from fedmjp.defences.noise import RelativeNoise
from fedmjp.randomness import Randomness


class Gaussian(RelativeNoise):
    """Adds Gaussian noise."""

    name = "gaussian"
    summary = "Gaussian noise in proportion to each tensor's root mean square; no privacy guarantee"

    @override
    def draw(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        return randomness.normal(name, tensor.shape)
