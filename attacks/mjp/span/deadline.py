"""When to stop."""

import time


class Deadline:
    """Some seconds of work from now.

    They are those of this thread on the processor: what it takes on a machine with nothing else to do. So
    another job on the machine changes no result.

    Args:
        seconds: Until it has passed.
    """

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.thread_time(), seconds

    @property
    def passed(self) -> bool:
        """Whether the time is over."""
        return self.spent > self._seconds

    @property
    def spent(self) -> float:
        """Seconds of work so far."""
        return time.thread_time() - self._start
