"""Images as patches, in the order of the tokens."""

import torch.nn.functional as F
from torch import Tensor


def to_patches(images: Tensor, patch_size: int) -> Tensor:
    """(batch, 3, height, width) to (batch, patches, 3 * patch_size ** 2), in (channel, row, column) order."""
    return F.unfold(images, patch_size, stride=patch_size).transpose(1, 2)


def from_patches(patches: Tensor, image_size: int, patch_size: int) -> Tensor:
    """The inverse of ``to_patches`` for square images."""
    return F.fold(patches.transpose(1, 2), image_size, patch_size, stride=patch_size)
