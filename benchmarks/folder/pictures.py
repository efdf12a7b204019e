"""Pictures on disk: originals and reconstructions as PNG, for figures and for people."""

from __future__ import annotations

import hashlib
import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from fedmjp.benchmarks.plan.cells import Cell
from fedmjp.defences.pipeline import NONE
from fedmjp.errors import OutputError
from fedmjp.files import replacing
from fedmjp.settings import Picture

if TYPE_CHECKING:
    from torch import Tensor


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


def folder_of(cell: Cell) -> str:
    """Name the folder of a cell's reconstructions; settings b and c share uploads, so they share it.

    Args:
        cell: Of a plan.
    """
    # Options of attacks and defences hold anything, hence the digest.
    configured = [cell.attack, *(config.text for config in cell.defences)]
    digest = hashlib.sha256(json.dumps(configured).encode()).hexdigest()[:8]
    names = "+".join(config.name for config in cell.defences) or NONE
    return f"{cell.model}-{names}-{cell.attack.split()[0]}-{digest}-{cell.setting.gradient_of}"


def files_in(folder: str, stem: str) -> dict[str, str]:
    """Name the files of a trial: its ``clean`` and ``shuffled`` picture and its ``reconstruction``.

    Args:
        folder: As ``folder_of`` names it.
        stem: Of the trial.
    """
    private = {str(version): f"{stem}-{version}.png" for version in Picture}
    return {**private, "reconstruction": f"{folder}/{stem}.png"}
