"""Files that are replaced whole or not at all, opened only where that cannot wait, and deleted by name alone."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from fedmjp.errors import OutputError

PARTIAL = ".partial"  # how the names of files end that are not whole yet
HALF_WRITTEN = r"\.[0-9a-f]{32}\.partial"  # such a name, as ``replacing`` draws it
SQLITE = ("", "-wal", "-shm", "-journal")  # ends of the names of a database's files
NO_FILE = "Is a pipe, socket or device, not a file"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the name of a file to write, which then takes the place of ``path``; a failure leaves nothing.

    Several processes may write the same path. A killed one leaves its partial file.

    Args:
        path: Of the whole file, in a folder that exists.
    """
    partial = path.with_name(f".{uuid4().hex}{PARTIAL}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def require_regular(path: Path) -> None:
    """Refuse what may never end when it is read.

    Args:
        path: Of a file or folder.

    Raises:
        OSError: If there is nothing, nothing that may be read, or something that is neither a file nor a folder.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, NO_FILE, str(path))
    if not os.access(path, os.R_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def read_file(path: Path, largest: int) -> bytes:
    """Read a file that may not be too large.

    Args:
        path: Of the file.
        largest: Bytes that it may have.

    Raises:
        OSError: If it is larger, or cannot be read.
    """
    require_regular(path)
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"Is larger than the {largest:,} bytes that are read", str(path))
    return content


def path_within(folder: Path, name: str) -> Path:
    """Return the path of a name in a folder, of which nothing below the folder is a link.

    Args:
        folder: Any.
        name: Relative, with slashes; from a file, a database or another machine.

    Raises:
        OutputError: If the name leads elsewhere.
    """
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise OutputError(f"{name[:100]!r} is no name of a file in {folder}: somebody changed what names it")
    path = folder
    for part in parts:
        path /= part
        require_no_link(path)
    return path


def require_no_link(path: Path) -> None:
    """Refuse a link, so that nothing is written or deleted where it leads.

    Args:
        path: Of a file or folder that may be missing.

    Raises:
        OutputError: If it is a link.
    """
    if path.is_symlink():
        raise OutputError(f"{path} is a link, and fedmjp writes and deletes nothing through one: remove the link")


def find_link(folder: Path) -> Path | None:
    """Find a link in a folder, or in those below; None where there is none.

    Args:
        folder: Any.
    """
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if (path := Path(parent, name)).is_symlink():
                return path
    return None


def remove_files(folder: Path, names: str) -> None:
    """Delete the files in a folder, and in those below, that have certain names; then the folders that are empty.

    Links are neither followed nor deleted.

    Args:
        folder: May be missing.
        names: Pattern (regular expression) of whole file names.
    """
    if folder.is_symlink():
        return
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            path = Path(parent, name)
            if re.fullmatch(names, name) and stat.S_ISREG(path.lstat().st_mode):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # what lies there is not ours
            Path(parent).rmdir()
