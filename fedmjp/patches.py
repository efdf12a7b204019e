"""Images as patches, in the order of the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def to_patches(images: Tensor, patch_size: int) -> Tensor:
    """Cut images into patches; torch's ``unfold`` gives the same, on CUDA by a kernel for each picture.

    Args:
        images: (batch, channels, height, width); sides are multiples of the patch size.
        patch_size: Pixels per side.

    Returns:
        (batch, patches, channels * patch_size ** 2), in (channel, row, column) order.
    """
    batch, channels, height, width = images.shape
    rows, columns = height // patch_size, width // patch_size
    tiles = images.reshape(batch, channels, rows, patch_size, columns, patch_size)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * patch_size**2)


def from_patches(patches: Tensor, image_size: int, patch_size: int) -> Tensor:
    """Join patches to square images: the inverse of ``to_patches``.

    Args:
        patches: (batch, patches, channels * patch_size ** 2).
        image_size: Pixels per side of an image.
        patch_size: Pixels per side of a patch.
    """
    grid = image_size // patch_size
    tiles = patches.reshape(len(patches), grid, grid, -1, patch_size, patch_size)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(len(patches), -1, image_size, image_size)
