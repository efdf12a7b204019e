"""Keep the largest entries of each tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import TensorDefence
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor


class PruneOptions(Config):
    """Options of the pruning."""

    kept: float = Field(0.1, gt=0, le=1, description="share of each tensor's entries that stays, the largest")


class Prune(TensorDefence):
    """Sparse updates: the entries of each tensor that are largest in magnitude stay, the others become zero.

    All entries that equal the smallest remaining one stay as well.

    Example:
        >>> import torch
        >>> from fedmjp.defences.base import Client
        >>> from fedmjp.randomness import SeededRandomness
        >>> update = {"weight": torch.tensor([1.0, -4.0, 2.0, 3.0])}
        >>> Prune({"kept": 0.5}).protect(update, Client("gradient"), randomness=SeededRandomness(seed=0))
        {'weight': tensor([ 0., -4.,  0.,  3.])}
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
        import torch

        magnitudes = tensor.abs()
        count = max(1, round(self.options.kept * tensor.numel()))
        smallest = magnitudes.flatten().kthvalue(tensor.numel() - count + 1).values
        return torch.where(magnitudes >= smallest, tensor, 0)

    @override
    def bits(self, incoming: float) -> float:
        share = float(self.options.kept)
        places = -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)  # where they stand: the entropy of a coin
        return min(incoming, share * incoming + places)
