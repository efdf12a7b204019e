"""Scale the whole update down to a norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import Client, Defence, require_finite
from fedmjp.defences.clipping import clip
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor


class ClipOptions(Config):
    """Options of the clipping."""

    norm: float = Field(1.0, gt=0, allow_inf_nan=False, description="largest Euclidean norm of the whole update")


class Clip(Defence):
    """Flat clipping: the whole update is scaled down to a norm where it is longer. Without noise this is no privacy.

    Example:
        >>> import torch
        >>> from fedmjp.defences.base import Client
        >>> from fedmjp.randomness import SeededRandomness
        >>> update = {"weight": torch.tensor([3.0, 4.0])}
        >>> Clip({"norm": 1}).protect(update, Client("gradient"), randomness=SeededRandomness(seed=0))
        {'weight': tensor([0.6000, 0.8000])}
    """

    name = "clip"
    paper = "McMahan et al., Learning differentially private recurrent language models, ICLR 2018"
    summary = "scales the whole update down to a norm where it is longer; no privacy guarantee"
    told = "the norm, not the factor"
    stages = ("update",)
    scope = "update"
    marks: ClassVar = frozenset({"scaled"})
    draws = False
    options_type = ClipOptions

    @override
    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        require_finite(update, self.name)
        return clip(update, self.options.norm)
