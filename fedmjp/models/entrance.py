"""The entrance of a vision transformer: how pictures become tokens, which is all that closed forms read."""

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from fedmjp.errors import BadInputError


class Entrance(Protocol):
    """What an attack needs of a model that it does not run.

    ``VitClassifier`` has it, and so has a user's own module once ``fedmjp.models.adopt`` took it in.
    """

    image_size: int
    patch_size: int
    mean: Tensor
    std: Tensor

    @property
    def grid(self) -> int:
        """Patches per side."""

    @property
    def prefix_tokens(self) -> int:
        """Rows of the position embedding before those of the patches."""

    @property
    def has_positions(self) -> bool:
        """Whether there is an absolute position embedding, so that updates hold its gradient."""

    @property
    def defended(self) -> bool:
        """Whether there is MJP's unknown position embedding."""

    def get_parameter(self, target: str) -> nn.Parameter:
        """A parameter by the name that it has in ``fedmjp.models.names``."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter by that name."""

    def denormalise(self, images: Tensor) -> Tensor:
        """From the network's input space back to [0, 1]; values outside are clipped."""


def channel_values(mean: Sequence[float], std: Sequence[float]) -> tuple[list[float], list[float]]:
    """Check what pictures are normalised with; BadInputError unless three finite numbers each, std above 0."""
    centre, scale = [float(value) for value in mean], [float(value) for value in std]
    if len(centre) != 3 or len(scale) != 3 or not all(map(math.isfinite, centre + scale)) or min(scale) <= 0:
        raise BadInputError(f"mean {centre} and std {scale} must be three finite numbers each, std above 0")
    return centre, scale


def denormalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """What ``Entrance.denormalise`` gives."""
    return (images * std.to(images) + mean.to(images)).clamp(0, 1)
