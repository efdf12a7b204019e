"""Photographs that ship inside scikit-image: real pictures on every machine, nothing to fetch."""

from dataclasses import dataclass

import skimage.data
from PIL import Image


@dataclass(frozen=True)
class Crop:
    """A square of a photograph: left, top and side in pixels, and the nearest ImageNet class."""

    photograph: str
    left: int
    top: int
    side: int
    label: int

    def cut(self) -> Image.Image:
        """Read the photograph and crop it."""
        photograph = Image.fromarray(getattr(skimage.data, self.photograph)())
        return photograph.crop((self.left, self.top, self.left + self.side, self.top + self.side))


CROPS = {
    "astronaut": Crop("astronaut", 0, 0, 512, 834),  # suit
    "astronaut-face": Crop("astronaut", 112, 0, 240, 834),
    "cat": Crop("chelsea", 80, 0, 300, 281),  # tabby
    "cat-eyes": Crop("chelsea", 130, 40, 200, 281),
    "coffee": Crop("coffee", 130, 0, 400, 967),  # espresso
    "coffee-spoon": Crop("coffee", 360, 120, 240, 910),  # wooden spoon
    "rocket": Crop("rocket", 110, 0, 427, 657),  # missile
    "rocket-flame": Crop("rocket", 200, 180, 240, 657),
}
