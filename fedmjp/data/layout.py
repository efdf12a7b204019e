"""How folders of pictures are laid out: class folders, split folders, parquet files."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation"]

SPLIT_FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train",), "validation": ("val", "validation")}
HUB = "hub:"  # begins the name of a data set of the hub
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".avif", ".pgm", ".ppm", ".tif", ".tiff"}
)
# Folders that systems leave beside pictures: of macOS's archives, Synology's thumbnails and bin, Windows, ext4.
SYSTEM_FOLDERS = frozenset(
    {"__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found"}
)


def parquet_files(folder: Path, split: Split) -> list[str]:
    """List the parquet files of a split in the order of their names.

    They are called ``SPLIT.parquet``, or ``SPLIT-00000-of-00010.parquet`` and so on, in the folder or
    in its ``data`` folder, where the hub has them.

    Args:
        folder: Of the data set.
        split: train or validation.
    """
    patterns = (f"{split}.parquet", f"{split}-*-of-*.parquet")
    for place in (folder, folder / "data"):
        files = sorted(str(path) for pattern in patterns for path in place.glob(pattern))
        if files:
            return files
    return []


def split_folders(folder: Path) -> dict[Split, Path]:
    """Map each split to the folder of its class folders.

    Args:
        folder: Of the data set.

    Returns:
        An empty mapping if the class folders are in ``folder`` itself.
    """
    return {
        split: folder / name
        for split, names in SPLIT_FOLDERS.items()
        for name in names
        if (folder / name).is_dir() and any(_subfolders(folder / name))
    }


def class_folders(folder: Path) -> list[str]:
    """List the names of the folders that hold a picture, sorted; hidden ones and those of a system are no classes.

    Args:
        folder: Whose folders are looked at.
    """
    return sorted(name for name in _subfolders(folder) if next(pictures_in(folder / name), None) is not None)


def pictures_in(folder: Path) -> Iterator[str]:
    """Iterate over the picture files below a folder, in no order, by their paths in it; hidden ones are left out.

    Args:
        folder: Whose files are looked at, and those of the folders in it.
    """
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            if os.path.splitext(entry.name)[1].lower() in SUFFIXES:  # noqa: PTH122 (a million times)
                yield entry.name
            elif entry.is_dir(follow_symlinks=False):  # a link may lead back up
                folders.append(entry.name)
    for name in folders:
        yield from (f"{name}/{picture}" for picture in pictures_in(folder / name))


def _subfolders(folder: Path) -> Iterator[str]:
    return (path.name for path in folder.iterdir() if path.is_dir() and not _is_hidden(path.name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS
