"""Follow a run of our Flower app by its events, and by Flower's word on whether it has ended."""

import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

import click

from fedmjp.benchmarks.federation.connection import Connection
from fedmjp.errors import KILLED, OUT_OF_MEMORY, FederationError, FedmjpError, QuorumError, out_of_memory
from fedmjp.server.events import Event, EventReader

COMPLETED = "finished:completed"
GRACE = 60.0  # seconds that a run's processes may take to end after the app's last event; one that hangs never does
EVENT_SECONDS = 0.1  # between two looks at the events
POLL_SECONDS = 1.0  # between two questions to Flower
TAIL_BYTES, TAIL_LINES = 100_000, 4  # of the log: Flower explains an error below it, in three lines
RAY_DEATH = re.compile(r"The actor (is dead|died|never ran)\b.*")  # Ray tells at length what may have been


class RunWatch:
    """The state of a run by its events.

    Args:
        events: Of the run.
        on_event: Called with every event.
    """

    def __init__(self, events: EventReader, on_event: Callable[[Event], None]) -> None:
        self._events, self._on_event = events, on_event
        self._last: Event | None = None
        self._ended = 0.0
        self._refusals: deque[str] = deque(maxlen=200)

    @property
    def is_overdue(self) -> bool:
        """Tell whether the run should have ended: its app did, a while ago."""
        return self._last is not None and time.monotonic() - self._ended > GRACE

    def read(self) -> None:
        """Read the events since the last call, and hand them on."""
        for event in self._events.read():
            self._on_event(event)
            if event.kind == "update refused":
                self._refusals.append(str(event.values.get("reason")))
            elif event.kind in ("error", "end"):
                self._last, self._ended = event, time.monotonic()

    @property
    def is_played(self) -> bool:
        """Tell whether the app came to its end without an error."""
        return self._last is not None and self._last.kind == "end"

    def error(self, log_end: str) -> FederationError:
        """Return the error that a run failed of, in plain words where Ray's or torch's are none.

        Args:
            log_end: The last lines of Flower's log, which are quoted where the app wrote no error.
        """
        if self._last is None or self.is_played:
            return FederationError(f"the server's app ended without an error; the end of its log: {log_end}")
        origin, _, name = str(self._last.values.get("type")).rpartition(".")
        message = (str(self._last.values.get("message")).strip().splitlines() or [""])[0]
        if any(out_of_memory(text) for text in (name, message, *self._refusals)):
            message = f"a client was {OUT_OF_MEMORY}"
        elif origin != FedmjpError.__module__:
            message = f"{name}: {message}"
        return (QuorumError if name == QuorumError.__name__ else FederationError)(
            RAY_DEATH.sub(f"its process {KILLED}", message)
        )


def follow(
    connection: Connection,
    run: str,
    events: EventReader,
    on_event: Callable[[Event], None],
    *,
    patience: float = 0,
) -> FederationError | None:
    """Follow a run until it ends, and return the error that it failed of.

    A run that has not ended a minute after its app is over: a client of it hangs.

    Args:
        connection: To the SuperLink.
        run: Identifier of the run.
        events: Of the run, from before it was submitted.
        on_event: Called with every event.
        patience: Seconds for which the SuperLink may be silent.

    Raises:
        FederationError: If the SuperLink does not answer for longer.
    """
    watch, silent_since = RunWatch(events, on_event), None
    while True:
        with tempfile.TemporaryFile() as log:
            with connection.streamed_log(run, log) as stream:
                while stream.poll() is None and not watch.is_overdue:
                    watch.read()
                    time.sleep(EVENT_SECONDS)
            log_end = _quote_end(log)
        try:
            status, silent_since = connection.status(run), None
        except FederationError:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since >= patience:
                raise FederationError("the run's SuperLink does not answer any more") from None
            status = "unknown"
        watch.read()
        if status.startswith("finished"):
            return None if status == COMPLETED else watch.error(log_end)
        if watch.is_overdue:
            return None if watch.is_played else watch.error(log_end)
        time.sleep(POLL_SECONDS)


def join_errors(subject: str, errors: Sequence[FederationError]) -> FederationError:
    """Return one error for runs that failed; a QuorumError where one of them failed for want of updates.

    Args:
        subject: Of the sentence that it begins with.
        errors: Of the runs.
    """
    kind = QuorumError if any(isinstance(error, QuorumError) for error in errors) else FederationError
    return kind(f"{subject}: {'; '.join(map(str, errors))}")


def _quote_end(log: IO[bytes]) -> str:
    """Return the last lines of a log as one."""
    log.seek(max(log.seek(0, 2) - TAIL_BYTES, 0))
    text = click.unstyle(log.read().decode(errors="replace"))
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-TAIL_LINES:]) or "nothing"
