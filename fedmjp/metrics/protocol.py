"""How pictures are represented when they are scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


Protocol = Literal["float", "8bit"]


def represent(images: Tensor, protocol: Protocol) -> Tensor:
    """Represent images as they are scored.

    Args:
        images: (batch, 3, height, width) in [0, 1].
        protocol: "8bit" rounds to a PNG's 256 levels, as the paper's scripts saw them; "float" leaves them.

    Example:
        >>> import torch
        >>> represent(torch.tensor([0.5]), "8bit")
        tensor([0.5020])
    """
    return images if protocol == "float" else (images * 255).round() / 255
