"""A hundred SIGKILLs that fall while rows are written: what was acknowledged is there, whole and once."""

import os
import random
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fedmjp.benchmarks.folder.store import Store
from fedmjp.errors import OutputError, StoreError
from tests.databases import PER_PUT, PROCESSES, keys_in, trial

KILLS = 100
LONGEST = 0.012  # seconds from the first row to the kill: a transaction takes about two milliseconds
DIAGNOSTICS = {"loss": [1 / 3] * 200}


def write_and_die(path: Path, first: int, told: Connection) -> None:
    """Fork, at no cost, a writer for each number that comes; say when it writes, and what it has written."""
    store = Store.at(path)
    store.close()
    for number in range(KILLS):
        ours, theirs = os.pipe()
        writer = os.fork()
        if writer == 0:
            os.close(ours)
            write_for_ever(path, number, theirs)
        os.close(theirs)
        told.send((number, *kill_in_work(writer, ours, random.Random(first + number))))


def write_for_ever(path: Path, number: int, told: int) -> None:
    store = Store.at(path)
    put = 0
    while True:
        store.put([trial(f"{number:03}-{put:04}-{part}", diagnostics=DIAGNOSTICS) for part in range(PER_PUT)])
        os.write(told, b".")
        put += 1


def kill_in_work(writer: int, told: int, chance: random.Random) -> tuple[int, bool]:
    """How many transactions a writer told before it was killed, and that it was alive until then."""
    with os.fdopen(told, "rb", buffering=0) as line:
        done = len(line.read(1))
        time.sleep(chance.uniform(0, LONGEST))
        os.kill(writer, signal.SIGKILL)
        _, status = os.waitpid(writer, 0)
        while more := line.read(4096):
            done += len(more)
    return done, os.WIFSIGNALED(status)


@pytest.mark.slow
def test_a_hundred_kills_within_the_writing_of_rows_lose_and_double_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    here, there = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=write_and_die, args=(path, 0, there))
    process.start()
    there.close()
    told = {}
    with suppress(EOFError):
        while True:
            number, done, killed = here.recv()
            assert killed
            told[number] = done
    process.join()
    assert len(told) == KILLS
    keys = keys_in(f"sqlite:///{path}")
    assert len(keys) == len(set(keys))
    beyond = 0
    for number, done in told.items():
        own = sorted(key for key in keys if key.startswith(f"{number:03}-"))
        puts = len(own) // PER_PUT
        assert own == [f"{number:03}-{put:04}-{part}" for put in range(puts) for part in range(PER_PUT)]
        assert puts in (done, done + 1), "at most the one that was written is there without a word"
        beyond += puts - done
    assert all(row.diagnostics == DIAGNOSTICS for row in Store.at(path).trials(keys))
    assert beyond, "some kill fell between a row and its word"


def test_a_damaged_row_is_told_with_a_remedy_and_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    store = Store.at(path)
    store.put([trial("a"), trial("b")])
    with store._engine.begin() as connection:
        connection.exec_driver_sql("update trials set scores = 'no JSON' where key = 'a'")
    with pytest.raises(StoreError, match=r"trials\.sqlite failed: .*damaged.*--fresh") as caught:
        store.trials(["a"])
    assert "\n" not in str(caught.value)
    assert [row.key for row in store.trials(["b"])] == ["b"]


@pytest.mark.parametrize("kept", [50, 4_096, -100])
def test_a_truncated_database_is_told_with_a_remedy(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "trials.sqlite"
    store = Store.at(path)
    store.put([trial(f"{number:04}") for number in range(500)])
    with store._engine.connect() as connection:
        connection.exec_driver_sql("pragma wal_checkpoint(truncate)")
    store.close()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        (OutputError, StoreError), match=r"trials\.sqlite .*damaged.*run the command that made it again"
    ):
        Store.at(path).trials([f"{number:04}" for number in range(500)])
