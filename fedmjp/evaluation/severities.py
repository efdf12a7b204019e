"""Parameters of each corruption of ImageNet-C by severity and by the side of the picture.

Values are those of the official generators: ImageNet-C at 224 pixels, Tiny-ImageNet-C at 64, CIFAR-10-C at 32. A
picture of another side takes the nearest of the three, with lengths in pixels scaled by the ratio of the sides.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedmjp.errors import BadInputError, UnknownNameError

Strength = Sequence[float]
SEVERITIES = (1, 2, 3, 4, 5)

# By side and corruption, of each severity; lengths of elastic_transform are shares of the side.
OFFICIAL: Mapping[int, Mapping[str, Sequence[Strength]]] = {
    int(side): values
    for side, values in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}
# Places of the parameters that are lengths in pixels.
_PIXELS = {
    "defocus_blur": (0, 1), "glass_blur": (0, 1), "motion_blur": (0, 1), "snow": (4, 5), "elastic_transform": (0, 1, 2),
}  # fmt: skip
NAMES = tuple(OFFICIAL[224])
_ELASTIC_SIDES = {32: 32, 64: 64, 224: 244}  # the official generator multiplies shares by 244, not by 224


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
    if corruption == "elastic_transform":
        values = [share * _ELASTIC_SIDES[nearest] for share in values]
    return tuple(value * scale if place in pixels else value for place, value in enumerate(values))
