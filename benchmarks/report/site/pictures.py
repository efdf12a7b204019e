"""Figures of a README beside a page: as they are, or smaller where a phone would wait for them."""

import shutil
from pathlib import Path

from PIL import Image, UnidentifiedImageError

SHOWN = (".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp")
LARGE = 300_000  # bytes
WIDTH = 1600  # pixels; twice as many as a page shows


def copy_picture(path: Path, folder: Path) -> str | None:
    """Copy a picture into a folder; its name there, or None if it is none.

    Large ones lose what nobody sees at the width of a page.
    """
    if path.suffix.lower() not in SHOWN or not path.is_file():
        return None
    if path.suffix.lower() == ".svg" or path.stat().st_size <= LARGE:
        shutil.copyfile(path, folder / path.name)
        return path.name
    try:
        with Image.open(path) as picture:
            picture.thumbnail((WIDTH, 16 * WIDTH))
            picture.convert("RGBA").save(folder / f"{path.stem}.webp", quality=85)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        return None
    return f"{path.stem}.webp"
