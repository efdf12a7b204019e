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


def from_patches(patches: Tensor, size: int | tuple[int, int], patch_size: int) -> Tensor:
    """Join patches to images: the inverse of ``to_patches``.

    Args:
        patches: (batch, patches, channels * patch_size ** 2).
        size: Height and width of an image; one number for a square.
        patch_size: Pixels per side of a patch.
    """
    height, width = (size, size) if isinstance(size, int) else size
    tiles = patches.reshape(len(patches), height // patch_size, width // patch_size, -1, patch_size, patch_size)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(len(patches), -1, height, width)


def grids_of(patches: int) -> list[tuple[int, int]]:
    """List the rows and columns, two at least, in which patches can lie, those nearest to a square first.

    Args:
        patches: Their number.

    Example:
        >>> grids_of(12)
        [(3, 4), (4, 3), (2, 6), (6, 2)]
    """
    grids = [(rows, patches // rows) for rows in range(2, patches // 2 + 1) if patches % rows == 0]
    return sorted(grids, key=lambda grid: (abs(grid[0] - grid[1]), grid))


def seams_of(patches: Tensor, columns: int) -> float:
    """Measure how badly neighbouring edges fit where patches lie in so many columns: a mean squared difference.

    Args:
        patches: (patches, channels, patch_size, patch_size), row by row; NaN where they are not known.
        columns: That divide their number.
    """
    rows = patches.reshape(-1, columns, *patches.shape[1:])
    below, beside = rows[1:, ..., 0, :] - rows[:-1, ..., -1, :], rows[:, 1:, ..., 0] - rows[:, :-1, ..., -1]
    count = (~below.isnan()).sum() + (~beside.isnan()).sum()
    return float((below.square().nansum() + beside.square().nansum()) / count)
