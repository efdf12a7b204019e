"""A labelled picture, data sets of them in any number, and how a photograph becomes one."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from fedmjp.errors import DataError, suggestion
from fedmjp.files import require_regular

# ImageNet evaluation: the shorter side is resized to size / 0.875, then the centre is cropped.
CROP_SHARE = 0.875
# Others of Pillow's formats start programs (EPS) or are no photographs.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "AVIF", "PPM", "TIFF")
MOST_PIXELS = 2**27  # more than any camera's; 400 MB when decoded
# Decoded pictures are kept where all of the data set would fit; 100,000 of 64 x 64 do.
KEPT_BYTES = 2 * 2**30
BYTES_PER_PIXEL = 4  # of Pillow's RGB
LONGEST = 50  # times the shorter side: the whole picture is resized before its centre is cropped


@dataclass(frozen=True)
class LabelledPicture:
    """A private picture, by its name in its source; (3, size, size) float32 in [0, 1]."""

    name: str
    image: Tensor
    label: int

    def digest(self) -> str:
        """Return the SHA-256, as hex, of the pixels as the model sees them."""
        return hashlib.sha256(self.image.contiguous().numpy().tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class LabelledDataset:
    """Photographs with labels, by what the user called them and the split."""

    name: str
    labels: np.ndarray  # (pictures,) int64
    class_names: tuple[str, ...]  # one for each label that there is, at least
    keys: Sequence[str] = field(repr=False)  # the pictures' names in their source, which never change
    read: Callable[[int], Image.Image | None] = field(repr=False)  # opens one by its index; None where there is none
    kept: dict[int, Image.Image] = field(repr=False, default_factory=dict)  # small ones that were decoded before

    def __len__(self) -> int:
        return len(self.labels)

    def key(self, index: int) -> str:
        """Return the name of a picture in its source.

        Args:
            index: Of the picture.
        """
        return self.keys[index]

    def digest(self) -> str:
        """Return the SHA-256, as hex, of the names and classes of the pictures, without their pixels."""
        names = "\n".join([*self.class_names, "", *self.keys])
        digest = hashlib.sha256(names.encode(errors="surrogateescape"))
        digest.update(np.ascontiguousarray(self.labels).tobytes())
        return digest.hexdigest()

    def labelled_as(self, class_names: Sequence[str]) -> Self:
        """Label the same pictures by places in a list of classes.

        Args:
            class_names: All classes; pictures may lack some.

        Raises:
            DataError: If they are of a class that is not among the names.
        """
        if self.class_names == tuple(class_names):
            return self
        places = {name: place for place, name in enumerate(class_names)}
        present = [self.class_names[label] for label in np.unique(self.labels)]
        if unknown := [name for name in present if name not in places]:
            raise DataError(
                f"{self.name} has pictures of class {unknown[0]!r}, which is none of the run's {len(places)}: "
                f"{suggestion(unknown[0], places)}; name its folder as the run does, or leave it out"
            )
        moved = np.array([places.get(name, -1) for name in self.class_names], dtype=np.int64)
        return replace(self, labels=moved[self.labels], class_names=tuple(class_names))

    def photograph(self, index: int) -> Image.Image:
        """Decode a picture, and keep it if it is small: do not change it in place.

        Args:
            index: Of the picture.
        """
        photograph = self.kept.get(index)
        if photograph is None:
            photograph = self.decode(index)
            if photograph.width * photograph.height * BYTES_PER_PIXEL <= KEPT_BYTES // len(self):
                self.kept[index] = photograph
        return photograph

    def decode(self, index: int) -> Image.Image:
        """Read a picture and decode it, in RGB with 8 bits per channel.

        Args:
            index: Of the picture.

        Raises:
            DataError: If it is damaged, gone, or of a mode without a fixed range of values.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is odd in a picture that can be read is nobody's business
                opened = self.read(index)
                if opened is None:
                    raise DataError(f"{self.name} has no picture in row {self.key(index)}")
                with opened:
                    return to_rgb(opened)
        except DataError:
            raise
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise DataError(f"{self.key(index)} in {self.name} cannot be read as a picture: {reason}") from error


@dataclass(frozen=True)
class PictureEntry:
    """A selected picture, without its pixels until they are needed."""

    name: str
    label: int
    sha256: str  # of its pixels as the model sees them


class PictureSource(Protocol):
    """A source of named pictures that are read one at a time."""

    def names(self) -> Sequence[str]:
        """List every name, in an order that never changes."""

    def load(self, name: str) -> LabelledPicture:
        """Read a picture; DataError if it cannot be read.

        Args:
            name: Of the picture.
        """


def to_image(photograph: Image.Image, size: int, *, crop_share: float = CROP_SHARE) -> Tensor:
    """Resize (bicubic), crop the centre to a share of the shorter side, convert to RGB.

    Args:
        photograph: Of any size and mode.
        size: Pixels per side.
        crop_share: Share of the shorter side that is kept, in (0, 1].

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


def open_picture(file: Path | BytesIO) -> Image.Image:
    """Open an encoded picture of a known format, whatever its name ends in; of an animation, the first frame.

    Args:
        file: Its path or its content.

    Raises:
        OSError: If it is no file, or none of these formats.
        ValueError: If its size would take memory or time out of all proportion.
    """
    if isinstance(file, Path):
        require_regular(file)
    picture = Image.open(file, formats=FORMATS)
    shorter, longer = sorted(picture.size)
    if shorter * longer > MOST_PIXELS or longer > LONGEST * shorter:
        picture.close()
        raise ValueError(
            f"{picture.width} x {picture.height} pixels are too many or too narrow: at most {MOST_PIXELS:,} are read, "
            f"and sides that differ by a factor of {LONGEST}"
        )
    return picture


def to_rgb(photograph: Image.Image) -> Image.Image:
    """Convert to three channels of 8 bits, turned as the EXIF data say.

    Args:
        photograph: Of any mode.

    Raises:
        ValueError: If the mode has no fixed range of values.
    """
    if photograph.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        photograph = ImageOps.exif_transpose(photograph)
    if photograph.mode.startswith("I;16") or (photograph.mode, photograph.format) == ("I", "PPM"):
        # Pillow scales deep PGM files to 16 bits whatever their maximum, but leaves TIFF files of 12 bits as they are.
        bits = getattr(photograph, "tag_v2", {}).get(TiffImagePlugin.BITSPERSAMPLE, (16,))[0]
        grey = np.asarray(photograph, dtype=np.float64) / (2**bits - 1)
        return Image.fromarray((grey * 255).round().astype(np.uint8)).convert("RGB")
    if photograph.mode in ("I", "F"):
        raise ValueError(f"mode {photograph.mode!r} has no fixed range; save it with 8 or 16 bits")
    return photograph.convert("RGB")
