"""Parameters of each corruption of ImageNet-C by severity and by the side of the picture.

Values are those of the official generators: ImageNet-C at 224 pixels, Tiny-ImageNet-C at 64, CIFAR-10-C at 32. A
picture of another side takes the nearest of the three, with lengths in pixels scaled by the ratio of the sides.
"""

import math
from collections.abc import Mapping, Sequence

from fedmjp.errors import BadInputError, UnknownNameError

Strength = tuple[float, ...]
SEVERITIES = (1, 2, 3, 4, 5)

_IMAGENET: Mapping[str, Sequence[Strength]] = {
    "gaussian_noise": [(0.08,), (0.12,), (0.18,), (0.26,), (0.38,)],
    "shot_noise": [(60,), (25,), (12,), (5,), (3,)],
    "impulse_noise": [(0.03,), (0.06,), (0.09,), (0.17,), (0.27,)],
    "defocus_blur": [(3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)],
    "glass_blur": [(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
    "motion_blur": [(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)],
    "zoom_blur": [(1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)],
    "snow": [
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ],
    "frost": [(1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)],
    "fog": [(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)],
    "brightness": [(0.1,), (0.2,), (0.3,), (0.4,), (0.5,)],
    "contrast": [(0.4,), (0.3,), (0.2,), (0.1,), (0.05,)],
    # The generator multiplies shares by 244, not by 224.
    "elastic_transform": [
        (244 * 2, 244 * 0.7, 244 * 0.1),
        (244 * 2, 244 * 0.08, 244 * 0.2),
        (244 * 0.05, 244 * 0.01, 244 * 0.02),
        (244 * 0.07, 244 * 0.01, 244 * 0.02),
        (244 * 0.12, 244 * 0.01, 244 * 0.02),
    ],
    "pixelate": [(0.6,), (0.5,), (0.4,), (0.3,), (0.25,)],
    "jpeg_compression": [(25,), (18,), (15,), (10,), (7,)],
}
_TINY_IMAGENET: Mapping[str, Sequence[Strength]] = {
    "gaussian_noise": [(0.04,), (0.08,), (0.12,), (0.15,), (0.18,)],
    "shot_noise": [(250,), (100,), (50,), (30,), (15,)],
    "impulse_noise": [(0.01,), (0.02,), (0.05,), (0.08,), (0.14,)],
    "defocus_blur": [(0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)],
    "glass_blur": [(0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)],
    "motion_blur": [(10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)],
    "zoom_blur": [(1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)],
    "snow": [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ],
    "frost": [(1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)],
    "fog": [(0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)],
    "brightness": [(0.1,), (0.2,), (0.3,), (0.4,), (0.5,)],
    "contrast": [(0.4,), (0.3,), (0.2,), (0.1,), (0.05,)],
    "elastic_transform": [
        (0, 0, 64 * 0.08),
        (64 * 0.05, 64 * 0.3, 64 * 0.06),
        (64 * 0.1, 64 * 0.08, 64 * 0.06),
        (64 * 0.1, 64 * 0.03, 64 * 0.03),
        (64 * 0.16, 64 * 0.03, 64 * 0.02),
    ],
    "pixelate": [(0.9,), (0.8,), (0.7,), (0.6,), (0.5,)],
    "jpeg_compression": [(65,), (58,), (50,), (40,), (25,)],
}
_CIFAR: Mapping[str, Sequence[Strength]] = {
    "gaussian_noise": [(0.04,), (0.06,), (0.08,), (0.09,), (0.1,)],
    "shot_noise": [(500,), (250,), (100,), (75,), (50,)],
    "impulse_noise": [(0.01,), (0.02,), (0.03,), (0.05,), (0.07,)],
    "defocus_blur": [(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)],
    "glass_blur": [(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)],
    "motion_blur": [(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)],
    "zoom_blur": [(1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)],
    "snow": [
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ],
    "frost": [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
    "fog": [(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
    "brightness": [(0.05,), (0.1,), (0.15,), (0.2,), (0.3,)],
    "contrast": [(0.75,), (0.5,), (0.4,), (0.3,), (0.15,)],
    "elastic_transform": [
        (0, 0, 32 * 0.08),
        (32 * 0.05, 32 * 0.2, 32 * 0.07),
        (32 * 0.08, 32 * 0.06, 32 * 0.06),
        (32 * 0.1, 32 * 0.04, 32 * 0.05),
        (32 * 0.1, 32 * 0.03, 32 * 0.03),
    ],
    "pixelate": [(0.95,), (0.9,), (0.85,), (0.75,), (0.65,)],
    "jpeg_compression": [(80,), (65,), (58,), (50,), (40,)],
}
OFFICIAL = {32: _CIFAR, 64: _TINY_IMAGENET, 224: _IMAGENET}
# Places of the parameters that are lengths in pixels.
_PIXELS = {
    "defocus_blur": (0, 1), "glass_blur": (0, 1), "motion_blur": (0, 1), "snow": (4, 5), "elastic_transform": (0, 1, 2),
}  # fmt: skip
NAMES = tuple(_IMAGENET)


def look_up_strength(corruption: str, severity: int, size: int) -> Strength:
    """Look up the parameters of a corruption at a severity for pictures of a size.

    Args:
        corruption: One of ``NAMES``.
        severity: From 1 to 5.
        size: Pixels per side.

    Returns:
        The parameters of the function in ``fedmjp.evaluation.corruptions.CORRUPTIONS`` with this name.

    Raises:
        UnknownNameError: If there is no such corruption, with the nearest name.
        BadInputError: If there is no such severity.
    """
    if corruption not in NAMES:
        raise UnknownNameError("corruption", corruption, NAMES)
    if severity not in SEVERITIES:
        raise BadInputError(f"severity {severity} is none from {SEVERITIES[0]} to {SEVERITIES[-1]}")
    nearest = min(OFFICIAL, key=lambda side: abs(math.log(size / side)))
    scale, pixels = size / nearest, _PIXELS.get(corruption, ())
    values = OFFICIAL[nearest][corruption][severity - 1]
    return tuple(value * scale if place in pixels else value for place, value in enumerate(values))
