"""Keeps the largest entries of each tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import TensorDefence
from fedmjp.randomness import Randomness
from fedmjp.torch_later import torch

if TYPE_CHECKING:
    from torch import Tensor


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
    draws = False
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
