"""A labelled picture, and how a photograph becomes one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

# ImageNet evaluation: the shorter side is resized to size / 0.875, then the centre is cropped.
CROP_SHARE = 0.875
SIXTEEN_BITS = 65_535


@dataclass(frozen=True)
class LabelledPicture:
    """A private picture, by its name in its source; (3, size, size) float32 in [0, 1]."""

    name: str
    image: Tensor
    label: int

    def digest(self) -> str:
        """SHA-256 of the pixels as the model sees them, as hex."""
        return hashlib.sha256(self.image.contiguous().numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class PictureEntry:
    """A picture that was looked at and can be read again: what a run holds of it until it is needed."""

    name: str
    label: int
    sha256: str  # of its pixels as the model sees them


class PictureSource(Protocol):
    """Named pictures that are read one at a time."""

    def names(self) -> Sequence[str]:
        """Every name, in an order that never changes."""

    def load(self, name: str) -> LabelledPicture:
        """Read one picture; DataError if it cannot be read."""


def to_image(photograph: Image.Image, size: int, *, crop_share: float = CROP_SHARE) -> Tensor:
    """Resize (bicubic), crop the centre to a share of the shorter side, convert to RGB.

    Returns:
        (3, size, size) float32 in [0, 1].

    Raises:
        ValueError: If the mode has no fixed range of values (32-bit integers, floats).
    """
    side = round(size / crop_share)
    resized = transforms.resize(to_rgb(photograph), [side], interpolation=InterpolationMode.BICUBIC)
    cropped = transforms.center_crop(resized, [size, size])
    image: Tensor = transforms.to_dtype(transforms.pil_to_tensor(cropped), torch.float32, scale=True)
    return image


def to_rgb(photograph: Image.Image) -> Image.Image:
    """Three channels of 8 bits; ValueError if the mode has no fixed range of values."""
    if photograph.mode.startswith("I;16"):
        grey = np.asarray(photograph, dtype=np.float64) / SIXTEEN_BITS
        return Image.fromarray((grey * 255).round().astype(np.uint8)).convert("RGB")
    if photograph.mode in ("I", "F"):
        raise ValueError(f"mode {photograph.mode!r} has no fixed range; save it with 8 or 16 bits")
    return photograph.convert("RGB")
