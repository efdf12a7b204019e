"""Files that others name: opened only where opening them cannot wait, and read only up to a size."""

import errno
import os
import stat
from pathlib import Path

NO_FILE = "Is a pipe, socket or device, not a file"


def require_regular(path: Path) -> None:
    """Refuse what may never end when it is read.

    Raises:
        OSError: If there is nothing, nothing that may be read, or something that is neither a file nor a folder.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, NO_FILE, str(path))
    if not os.access(path, os.R_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def read_file(path: Path, largest: int) -> bytes:
    """The content of a file of at most ``largest`` bytes; OSError if it is greater, or cannot be read."""
    require_regular(path)
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"Is larger than the {largest:,} bytes that are read", str(path))
    return content
