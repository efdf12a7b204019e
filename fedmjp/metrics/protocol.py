"""How pictures are represented when they are scored."""

from typing import Literal

from torch import Tensor

Protocol = Literal["float", "8bit"]


def represent(images: Tensor, protocol: Protocol) -> Tensor:
    """Images as the protocol scores them.

    Args:
        images: (batch, 3, height, width) in [0, 1].
        protocol: "float" leaves them; "8bit" rounds to the 256 levels of a PNG, as the paper's
            scripts saw them.
    """
    return images if protocol == "float" else (images * 255).round() / 255
