"""The folder that a run writes into."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from PIL import Image

from fedmjp.errors import OutputError
from fedmjp.files import replacing

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.benchmarks.federation.simulation import RunFolder
    from fedmjp.benchmarks.folder.store import Store

MARK = ".fedmjp"
OF_AN_ATTACK = ("scores.csv", "reconstructions.jpg")
_LOCKS: dict[Path, TextIO] = {}  # open for the rest of the process, which is what keeps a folder locked


@dataclass(frozen=True)
class OutputFolder:
    """Names of what lies in it."""

    root: Path

    @property
    def database(self) -> Path:
        """Return the file of trials."""
        return self.root / "trials.sqlite"

    def store(self, database: str = "") -> Store:
        """Open the trials.

        Args:
            database: URL; the folder's own file if empty.
        """
        from fedmjp.benchmarks.folder.store import Store  # noqa: PLC0415 (an attack does without a database)

        return Store.open(database) if database else Store.at(self.database)

    @property
    def pictures(self) -> Path:
        """Return the folder of originals and reconstructions."""
        return self.root / "pictures"

    @property
    def run(self) -> RunFolder:
        """Return the records of the federated run, which go when no trial needs them any more."""
        from fedmjp.benchmarks.federation.simulation import RunFolder  # noqa: PLC0415 (it brings torch)

        return RunFolder(self.root / "run")

    def save(self, pictures: Mapping[str, bytes]) -> None:
        """Write PNG files into the folder of pictures.

        Args:
            pictures: Content by the name of each file.

        Raises:
            OutputError: If they cannot be written.
        """
        for name, content in pictures.items():
            save_png(content, self.pictures / name)

    def in_use(self) -> bool:
        """Tell whether a run is writing to the folder."""
        try:
            with (self.root / MARK).open() as mark:
                fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def prepare(self, *, fresh: bool) -> None:
        """Make the folder ours.

        Args:
            fresh: Whether to empty it of what a former run of ours left.

        Raises:
            OutputError: If it cannot be written, or holds what is not ours.
        """
        claim_folder(self.root)
        if fresh:
            for pattern in (f"{self.database.name}*", *OF_AN_ATTACK):
                for file in self.root.glob(pattern):
                    file.unlink()
            for folder in (self.pictures, self.run.root):
                if folder.exists():
                    shutil.rmtree(folder)


def claim_folder(folder: Path) -> None:
    """Make a folder and mark it as ours: what is in it may be replaced.

    The mark stays locked until this process ends, so that two runs never share a folder.

    Args:
        folder: Made if it is not there.

    Raises:
        OutputError: If it cannot be written, holds files and no mark, or another run is using it.
    """
    mark = folder / MARK
    if mark.exists() and mark.resolve() in _LOCKS:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(folder.iterdir()):
            raise OutputError(f"{folder} holds files that are not from fedmjp; name another --output")
        handle = mark.open("a+")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another run is writing to {folder}; wait for it or name another --output") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{folder} cannot be written: {reason}; name another --output") from None
    if not mark.stat().st_size:
        handle.write("fedmjp writes this folder and may replace what is in it.\n")
        handle.flush()
    _LOCKS[mark.resolve()] = handle


def write_text(path: Path, content: str) -> None:
    """Write a text file, whole or not at all.

    Args:
        path: The file.
        content: Its text.
    """
    with replacing(path) as partial:
        partial.write_text(content, encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON, whole or not at all.

    Args:
        path: The file.
        content: Its values.
    """
    write_text(path, json.dumps(content, indent=2) + "\n")


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
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}; finished trials are kept, make room and run again"
        ) from None


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
