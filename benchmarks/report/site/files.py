"""Files beside a README that its page shows or links to, copied beside the page."""

import shutil
from pathlib import Path

from PIL import Image

from fedmjp.benchmarks.report.site.folders import unique

TEXTS = (".csv", ".json", ".txt")
PICTURES = (".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp")
LARGE = 300_000  # bytes
WIDTH = 1600  # pixels; twice as many as a page shows


def copy_text(path: Path, source: Path, target: Path) -> str | None:
    """Copy a text from one folder to another; its name there, or None if it is none of that folder."""
    if path.suffix not in TEXTS or not _lies_in(path, source):
        return None
    name = _name(path, source)
    shutil.copyfile(path, target / name)
    return name


def copy_picture(path: Path, source: Path, target: Path) -> str | None:
    """Copy a picture from one folder to another; its name there, or None if it is none of that folder.

    Large ones lose what nobody sees at the width of a page.
    """
    if path.suffix.lower() not in PICTURES or not _lies_in(path, source):
        return None
    name = _name(path, source)
    if path.suffix != ".svg" and path.stat().st_size > LARGE:
        name += ".webp"
        try:
            with Image.open(path) as picture:
                picture.thumbnail((WIDTH, 16 * WIDTH))
                picture.convert("RGBA").save(target / name, quality=85)
        except (OSError, ValueError, Image.DecompressionBombError):
            return None
    else:
        shutil.copyfile(path, target / name)
    return name


def _lies_in(path: Path, source: Path) -> bool:
    return path.is_file() and path.is_relative_to(source)


def _name(path: Path, source: Path) -> str:
    """What it is called where all files lie in one folder; none of ours begins so."""
    return unique("-".join(["readme", *path.relative_to(source).parts]), ())
