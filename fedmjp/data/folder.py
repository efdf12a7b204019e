"""An image folder: ``FOLDER/CLASS/picture``, as torchvision and ImageNet have it."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from fedmjp.data.pictures import LabelledPicture, to_image
from fedmjp.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"})


class FolderPictures:
    """The pictures of an image folder; a label is the rank of its class folder's name.

    Args:
        folder: ``FOLDER/CLASS/picture``.
        size: Pixels per side of the pictures it gives.
        classes: Classes that the model knows.

    Raises:
        DataError: If the folder is missing, holds no picture in class folders, or has more classes
            than the model.
    """

    def __init__(self, folder: Path, size: int, classes: int) -> None:
        if not folder.is_dir():
            raise DataError(f"there is no folder {folder}")
        self._folder, self._size = folder, size
        self._names = sorted(
            str(path.relative_to(folder)) for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES
        )
        if not self._names:
            raise DataError(
                f"{folder} holds no picture; expected FOLDER/CLASS/picture with {', '.join(sorted(SUFFIXES))}"
            )
        self._labels = {name: rank for rank, name in enumerate(sorted({name.split("/")[0] for name in self._names}))}
        if len(self._labels) > classes:
            raise DataError(f"{folder} has {len(self._labels)} classes, but the model knows {classes}")

    def names(self) -> Sequence[str]:
        """Paths relative to the folder, sorted."""
        return self._names

    def load(self, name: str) -> LabelledPicture:
        """Read one picture; DataError if the file is damaged."""
        if not _is_text(name):
            raise DataError(f"the file name {name!a} is not valid text")
        try:
            with Image.open(self._folder / name) as photograph:
                image = to_image(photograph, self._size)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{self._folder / name} cannot be read as a picture: {error}") from error
        return LabelledPicture(name, image, self._labels[name.split("/", maxsplit=1)[0]])


def _is_text(name: str) -> bool:
    """Whether a file name can be written down (names on disk are bytes, not always of any text)."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
