"""Photographs that ship inside scikit-image: real pictures on every machine, nothing to fetch."""

from collections.abc import Sequence
from dataclasses import dataclass

import skimage.data
from PIL import Image

from fedmjp.data.pictures import LabelledPicture, to_image
from fedmjp.errors import DataError


@dataclass(frozen=True)
class Crop:
    """A square of a photograph: left, top and side in pixels, and the nearest ImageNet class."""

    photograph: str
    left: int
    top: int
    side: int
    label: int


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


class BundledPictures:
    """Eight square crops of scikit-image's photographs.

    Args:
        size: Pixels per side that they are resized to.
        classes: Classes that the model knows.

    Raises:
        DataError: If the model does not know the ImageNet classes of the pictures.
    """

    def __init__(self, size: int, classes: int) -> None:
        highest = max(crop.label for crop in CROPS.values())
        if classes <= highest:
            raise DataError(
                f"the bundled pictures have ImageNet labels up to {highest}, the model has {classes} classes"
            )
        self._size = size

    def names(self) -> Sequence[str]:
        """Names of the crops."""
        return list(CROPS)

    def load(self, name: str) -> LabelledPicture:
        """Read one crop; DataError if there is no such name."""
        if name not in CROPS:
            raise DataError(f"no bundled picture is called {name!r}; there are {', '.join(CROPS)}")
        crop = CROPS[name]
        photograph = Image.fromarray(getattr(skimage.data, crop.photograph)())
        square = photograph.crop((crop.left, crop.top, crop.left + crop.side, crop.top + crop.side))
        return LabelledPicture(name, to_image(square, self._size, crop_share=1.0), crop.label)
