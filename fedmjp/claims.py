"""Folders of results that this process has claimed: marked as ours, locked, and free of links."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fedmjp.errors import OutputError, OutputGoneError
from fedmjp.files import find_link

MARK = ".fedmjp"
_LOCKS: dict[Path, TextIO] = {}  # open for the rest of the process, which is what keeps a folder locked


def claim_folder(folder: Path) -> None:
    """Make a folder and mark it as ours: what fedmjp wrote in it may be replaced.

    The mark stays locked until this process ends, so that two runs never share a folder.

    Args:
        folder: Made if it is not there.

    Raises:
        OutputError: If it cannot be written, holds a link, or files and no mark, or another run is using it.
    """
    mark = folder / MARK
    if not is_gone(folder) and mark.resolve() in _LOCKS:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(folder.iterdir()):
            raise OutputError(f"{folder} holds files that are not from fedmjp; name another --output")
        if link := find_link(folder):
            raise OutputError(
                f"{link} is a link, and fedmjp writes and deletes nothing through one: move the link elsewhere, or "
                "name another --output"
            )
        handle = mark.open("a+")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another run is writing to {folder}; wait for it or name another --output") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{folder} cannot be written: {reason}; name another --output") from None
    if not mark.stat().st_size:
        handle.write("fedmjp writes this folder and may replace what it wrote here.\n")
        handle.flush()
    _LOCKS[mark.resolve()] = handle


def is_gone(folder: Path) -> bool:
    """Tell whether a folder that this process claimed was removed, moved or replaced since.

    Args:
        folder: Any; one that was not claimed is not gone.
    """
    mark = folder / MARK
    handle = _LOCKS.get(mark.resolve())
    if handle is None:
        return False
    try:
        return not os.path.samestat(mark.stat(), os.fstat(handle.fileno()))
    except OSError:
        return True


@contextmanager
def watched_folder(folder: Path, kept: str) -> Iterator[None]:
    """Watch over a folder that this process claimed: whatever fails because it went away is told as that.

    Args:
        folder: Of the results.
        kept: What is kept then, and what to do, as the message ends.

    Raises:
        OutputGoneError: If it was removed, moved or replaced.
    """
    try:
        yield
    except OutputGoneError:
        raise
    except Exception:
        if not is_gone(folder):
            raise
    if is_gone(folder):
        raise OutputGoneError(
            f"{folder} was removed, moved or replaced while the command wrote to it; {kept}"
        ) from None


def is_claimed_elsewhere(folder: Path) -> bool:
    """Tell whether another process is writing to a folder.

    Args:
        folder: Any.
    """
    try:
        with (folder / MARK).open() as mark:
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
