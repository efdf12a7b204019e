"""How long the server waits for the replies of a round: as long as rounds take, and then not for ever."""

import time
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

TIMES = 10.0  # as long as others take, or as rounds took, that a client may take
LEAST = 300.0  # seconds, whatever others take
UNKNOWN = 86400.0  # seconds that a first round may take: clients may wait for a core
START = 3600.0  # seconds for clients to come and say who they are, however short rounds are
SHORTEST, LONGEST = 0.01, 1.0  # seconds between two looks for replies
SHARE = 0.1  # of the time that passed until a look, before the next one: how much later a reply may be seen
AT_ONCE = 8  # replies that are fetched together: so many are in memory at most


class Patience:
    """Seconds that a whole round may take.

    Args:
        stated: By the run; None follows the rounds that were played.
        rounds: Seconds that former rounds took.
    """

    def __init__(self, stated: float | None, rounds: Iterable[float] = ()) -> None:
        self._stated, self._rounds = stated, list(rounds)

    @property
    def seconds(self) -> float:
        """Return the seconds that the next round may take."""
        if self._stated is not None:
            return self._stated
        return max(LEAST, TIMES * median(self._rounds)) if self._rounds else UNKNOWN

    @property
    def refusal(self) -> str:
        """Return the reason for which a client without an answer is refused."""
        if self._stated is not None:
            return f"no answer within {self._stated:g} seconds"
        return f"no answer in {TIMES:g} times the time that others took"

    def learn(self, seconds: float) -> None:
        """Add the time that a round took.

        Args:
            seconds: From its first message to its last reply.
        """
        self._rounds.append(seconds)


class PatientGrid:
    """Wraps a Grid: replies are handed on as they come, and nobody is waited for without bound.

    Where clients are hurried, once half of them have answered, the others have ten times as long as those took. So a
    client that hangs is bounded in the first round already. Errors are no answers here: they may come at once.

    Args:
        grid: The Grid that does the work.
        hurried: Whether half of the answers bound the others.
        clock: Seconds of some clock.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        hurried: bool,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._grid, self._hurried, self._clock, self._sleep = grid, hurried, clock, sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Send messages and yield each reply as it comes.

        Args:
            messages: Those of a round.
            timeout: Seconds to wait for all replies; None waits for a day.
        """
        return self._replies(set(self._grid.push_messages(messages)), timeout)

    def _replies(self, waiting: set[str], timeout: float | None) -> Iterator[Message]:
        half, began = len(waiting) / 2, self._clock()
        deadline = UNKNOWN if timeout is None else timeout
        limit, answered = deadline, 0
        while waiting and self._clock() - began < limit:
            for reply in self._arrived(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                former, answered = answered, answered + (not reply.has_error())
                if self._hurried and former < half <= answered:
                    limit = min(deadline, max(LEAST, TIMES * (self._clock() - began)))
                yield reply
            if waiting:
                passed = self._clock() - began
                self._sleep(max(0.0, min(LONGEST, max(SHORTEST, SHARE * passed), limit - passed)))

    def _arrived(self, waiting: Iterable[str]) -> Iterator[Message]:
        names = sorted(waiting)
        for first in range(0, len(names), AT_ONCE):
            yield from self._grid.pull_messages(names[first : first + AT_ONCE])
