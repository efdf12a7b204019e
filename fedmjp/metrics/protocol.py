"""How pictures are represented when they are scored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


Protocol = Literal["float", "8bit"]


def represent(images: Tensor, protocol: Protocol) -> Tensor:
    """Images in [0, 1] as they are scored: "8bit" rounds to a PNG's 256 levels, as the paper's scripts saw them."""
    return images if protocol == "float" else (images * 255).round() / 255
