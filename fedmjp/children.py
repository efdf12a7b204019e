"""Processes that this one starts for a while."""

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def workers(processes: int) -> ProcessPoolExecutor:
    """A pool of new processes, which end with this one, whatever ends it."""
    spawn = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
    return ProcessPoolExecutor(processes, mp_context=spawn, initializer=end_with_parent)


def end_with_parent() -> None:
    """In a process that ``multiprocessing`` started: end as soon as its parent has ended, whatever is at work."""
    threading.Thread(target=_end_after_parent, daemon=True).start()


def _end_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
