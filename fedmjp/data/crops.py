"""Random crops of pictures that are tensors, by the definition that torchvision and timm share."""

import math

import numpy as np
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

NARROWEST, WIDEST = 3 / 4, 4 / 3  # ratios of width to height
ATTEMPTS = 10
FLIPPED = 0.5


def random_crop(image: Tensor, scale: float, *, generator: np.random.Generator) -> Tensor:
    """Cut a random part out of a square picture, flip it or not, and resize it to the picture's size (bicubic).

    The area is uniform in [``scale``, 1] of the picture's, the logarithm of width over height between those of 3/4 and
    4/3. What does not fit is drawn again; after ten times the picture stays whole. torchvision's RandomResizedCrop
    draws the same from the global generator, which nothing here touches.

    Args:
        image: (3, size, size) float32 in [0, 1].
        scale: Smallest share of the picture that is kept, in (0, 1].
        generator: Source of all that is drawn.

    Returns:
        (3, size, size) float32 in [0, 1].
    """
    size = image.shape[-1]
    row, column, height, width = _box(size, scale, generator)
    crop: Tensor = transforms.resized_crop(
        image, row, column, height, width, [size, size], interpolation=InterpolationMode.BICUBIC, antialias=True
    )
    return (crop.flip(-1) if generator.random() < FLIPPED else crop).clamp(0, 1)


def _box(size: int, scale: float, generator: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw a crop: its top row and left column, height and width."""
    for _ in range(ATTEMPTS):
        area = size**2 * generator.uniform(scale, 1)
        ratio = math.exp(generator.uniform(math.log(NARROWEST), math.log(WIDEST)))
        height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < height <= size and 0 < width <= size:
            row, column = (int(generator.integers(size - side + 1)) for side in (height, width))
            return row, column, height, width
    return 0, 0, size, size
