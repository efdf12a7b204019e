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

    patch_size: int
    mean: Tensor
    std: Tensor

    @property
    def pixels(self) -> tuple[int, int]:
        """Return height and width of its pictures."""

    @property
    def prefix_tokens(self) -> int:
        """Count the rows of the position embedding before those of the patches."""

    @property
    def has_positions(self) -> bool:
        """Tell whether there is an absolute position embedding, so that updates hold its gradient."""

    @property
    def defended(self) -> bool:
        """Tell whether there is MJP's unknown position embedding."""

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter by the name that it has in ``fedmjp.models.names``.

        Args:
            target: The name that it has in ``fedmjp.models.names``.
        """

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter by that name."""

    def denormalise(self, images: Tensor) -> Tensor:
        """Map images from the network's input space back to [0, 1]; values outside are clipped.

        Args:
            images: (batch, 3, height, width), normalised.
        """


def count_patches(model: Entrance) -> int:
    """Count the patches of a picture.

    Args:
        model: States the sizes.
    """
    height, width = model.pixels
    return (height // model.patch_size) * (width // model.patch_size)


def require_pixels(pixels: object) -> None:
    """Refuse what is no height and width of pictures.

    Args:
        pixels: As a caller states them.

    Raises:
        BadInputError: Unless they are two positive whole numbers.
    """
    sides = pixels if isinstance(pixels, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise BadInputError(f"pixels {pixels!r} are not height and width of pictures, such as (72, 128)")


def channel_values(mean: Sequence[float], std: Sequence[float]) -> tuple[list[float], list[float]]:
    """Check the numbers that pictures are normalised with.

    Args:
        mean: Of the three channels of pictures in [0, 1].
        std: The same.

    Raises:
        BadInputError: Unless each has three finite numbers, those of ``std`` above 0.
    """
    centre, scale = [float(value) for value in mean], [float(value) for value in std]
    if len(centre) != 3 or len(scale) != 3 or not all(map(math.isfinite, centre + scale)) or min(scale) <= 0:
        raise BadInputError(f"mean {centre} and std {scale} must be three finite numbers each, std above 0")
    return centre, scale


def denormalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Map images from a network's input space back to [0, 1]; values outside are clipped.

    Args:
        images: (batch, 3, height, width), normalised.
        mean: (3, 1, 1) or alike.
        std: The same shape.
    """
    return (images * std.to(images) + mean.to(images)).clamp(0, 1)
