"""A labelled picture, and how a photograph becomes one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

# ImageNet evaluation: the shorter side is resized to size / 0.875, then the centre is cropped.
CROP_SHARE = 0.875


@dataclass(frozen=True)
class LabelledPicture:
    """A private picture.

    Attributes:
        name: Its name in its source.
        image: (3, size, size) float32 in [0, 1].
        label: Class index.
    """

    name: str
    image: Tensor
    label: int

    def digest(self) -> str:
        """SHA-256 of the pixels as the model sees them, as hex."""
        return hashlib.sha256(self.image.contiguous().numpy().tobytes()).hexdigest()


class PictureSource(Protocol):
    """Named pictures that are read one at a time."""

    def names(self) -> Sequence[str]:
        """Every name, in an order that never changes."""

    def load(self, name: str) -> LabelledPicture:
        """Read one picture; DataError if it cannot be read."""


def to_image(photograph: Image.Image, size: int, *, crop_share: float = CROP_SHARE) -> Tensor:
    """Resize (bicubic), crop the centre, convert to RGB.

    Args:
        photograph: In any mode; grey, palette and RGBA become RGB.
        size: Pixels per side of the result.
        crop_share: Share of the shorter side that the crop keeps.

    Returns:
        (3, size, size) float32 in [0, 1].
    """
    side = round(size / crop_share)
    resized = transforms.resize(photograph.convert("RGB"), [side], interpolation=InterpolationMode.BICUBIC)
    cropped = transforms.center_crop(resized, [size, size])
    image: Tensor = transforms.to_dtype(transforms.pil_to_tensor(cropped), torch.float32, scale=True)
    return image
