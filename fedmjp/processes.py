"""Processes: pools that end with their parent, deadlines of work, and memory that goes back to the system."""

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import FrameType

AGAIN = 0.05  # seconds after which an alarm within an import rings again
IMPORTING = "<frozen importlib"


def workers(processes: int) -> ProcessPoolExecutor:
    """Start a pool of new processes, which end with this one, whatever ends it.

    Args:
        processes: How many.
    """
    spawn = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
    return ProcessPoolExecutor(processes, mp_context=spawn, initializer=end_with_parent)


def end_with_parent() -> None:
    """End a process that ``multiprocessing`` started as soon as its parent has ended, whatever is at work."""
    threading.Thread(target=_end_after_parent, daemon=True).start()


def _end_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def raise_on_alarm(error: type[BaseException], timer: int) -> Callable[[int, FrameType | None], None]:
    """Make the handler of a timer's signal that raises an error, or rings again soon during an import.

    A module whose import breaks off is gone, but not those that it had imported. Imported again, it would lack them,
    and whatever needs it would fail for as long as the process lives.

    Args:
        error: What to raise in this thread.
        timer: Of ``signal.setitimer``, such as ``signal.ITIMER_REAL``.
    """

    def ring(_signal: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            signal.setitimer(timer, AGAIN)
            return
        raise error

    return ring


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTING):
            return True
        frame = frame.f_back
    return False


def return_free_memory() -> None:
    """Give memory that was freed back to the system, where the C library can.

    Uploads and attacks take and free hundreds of megabytes in pieces of all sizes. glibc keeps what lies between pieces
    that stay, and a worker would grow by a gigabyte in an hour.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
