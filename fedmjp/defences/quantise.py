"""Round entries to few levels at random, right on average."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import TensorDefence
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor


class QuantiseOptions(Config):
    """Options of the levels."""

    bits: int = Field(8, ge=2, le=16, description="per entry, its sign included")


class Quantise(TensorDefence):
    """Stochastic quantisation: every entry becomes a multiple of one step, at random, with the entry as its mean.

    With b bits the multiples are those from -n to n, n = 2**(b - 1) - 1, and the tensor's largest magnitude is the
    n-th. (QSGD's analysis divides by the Euclidean norm; its experiments divide by the largest magnitude, which
    has a smaller variance, and so does this.) The mean is right to 2**-24 of a step. Zeros stay zeros.

    Example:
        >>> import torch
        >>> from fedmjp.defences.base import Client
        >>> from fedmjp.randomness import SeededRandomness
        >>> update = {"weight": torch.linspace(-3, 3, 100)}
        >>> protected = Quantise({"bits": 3}).protect(update, Client("gradient"), randomness=SeededRandomness(seed=0))
        >>> protected["weight"].unique()
        tensor([-3., -2., -1.,  0.,  1.,  2.,  3.])
    """

    name = "quantise"
    paper = "Alistarh et al., QSGD, NeurIPS 2017, section 3.1, scaled by the largest magnitude"
    summary = "rounds entries to few levels at random, right on average"
    told = "the number of bits; each tensor's step can be read off its entries"
    marks: ClassVar = frozenset({"noisy", "pruned"})
    options_type = QuantiseOptions

    @property
    def levels(self) -> int:
        """Count the positive levels."""
        return int(2 ** (self.options.bits - 1) - 1)

    @override
    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        import torch

        largest = tensor.abs().max().double()
        if not largest:
            return tensor
        # In doubles: the largest entry is a level exactly, and no entry passes it.
        exact = tensor.abs().double() / largest * self.levels
        below = exact.floor()
        up = randomness.uniform(name, tensor.shape).to(tensor.device) < exact - below
        return (torch.sign(tensor) * (below + up) * (largest / self.levels)).to(tensor.dtype)

    def noise_on(self, uploaded: Tensor) -> float:
        """Estimate the noise of entries spread evenly between two levels, from the largest entry, which is exact.

        Where most entries are far smaller than a step (few bits), their noise is smaller than this; zeros have none.

        Args:
            uploaded: As it arrived, of any shape.
        """
        if not uploaded.is_floating_point() or not uploaded.numel():
            return 0.0
        return float(uploaded.abs().max()) / self.levels / 6**0.5

    @override
    def bits(self, incoming: float) -> float:
        return min(incoming, float(self.options.bits))
