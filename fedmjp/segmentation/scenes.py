"""Pictures and annotations in the layout of ADE20K's scene parsing benchmark (ADEChallengeData2016)."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedmjp.data.layout import pictures_in
from fedmjp.data.pictures import open_picture, to_rgb
from fedmjp.errors import DataError, suggestion

Split = Literal["training", "validation"]
CLASSES = 150
IGNORED = 255  # label of what no class is: 0 in the files, "other"
NAMES = "objectInfo150.txt"  # tab-separated, the last column has the names
WHERE = "(fedmjp does not ship ADE20K: it is ADEChallengeData2016.zip of the MIT Scene Parsing Benchmark)"


@dataclass(frozen=True)
class Scenes:
    """The pictures of a split, and what every pixel of them is."""

    root: Path
    split: Split
    names: tuple[str, ...]  # without endings, sorted
    ending: str  # of pictures; annotations are PNG

    def __len__(self) -> int:
        return len(self.names)

    def digest(self) -> str:
        """SHA-256 of the names, as hex."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()

    def load(self, index: int) -> tuple[Tensor, Tensor]:
        """A picture (3, height, width) uint8, and its labels (height, width) uint8: 0 to 149, or ``IGNORED``.

        Raises:
            DataError: If one cannot be read, their sizes differ, or the annotation holds what is no class.
        """
        name = self.names[index]
        picture, annotation = self._place("images", name + self.ending), self._place("annotations", f"{name}.png")
        image = torch.from_numpy(np.array(to_rgb(_opened(picture)))).permute(2, 0, 1)
        values = np.array(_opened(annotation))
        if values.ndim != 2 or values.dtype.kind not in "bui":
            raise DataError(
                f"{annotation} has {values.shape[2:] or values.dtype} per pixel: one whole number is a class"
            )
        if values.shape != tuple(image.shape[1:]):
            sizes = " x ".join(map(str, values.shape[::-1])), " x ".join(map(str, reversed(image.shape[1:])))
            raise DataError(f"{annotation} is {sizes[0]} pixels, its picture {sizes[1]}")
        if values.max(initial=0) > CLASSES:
            raise DataError(
                f"{annotation} holds the value {values.max()}: classes are 1 to {CLASSES}, and 0 is none of them"
            )
        labels = torch.from_numpy(values.astype(np.uint8))
        return image, torch.where(labels == 0, IGNORED, labels - 1)

    def class_names(self) -> list[str]:
        """What the classes are called, in the order of the labels; their numbers where the folder does not say."""
        try:
            lines = (self.root / NAMES).read_text(encoding="utf-8").splitlines()[1:]
        except (OSError, ValueError):
            lines = []
        names = [line.split("\t")[-1].strip() for line in lines]
        return names if len(names) == CLASSES else [str(number + 1) for number in range(CLASSES)]

    def _place(self, kind: str, file: str) -> Path:
        return self.root / kind / self.split / file


def open_scenes(root: Path, split: Split) -> Scenes:
    """The pictures of a split that have annotations.

    Raises:
        DataError: If the folder has another layout, or a picture or an annotation lacks the other.
    """
    for part in (root, *(root / kind / split for kind in ("images", "annotations"))):
        if not part.is_dir():
            raise DataError(f"there is no folder {part} {WHERE}: {_hint(root, split)}")
    files = [Path(name) for name in pictures_in(root / "images" / split)]
    stems = {file.stem for file in files}
    labelled = {Path(name).stem for name in pictures_in(root / "annotations" / split)}
    if not stems:
        raise DataError(f"{root / 'images' / split} holds no picture {WHERE}")
    if lone := min(stems ^ labelled, default=None):
        kind = "picture" if lone in stems else "annotation"
        raise DataError(
            f"the {kind} {lone} of {root.name}, {split}, has no {_OTHER[kind]}; {len(stems ^ labelled)} lack one"
        )
    endings = {file.suffix for file in files}
    if len(endings) > 1:
        raise DataError(f"{root / 'images' / split} holds {' and '.join(sorted(endings))}: pictures have one ending")
    return Scenes(root, split, tuple(sorted(stems)), endings.pop())


_OTHER = {"picture": "annotation", "annotation": "picture"}


def _hint(root: Path, split: str) -> str:
    """Where the folder that was meant may be."""
    if not root.is_dir():
        near = [path.name for path in root.absolute().parent.iterdir()] if root.absolute().parent.is_dir() else []
        return suggestion(root.name, near)
    for below in sorted(path for path in root.iterdir() if path.is_dir()):
        if (below / "images" / split).is_dir():
            return f"did you mean {below}?"
    return f"its layout is images/{split} and annotations/{split}"


def _opened(path: Path) -> Image.Image:
    try:
        picture = open_picture(path)
        picture.load()
    except (OSError, ValueError, SyntaxError) as error:  # Pillow's for a damaged PNG is the last
        raise DataError(f"{path} cannot be read: {error}") from None
    return picture
