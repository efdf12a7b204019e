"""Round entries to half precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import TensorDefence
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit in the last place
HEADROOM = 15  # the largest float16 is just below 2**16
FARTHEST = 100  # powers of two that float32 has, and their inverses


class RoundOptions(Config):
    """Options of the rounding."""

    precision: Literal["float16", "bfloat16"] = Field("float16", description="format of the entries that leave")


class Round(TensorDefence):
    """Half precision: every entry is rounded to float16 or bfloat16; tensors keep their type.

    float16 ends at 6e-8, where gradients begin: before rounding, a tensor is scaled by the power of two that
    brings its largest entry just below 2**15, as loss scaling does for a whole update, and scaled back after.

    Example:
        >>> import torch
        >>> from fedmjp.defences.base import Client
        >>> from fedmjp.randomness import SeededRandomness
        >>> update = {"weight": torch.tensor([1.0, 1.001])}
        >>> options = {"precision": "bfloat16"}
        >>> Round(options).protect(update, Client("gradient"), randomness=SeededRandomness(seed=0))
        {'weight': tensor([1., 1.])}
    """

    name = "round"
    paper = "formats of IEEE 754 and bfloat16; loss scaling as in Micikevicius et al., Mixed Precision Training, 2018"
    summary = "rounds every entry to float16 or bfloat16"
    told = "the precision"
    marks: ClassVar = frozenset({"rounded"})
    draws = False
    options_type = RoundOptions

    @property
    @override
    def rounding(self) -> float:
        return ROUNDING[self.options.precision]

    @override
    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        import torch

        if self.options.precision == "bfloat16":
            return tensor.to(torch.bfloat16).to(tensor.dtype)
        _, exponent = torch.frexp(tensor.abs().max())  # largest < 2 ** exponent
        shift = (HEADROOM - exponent).clamp(max=FARTHEST)
        return torch.ldexp(torch.ldexp(tensor, shift).to(torch.float16).to(tensor.dtype), -shift)

    @override
    def bits(self, incoming: float) -> float:
        return min(incoming, 16.0)
