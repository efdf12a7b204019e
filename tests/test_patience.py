"""How long the server waits, by a clock of our own."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message

from fedmjp.errors import FederationError, QuorumError
from fedmjp.server.patience import AT_ONCE, LEAST, LONGEST, SHARE, SHORTEST, TIMES, UNKNOWN, Patience, PatientGrid
from fedmjp.server.roster import Roster


class Timed:
    """A Grid whose clients answer at given seconds, None never; and the clock."""

    def __init__(self, *answers: float | None, errors: Iterable[int] = ()) -> None:
        self.answers, self.errors, self.now = answers, set(errors), 0.0

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        return [str(message) for message in messages]

    def pull_messages(self, waiting: Iterable[str]) -> Iterable[Any]:
        for name in sorted(waiting):
            due = self.answers[int(name)]
            if due is not None and due <= self.now:
                metadata = SimpleNamespace(reply_to_message_id=name)
                yield SimpleNamespace(metadata=metadata, has_error=lambda name=name: int(name) in self.errors)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @staticmethod
    def seen(due: float) -> Any:
        """When an answer that is due then may be seen: at the next look."""
        late = min(LONGEST, max(SHORTEST, SHARE * due))
        return pytest.approx(due + late / 2, abs=late / 2 + 1e-6)

    def play(self, timeout: float = UNKNOWN) -> tuple[int, float]:
        """How many answered, and when the server stopped waiting."""
        grid = PatientGrid(self, hurried=True, clock=lambda: self.now, sleep=self.sleep)  # type: ignore[arg-type]
        messages: Any = range(len(self.answers))
        return len(list(grid.send_and_receive(messages, timeout=timeout))), self.now


def test_all_are_waited_for_where_all_answer() -> None:
    assert Timed(1, 2, 3, 4).play() == (4, Timed.seen(4))


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.3, 5.0, 60.0, 2000.0])
def test_an_answer_is_seen_soon_and_not_looked_for_all_the_time(seconds: float) -> None:
    looked = 0

    class Counting(Timed):
        def pull_messages(self, waiting: Iterable[str]) -> Iterable[Any]:
            nonlocal looked
            looked += 1
            return super().pull_messages(waiting)

    assert Counting(seconds).play() == (1, Timed.seen(seconds) if seconds else 0.0)
    assert looked <= 60 + seconds


@pytest.mark.parametrize(
    ("answers", "half", "until"),
    [((5.0, 7.0, None), 7.0, LEAST), ((50.0, 70.0, None), 70.0, None), ((100.0, None), 100.0, None)],
)
def test_one_that_hangs_is_bounded_in_the_first_round(
    answers: tuple[float | None, ...], half: float, until: float | None
) -> None:
    answered, ended = Timed(*answers).play()
    assert answered == len(answers) - 1
    assert ended / TIMES == Timed.seen(half) if until is None else ended == pytest.approx(until)


def test_answers_are_handed_on_as_they_come_and_a_few_at_a_time() -> None:
    seconds, fetched = [0.0] * 11 + [3.0] * 9, []

    class Counting(Timed):
        def pull_messages(self, waiting: Iterable[str]) -> Iterable[Any]:
            names = list(waiting)
            fetched.append(len(names))
            return super().pull_messages(names)

    timed = Counting(*seconds)
    grid = PatientGrid(timed, hurried=False, clock=lambda: timed.now, sleep=timed.sleep)  # type: ignore[arg-type]
    messages: Any = range(len(seconds))
    seen = [timed.now for _ in grid.send_and_receive(messages)]
    assert seen == [Timed.seen(due) if due else 0.0 for due in seconds]
    assert max(fetched) == AT_ONCE


def test_one_that_is_slow_is_waited_for() -> None:
    assert Timed(50.0, 60.0, 499.0).play() == (3, Timed.seen(499.0))


def test_errors_at_once_hurry_nobody() -> None:
    assert Timed(0, 0, 900.0, 1000.0, errors=(0, 1)).play() == (4, Timed.seen(1000.0))


def test_a_stated_time_is_the_whole_time() -> None:
    assert Timed(50.0, None, None).play(timeout=80) == (1, pytest.approx(80.0))


def test_rounds_that_were_played_say_how_long_the_next_one_may_take() -> None:
    patience = Patience(None)
    assert patience.seconds == UNKNOWN
    for seconds in (3.0, 5.0, 4.0):
        patience.learn(seconds)
    assert patience.seconds == LEAST
    assert Patience(None, [100.0, 900.0, 120.0]).seconds == 1200.0
    assert Patience(60.0, [100.0]).seconds == 60.0


class Coming:
    """A Grid that so many clients come to, who do not answer."""

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def get_node_ids(self) -> Iterable[int]:
        return range(1, self.clients + 1)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return []


@pytest.mark.parametrize(
    ("clients", "reason"),
    [(1, "1 of 2 clients came within 0 seconds"), (2, "none of 2 clients answered within 0 seconds")],
)
def test_a_run_that_nobody_answers_ends_with_the_code_for_want_of_replies(
    clients: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmjp.server.roster.POLL_SECONDS", 0.0)
    monkeypatch.setattr("fedmjp.server.roster.Message", lambda **_: None)  # Flower makes messages only inside a run
    with pytest.raises(QuorumError, match=reason) as raised:
        Roster(Coming(clients), 2).wait(0.0)  # type: ignore[arg-type]
    assert (raised.value.exit_code, FederationError.exit_code) == (3, 1)
