"""Rounds entries to few levels at random, right on average."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import TensorDefence
from fedmjp.randomness import Randomness
from fedmjp.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor


class QuantiseOptions(Config):
    """How finely."""

    bits: int = Field(8, ge=2, le=16, description="per entry, its sign included")


class Quantise(TensorDefence):
    """Rounds every entry up or down to a multiple of one step, at random, so that its mean is the entry itself.

    With b bits the multiples are those from -n to n, n = 2**(b - 1) - 1, and the tensor's largest magnitude is the
    n-th. (QSGD's analysis divides by the Euclidean norm; its experiments divide by the largest magnitude, which
    has a smaller variance, and so does this.) The mean is right to 2**-24 of a step. Zeros stay zeros.
    """

    name = "quantise"
    paper = "Alistarh et al., QSGD, NeurIPS 2017, section 3.1, scaled by the largest magnitude"
    summary = "rounds entries to few levels at random, right on average"
    told = "the number of bits; each tensor's step can be read off its entries"
    marks: ClassVar = frozenset({"noisy", "pruned"})
    options_type = QuantiseOptions

    @property
    def levels(self) -> int:
        """Positive levels."""
        return int(2 ** (self.options.bits - 1) - 1)

    @override
    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        largest = tensor.abs().max().double()
        if not largest:
            return tensor
        # In doubles: the largest entry is a level exactly, and no entry passes it.
        exact = tensor.abs().double() / largest * self.levels
        below = exact.floor()
        up = randomness.uniform(name, tensor.shape).to(tensor.device) < exact - below
        return (torch.sign(tensor) * (below + up) * (largest / self.levels)).to(tensor.dtype)

    def noise_on(self, uploaded: Tensor) -> float:
        """That of entries spread evenly between two levels, from the largest, which is exact.

        Where most entries are far smaller than a step (few bits), their noise is smaller than this; zeros have none.
        """
        if not uploaded.is_floating_point() or not uploaded.numel():
            return 0.0
        return float(uploaded.abs().max()) / self.levels / 6**0.5

    @override
    def bits(self, before: float) -> float:
        return min(before, float(self.options.bits))
