"""Files beside a README that its page shows or links to, copied beside the page."""

import shutil
from pathlib import Path

from PIL import Image

from fedmjp.benchmarks.report.site.folders import unique_name
from fedmjp.benchmarks.report.site.vector import is_still

TEXTS = (".csv", ".json", ".txt")
PICTURES = (".gif", ".jpeg", ".jpg", ".png", ".svg", ".webp")
LARGE = 300_000  # bytes
WIDTH = 1600  # pixels; twice as many as a page shows


def copy_text(path: Path, source: Path, target: Path) -> str | None:
    """Copy a text file from a study's folder into its page's folder.

    Args:
        path: The file.
        source: Folder of the study.
        target: Folder of the page.

    Returns:
        Name of the copy; None if the file is no text or lies outside the study's folder.
    """
    if path.suffix not in TEXTS or not _lies_in(path, source):
        return None
    name = _name_copy(path, source)
    shutil.copyfile(path, target / name)
    return name


def copy_picture(path: Path, source: Path, target: Path) -> str | None:
    """Copy a picture from a study's folder into its page's folder, shrunk to ``WIDTH`` pixels if it is large.

    Args:
        path: The file.
        source: Folder of the study.
        target: Folder of the page.

    Returns:
        Name of the copy; None if the file is no readable picture, an SVG that runs or loads something, or lies outside
        the study's folder.
    """
    if path.suffix.lower() not in PICTURES or not _lies_in(path, source):
        return None
    is_vector = path.suffix.lower() == ".svg"
    if is_vector and not is_still(path):
        return None
    name = _name_copy(path, source)
    if not is_vector and path.stat().st_size > LARGE:
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


def _name_copy(path: Path, source: Path) -> str:
    """Name the copy of a file; the prefix keeps it apart from the files of the site itself."""
    return unique_name("-".join(["readme", *path.relative_to(source).parts]), ())
