"""Files that are replaced whole or not at all, and opened only where that cannot wait."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

PARTIAL = ".partial"  # how the names of files end that are not whole yet
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
