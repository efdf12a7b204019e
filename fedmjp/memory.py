"""Memory that a process has freed and the C library still holds."""

import ctypes
from functools import cache
from typing import Any


def return_free_memory() -> None:
    """Give it back to the system; nothing where the C library cannot.

    Uploads and attacks take and free hundreds of megabytes in pieces of all sizes. glibc keeps what lies between pieces
    that stay, and a worker would grow by a gigabyte in an hour.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
