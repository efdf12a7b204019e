"""Labelled photographs of a source, read one at a time."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from PIL import Image

from fedmjp.data.pictures import to_rgb
from fedmjp.errors import DataError, suggestion

HUB = "hub:"  # begins the name of a data set of the hub
# Decoded pictures are kept where all of the data set would fit; 100,000 of 64 x 64 do.
KEPT_BYTES = 2 * 2**30
BYTES_PER_PIXEL = 4  # of Pillow's RGB


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
