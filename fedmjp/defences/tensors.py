"""What defences share that treat each tensor of an update alone."""

import math
from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from fedmjp.defences.base import Client, Defence, require_finite
from fedmjp.randomness import Randomness


class TensorDefence(Defence):
    """Changes each tensor of real numbers, whatever else is in the update; counters and the like pass untouched."""

    stages = ("update",)

    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        """As of ``Defence``."""
        del client
        require_finite(update, self.name)
        return {
            name: self.change(name, tensor, randomness) if tensor.is_floating_point() and tensor.numel() else tensor
            for name, tensor in update.items()
        }

    @abstractmethod
    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        """What becomes of a tensor of finite real numbers, not empty, of any shape."""


def bits_of_places(share: float) -> float:
    """Bits per value that say where such a share of the values stands: the entropy of a coin."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)


def noise_in(uploaded: Tensor, share: float) -> float:
    """Standard deviation of noise that was this share of a tensor's RMS, read off the tensor with the noise."""
    if not uploaded.is_floating_point() or not uploaded.numel():
        return 0.0
    return share * float(uploaded.double().square().mean().sqrt()) / math.sqrt(1 + share**2)
