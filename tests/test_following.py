"""Following a run by its events: to its end, or past a client that hangs. Flower's program is a script here."""

from pathlib import Path

import pytest

from fedmjp.benchmarks.federation import connection, following
from fedmjp.benchmarks.federation.connection import Connection
from fedmjp.benchmarks.federation.following import follow
from fedmjp.config import RunConfig
from fedmjp.errors import FederationError, QuorumError
from fedmjp.server.events import Event, EventFile, EventReader

QUORUM = "round 2: 0 of 4 clients answered"
UNSAID = "the server's app ended without an error; the end of its log: "


class Run:
    """A run whose log is the file "log" and whose status is in the file "status"; its app adds events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "run").mkdir()
        self.app = EventFile.of_run(RunConfig(events_file=str(folder / "run" / "events.jsonl")))
        self.events = EventReader(folder / "run" / "events.jsonl")
        self.told: list[Event] = []
        self.says(log="", status="running")

    def says(self, *, log: str, status: str, hangs: bool = True) -> None:
        (self.folder / "log").write_text(log)
        (self.folder / "status").write_text(status)
        (self.folder / "rest").write_text("60" if hangs else "0")

    def follow(self, patience: float = 0) -> FederationError | None:
        return follow(Connection(self.folder, "private"), "1", self.events, self.told.append, patience=patience)

    def fails(self, kind: str, message: str) -> str:
        """Return what is said of a run whose app ended with an error."""
        self.app.add("error", type=kind, message=message)
        self.says(log="anything.Error: else\n", status="finished:failed", hangs=False)
        return str(self.follow())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    script = tmp_path / "flwr"
    answer = f'printf \'{{"runs": [{{"status": "%s"}}]}}\' "$(cat {tmp_path}/status)"'
    log = f"cat {tmp_path}/log; exec sleep $(cat {tmp_path}/rest)"
    script.write_text(f"#!/bin/sh\nif [ $1 = log ]; then {log}; fi\n{answer}\n")
    script.chmod(0o755)
    monkeypatch.setattr(connection, "program", lambda _name: str(script))
    monkeypatch.setattr(following, "GRACE", 0.2)
    return Run(tmp_path)


def test_a_client_that_hangs_does_not_keep_a_run_that_is_over(run: Run) -> None:
    run.app.add("round done", round=1)
    run.app.add("end")
    assert run.follow() is None
    assert run.told == [("round done", {"round": 1}), ("end", {})]


@pytest.mark.parametrize(
    ("kind", "message", "error"),
    [
        ("fedmjp.errors.QuorumError", QUORUM, QuorumError(QUORUM)),
        ("fedmjp.errors.FederationError", "no client can answer", FederationError("no client can answer")),
        ("fedmjp.errors.CheckpointError", "another configuration", FederationError("another configuration")),
        ("builtins.ValueError", "no\nsecond line", FederationError("ValueError: no")),
        ("builtins.AssertionError", "", FederationError("AssertionError: ")),
    ],
)
def test_the_error_of_an_app_is_its_last_event(run: Run, kind: str, message: str, error: FederationError) -> None:
    run.app.add("error", type=kind, message=message)
    failure = run.follow()
    assert type(failure) is type(error)
    assert str(failure) == str(error)


def test_the_status_counts_where_there_is_one(run: Run) -> None:
    run.app.add("end")
    run.says(log="INFO :  start\n\x1b[31msome.Error: afterwards\x1b[0m\n\n", status="finished:failed")
    assert str(run.follow()) == f"{UNSAID}INFO : start | some.Error: afterwards"
    run.app.add("error", type="builtins.ValueError", message="a thread that nobody waits for")
    run.says(log="", status="finished:completed", hangs=False)
    assert run.follow() is None


def test_flowers_log_is_quoted_where_the_app_wrote_no_error(run: Run) -> None:
    run.app.add("round begun", round=1)
    run.says(log="INFO :  start\n(raylet) store.cc:365: Disconnecting\n \n", status="finished:failed", hangs=False)
    assert str(run.follow()) == f"{UNSAID}INFO : start | (raylet) store.cc:365: Disconnecting"
    run.says(log="", status="finished:failed", hangs=False)
    assert str(run.follow()) == f"{UNSAID}nothing"


def test_a_process_that_was_killed_is_told_plainly(run: Run) -> None:
    # As the app's error was when a client's process was killed with signal 9.
    failure = run.fails(
        "fedmjp.errors.FederationError",
        "deit_tiny-mjp: client 1 in round 1: The actor is dead because its worker process has died. Worker exit type: "
        "SYSTEM_ERROR Some common causes include: (1) the process was killed by the OOM killer due to high memory "
        "usage, (2) ray stop --force was called",
    )
    assert failure.startswith("deit_tiny-mjp: client 1 in round 1: its process was killed, as the system does")
    assert "ray" not in failure
    # As it was when Ray's raylet was killed before its clients began.
    unborn = "no client can answer: The actor never ran - it was cancelled before it"
    assert run.fails("fedmjp.errors.FederationError", unborn).startswith("no client can answer: its process was killed")


def test_memory_that_is_short_is_told_in_one_sentence(run: Run) -> None:
    allocation = "DefaultCPUAllocator: can't allocate memory"
    assert run.fails("builtins.RuntimeError", allocation).startswith("a client was out of memory: ")
    assert run.fails("builtins.MemoryError", "").startswith("a client was out of memory: ")
    run.app.add("update refused", round=1, client=0, reason="RuntimeError: CUDA out of memory")
    assert run.fails("fedmjp.errors.QuorumError", QUORUM).startswith("a client was out of memory: ")


def test_a_superlink_that_is_gone_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    silences, status = iter(range(2)), Connection.status

    def answer(superlink: Connection, number: str) -> str:
        if next(silences, None) is not None:
            raise FederationError("flwr ls failed")
        return status(superlink, number)

    monkeypatch.setattr(Connection, "status", answer)
    monkeypatch.setattr(following, "POLL_SECONDS", 0.01)
    run.says(log="", status="finished:completed", hangs=False)
    assert run.follow(patience=60) is None


def test_a_superlink_that_was_killed_is_told_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.says(log="", status="no status", hangs=False)
    monkeypatch.setattr(Connection, "status", lambda *_: (_ for _ in ()).throw(FederationError("Flower's\n\nwords")))
    with pytest.raises(FederationError, match=r"^the run's SuperLink does not answer any more$"):
        run.follow()


def test_events_are_read_whole_once_and_only_from_now_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventFile(path).add("end")
    reader = EventReader(path)
    assert list(reader.read()) == []
    with path.open("a") as file:
        file.write('{"event": "round done", "rou')  # the app is killed here
    assert list(reader.read()) == []
    EventFile(path).add("round done", round=1, loss=None, reason="\u2028 is no end of a line\n")
    EventFile(path).add("end")
    assert list(reader.read()) == [
        Event("round done", {"round": 1, "loss": None, "reason": "\u2028 is no end of a line\n"}),
        Event("end", {}),
    ]
    assert list(reader.read()) == []
    EventFile(None).add("end")  # nobody follows
