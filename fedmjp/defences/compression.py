"""Fewer bits per entry, tensor by tensor: pruning, quantisation, shorter formats, signs."""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import TensorDefence
from fedmjp.randomness import Randomness

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit in the last place
HEADROOM = 15  # the largest float16 is just below 2**16
FARTHEST = 100  # powers of two that float32 has, and their inverses


class PruneOptions(Config):
    """How much is left."""

    kept: float = Field(0.1, gt=0, le=1, description="share of each tensor's entries that stays, the largest")


class Prune(TensorDefence):
    """Keeps the entries of each tensor that are largest in magnitude; the others become zero.

    All that equal the smallest of those that are kept stay as well.
    """

    name = "prune"
    paper = "Lin et al., Deep Gradient Compression, ICLR 2018; as a defence Zhu et al., NeurIPS 2019, section 5.2"
    summary = "keeps the largest entries of each tensor, the others become zero"
    told = "the share of the entries that is kept"
    marks: ClassVar = frozenset({"pruned"})
    options_type = PruneOptions

    @override
    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        magnitudes = tensor.abs()
        left = max(1, round(self.options.kept * tensor.numel()))
        smallest = magnitudes.flatten().kthvalue(tensor.numel() - left + 1).values
        return torch.where(magnitudes >= smallest, tensor, 0)

    @override
    def bits(self, before: float) -> float:
        kept = float(self.options.kept)
        places = -sum(p * math.log2(p) for p in (kept, 1 - kept) if p > 0)  # where they stand: the entropy of a coin
        return min(before, kept * before + places)


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


class RoundOptions(Config):
    """To what is rounded."""

    precision: Literal["float16", "bfloat16"] = Field("float16", description="format of the entries that leave")


class Round(TensorDefence):
    """Rounds every entry to float16 or bfloat16; tensors keep their type and hold the values that arrive.

    float16 ends at 6e-8, where gradients begin: before rounding, a tensor is scaled by the power of two that
    brings its largest entry just below 2**15, as loss scaling does for a whole update, and scaled back after.
    """

    name = "round"
    paper = "formats of IEEE 754 and bfloat16; loss scaling as in Micikevicius et al., Mixed Precision Training, 2018"
    summary = "rounds every entry to float16 or bfloat16"
    told = "the precision"
    marks: ClassVar = frozenset({"rounded"})
    options_type = RoundOptions

    @property
    @override
    def rounding(self) -> float:
        return ROUNDING[self.options.precision]

    @override
    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        if self.options.precision == "bfloat16":
            return tensor.to(torch.bfloat16).to(tensor.dtype)
        _, exponent = torch.frexp(tensor.abs().max())  # largest < 2 ** exponent
        shift = (HEADROOM - exponent).clamp(max=FARTHEST)
        return torch.ldexp(torch.ldexp(tensor, shift).to(torch.float16).to(tensor.dtype), -shift)

    @override
    def bits(self, before: float) -> float:
        return min(before, 16.0)


class Sign(TensorDefence):
    """Replaces every entry by its sign times the tensor's mean magnitude; zeros stay zeros.

    References:
        Karimireddy et al., "Error feedback fixes signSGD", ICML 2019, for the scale.
    """

    name = "sign"
    paper = "Bernstein et al., signSGD, ICML 2018; scale as in Karimireddy et al., ICML 2019"
    summary = "signs alone, times each tensor's mean magnitude"
    told = "that only signs leave, with one scale per tensor"
    marks: ClassVar = frozenset({"signs"})

    @override
    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        return tensor.sign() * tensor.abs().mean()

    def bits(self, before: float) -> float:
        """Of entries that are not zero; zeros come in runs, which cost next to nothing."""
        return min(before, 1.0)
