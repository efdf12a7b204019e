"""The block-wise jigsaw of MJP: which patches are masked, and where each of them goes.

Follows the official code (yhlleo/MJP, data/masking_generator.py, itself from BEiT): rectangles of random area and
aspect ratio are painted until the number of patches is reached or ten attempts in a row fail. The realised number is
therefore often smaller, down to empty masks at small ratios; it is recorded, never assumed.

Example:
    >>> import torch
    >>> puzzle = draw(14, 0.27, generator=torch.Generator().manual_seed(0))
    >>> puzzle.mask.shape, int(puzzle.mask.sum()) <= int(14 * 14 * 0.27)
    (torch.Size([1, 196]), True)
    >>> images = torch.rand(1, 3, 224, 224)
    >>> shuffled = rearrange(images, puzzle.source)
    >>> torch.equal(rearrange(shuffled, puzzle.source.argsort(1)), images)
    True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedmjp.errors import BadInputError
from fedmjp.patches import from_patches, to_patches

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Constants of the official generator as its evaluation scripts build it: JigsawPuzzleMaskedRegion(224, 16).
MIN_BLOCK = 8
MAX_BLOCK = 75
MIN_ASPECT = 0.3
ATTEMPTS = 10


@dataclass(frozen=True)
class PatchShuffle:
    """One drawn puzzle per picture."""

    mask: Tensor  # (batch, patches) bool, True where the patch was shuffled
    # (batch, patches) int64; place i of the shuffled picture shows patch ``source[i]`` of the clean one. The identity
    # outside the mask.
    source: Tensor


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _paint_block(mask: npt.NDArray[np.bool_], missing: int, generator: torch.Generator) -> int:
    """Paint one rectangle that adds between 1 and ``missing`` patches; return how many it added."""
    import torch

    grid = len(mask)  # NumPy because training draws a mask per picture, and torch is slow on a few patches
    for _ in range(ATTEMPTS):
        shares = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        area = _between(MIN_BLOCK, missing, shares[0])
        aspect = math.exp(_between(math.log(MIN_ASPECT), -math.log(MIN_ASPECT), shares[1]))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height >= grid or width >= grid:
            continue
        row = int(torch.randint(grid - height + 1, (), generator=generator))
        column = int(torch.randint(grid - width + 1, (), generator=generator))
        block = mask[row : row + height, column : column + width]
        added = block.size - int(block.sum())
        if 0 < added <= missing:
            block[:] = True
            return added
    return 0


def draw_mask(grid: int, mask_ratio: float, *, generator: torch.Generator) -> Tensor:
    """Draw one block-wise mask of a grid of patches.

    In the official code a ratio of 0 silently means 0.1; here it means no mask.

    Args:
        grid: Patches per side.
        mask_ratio: Share of the patches, in [0, 1].
        generator: On the CPU.

    Returns:
        (grid * grid,) bool. At most ``int(grid * grid * mask_ratio)`` are True, often fewer.

    Raises:
        BadInputError: If the ratio is outside [0, 1].
    """
    import torch

    if not 0.0 <= mask_ratio <= 1.0:
        raise BadInputError(f"mask ratio {mask_ratio} is outside [0, 1]")
    mask = np.zeros((grid, grid), dtype=np.bool_)
    missing = int(grid * grid * mask_ratio)
    while missing > 0:
        added = _paint_block(mask, min(missing, MAX_BLOCK), generator)
        if added == 0:
            break
        missing -= added
    return torch.from_numpy(mask.ravel())


def draw(grid: int, mask_ratio: float, *, generator: torch.Generator) -> PatchShuffle:
    """Draw the puzzle of one picture: a mask, and a uniform permutation of the masked patches.

    Args:
        grid: Patches per side.
        mask_ratio: Share of the patches, in [0, 1].
        generator: On the CPU.

    Raises:
        BadInputError: If the ratio is outside [0, 1].
    """
    import torch

    mask = draw_mask(grid, mask_ratio, generator=generator)
    source = torch.arange(grid * grid)
    places = mask.nonzero().flatten()
    source[places] = places[torch.randperm(len(places), generator=generator)]
    return PatchShuffle(mask[None], source[None])


def rearrange(images: Tensor, source: Tensor) -> Tensor:
    """Place a bit-exact copy of patch ``source[i]`` of each image at place i; ``source.argsort(1)`` undoes it.

    Args:
        images: (batch, 3, size, size).
        source: (batch, patches) int64, a permutation per image.

    Raises:
        BadInputError: If so many patches do not tile the images.
    """
    size = images.shape[-1]
    grid = math.isqrt(source.shape[1])
    if grid * grid != source.shape[1] or size % grid:
        raise BadInputError(f"{source.shape[1]} patches do not tile an image of {size} x {size} pixels")
    patches = to_patches(images, size // grid)
    moved = patches.gather(1, source[:, :, None].expand_as(patches))
    return from_patches(moved, size, size // grid)
