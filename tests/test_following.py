"""Following a run of Flower by its log: to its end, or past a client that hangs. Flower's program is a script here."""

from pathlib import Path

import pytest

from fedmjp.benchmarks.federation import connection, simulation
from fedmjp.benchmarks.federation.connection import Connection
from fedmjp.benchmarks.federation.simulation import follow
from fedmjp.wire import FAILED, PLAYED

QUORUM = "fedmjp.errors.QuorumError: round 2: 0 of 4 clients answered"


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prints what is in the file "said" and hangs; of the run it says what is in the file "status"."""
    script = tmp_path / "flwr"
    answer = f'printf \'{{"runs": [{{"status": "%s"}}]}}\' "$(cat {tmp_path}/status)"'
    script.write_text(f"#!/bin/sh\nif [ $1 = log ]; then cat {tmp_path}/said; exec sleep 60; fi\n{answer}\n")
    script.chmod(0o755)
    monkeypatch.setattr(connection, "program", lambda _name: str(script))
    for module in (connection, simulation):
        monkeypatch.setattr(module, "GRACE", 0.2)
    (tmp_path / "status").write_text("running")
    return tmp_path


@pytest.mark.parametrize(
    ("last", "failure"), [(PLAYED, None), (f"{FAILED}{QUORUM}", QUORUM), (f"{FAILED}builtins.ValueError: no", "no")]
)
def test_a_client_that_hangs_does_not_keep_a_run_that_is_over(flwr: Path, last: str, failure: str | None) -> None:
    (flwr / "said").write_text(f"INFO :      [ROUND 1/2] done\nINFO :      {last}\n")
    lines: list[str] = []
    found = follow(Connection(flwr, "private"), "1", lines.append)
    assert found == failure or (failure and found and found.endswith(failure))
    assert lines == (flwr / "said").read_text().splitlines()


def test_the_status_counts_where_there_is_one(flwr: Path) -> None:
    (flwr / "said").write_text(f"INFO :      {PLAYED}\nsome.Error: afterwards\n")
    (flwr / "status").write_text("finished:failed")
    assert follow(Connection(flwr, "private"), "1", lambda _line: None) == "some.Error: afterwards"
