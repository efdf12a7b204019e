"""The pictures that a run wrote into its folder, with the ledger by which alone they are deleted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from fedmjp.errors import OutputError
from fedmjp.files import HALF_WRITTEN, path_within, remove_files, replacing, require_regular

if TYPE_CHECKING:
    from torch import Tensor

FOLDER, LEDGER = "pictures", "pictures.jsonl"


class PictureFolder:
    """The folder of a run's originals and reconstructions.

    A name is in the ledger, a JSON line each, before its file is written: whatever else lies in the folder is not ours.

    Args:
        root: Folder of the results.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = root / FOLDER
        self.ledger = root / LEDGER  # with the names of all files that were written and not deleted
        self._names: dict[str, None] = {}  # that were read so far, in order
        self._offset = 0  # up to which byte of the ledger

    def path(self, name: str) -> Path:
        """Return the path of a file.

        Args:
            name: Of the file in the folder.

        Raises:
            OutputError: If it leads out of the folder, or through a link.
        """
        return path_within(self._root, f"{FOLDER}/{name}")

    def save(self, pictures: Mapping[str, bytes]) -> None:
        """Write PNG files, each whole or not at all.

        Args:
            pictures: Content by the name of each file.

        Raises:
            OutputError: If they cannot be written, or a name leads out of the folder.
        """
        if not pictures:
            return
        paths = {self.path(name): content for name, content in pictures.items()}
        try:
            with self.ledger.open("a", encoding="utf-8") as file:
                # A killed run may have left half a line, which stays one of its own.
                file.write("\n" + "".join(f"{json.dumps(name)}\n" for name in pictures))
        except OSError as error:
            raise _not_written(self.ledger, error) from None
        for path, content in paths.items():
            save_png(content, path)

    def names(self) -> list[str]:
        """List the files that the ledger names.

        Raises:
            OutputError: If it cannot be read.
        """
        if not os.path.lexists(self.ledger):
            return []
        try:
            require_regular(self.ledger)
            with self.ledger.open("rb") as file:
                file.seek(self._offset)  # others than this object only append
                content = file.read()
        except OSError as error:
            raise OutputError(f"{self.ledger} cannot be read: {error.strerror or error}; move it elsewhere") from None
        self._offset += len(content)
        for line in content.splitlines():
            with suppress(ValueError, RecursionError):
                name = json.loads(line)
                if isinstance(name, str):
                    self._names[name] = None
        return list(self._names)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files that the ledger names; pass over all others.

        Args:
            names: Of the files.

        Raises:
            OutputError: If the ledger was changed, and names what lies elsewhere.
        """
        self.names()
        for name in names:
            if name in self._names:
                self.path(name).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Delete what killed runs left half written, and folders that are empty; shorten the ledger to what is left."""
        remove_files(self.folder, HALF_WRITTEN)
        remaining = [name for name in self.names() if os.path.lexists(self.path(name))]
        if remaining:
            with replacing(self.ledger) as partial:
                partial.write_text("".join(f"{json.dumps(name)}\n" for name in remaining), encoding="utf-8")
        else:
            self.ledger.unlink(missing_ok=True)
        self._names, self._offset = {}, 0

    def clear(self) -> None:
        """Delete all files that the ledger names."""
        self.delete(self.names())
        self.tidy()


def save_png(content: bytes, path: Path) -> None:
    """Write the content of a PNG file, whole or not at all.

    Args:
        content: Of the file.
        path: Its name; folders are made.

    Raises:
        OutputError: If it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise _not_written(path, error) from None


def png_of(image: Tensor) -> bytes:
    """Encode an image as 8-bit PNG.

    Args:
        image: (3, height, width) in [0, 1].
    """
    content = BytesIO()
    pixels = (image * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    Image.fromarray(pixels).save(content, format="PNG")
    return content.getvalue()


def load_png(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read a PNG as (height, width, 3) uint8.

    Args:
        path: The file.
    """
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _not_written(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{path} cannot be written: {error.strerror or error}; finished trials are kept, make room and run again"
    )
