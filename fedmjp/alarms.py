"""Ending work in this thread when its time is over, but never in the midst of an import."""

import signal
from collections.abc import Callable
from types import FrameType

AGAIN = 0.05  # seconds after which an alarm within an import rings again
IMPORTING = "<frozen importlib"


def raising(error: type[BaseException], timer: int) -> Callable[[int, FrameType | None], None]:
    """A handler of a timer's signal that raises an error, or rings again soon where a module is being imported.

    A module whose import breaks off is gone, but not those that it had imported. Imported again, it would lack them,
    and whatever needs it would fail for as long as the process lives.
    """

    def ring(_signal: int, frame: FrameType | None) -> None:
        if _importing(frame):
            signal.setitimer(timer, AGAIN)
            return
        raise error

    return ring


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTING):
            return True
        frame = frame.f_back
    return False
