"""Databases that tests write to, PostgreSQL from Debian's package among them, and processes that write to them."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import psycopg
import pytest

from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.folder.trials import TrialResult
from fedmjp.errors import BadInputError
from tests.postgresql import Server, started

PASSWORD = "s3cr3t-of-tests"
PER_PUT = 3

# Children start from a process that has imported what they need, and nothing that has threads.
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.databases"])


def trial(key: str, status: str = "ok", **values: object) -> TrialResult:
    fields = {
        "model": "deit_tiny",
        "defence": "none",
        "mask_ratio": 0.0,
        "attack": "grey",
        "setting": "a",
        "protocol": "float",
        "picture": "cat",
        "picture_sha256": "0",
        "seed": 0,
        "scores": {"psnr": 12.5, "lpips_alex": None},
        "diagnostics": {},
        "environment": {},
    }
    return TrialResult(key=key, status=status, **{**fields, **values})


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    try:
        with started(PASSWORD) as own:
            yield own
    except BadInputError as missing:
        pytest.skip(str(missing))


_numbers = count()


@pytest.fixture
def postgresql(server: Server) -> str:
    """URL of an empty database."""
    name = f"trials_{next(_numbers)}"
    server.execute(f"CREATE DATABASE {name}")
    return server.url(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'trials.sqlite'}"
    return request.getfixturevalue("postgresql")


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = Store.open(url)
    yield opened
    opened.close()


def keys_in(url: str) -> list[str]:
    """All keys, asked without the store."""
    query = "select key from trials"
    with open_plainly(url) as connection:
        return [key for (key,) in connection.execute(query).fetchall()]


@contextmanager
def open_plainly(url: str) -> Iterator[sqlite3.Connection | psycopg.Connection]:
    """A connection of the driver itself."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False)
    else:
        connection = psycopg.connect(url)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def locked(url: str) -> Iterator[sqlite3.Connection | psycopg.Connection]:
    """Another program holds all of the trials."""
    with open_plainly(url) as connection:
        lock = "BEGIN EXCLUSIVE" if url.startswith("sqlite") else "LOCK TABLE trials IN ACCESS EXCLUSIVE MODE"
        connection.execute(lock)
        yield connection


def write_for_ever(url: str, first: int, told: Connection) -> None:
    """Puts key-N-0, key-N-1, ... in one transaction, and tells N."""
    store = Store.open(url)
    for number in count(first):
        store.put([trial(f"key-{number}-{part}") for part in range(PER_PUT)])
        told.send(number)


def write_against_others(url: str, writer: int, puts: Sequence[Sequence[str]], told: Connection) -> None:
    """Puts these trials, tells which writer's trials it finds there afterwards."""
    store = Store.open(url)
    for keys in puts:
        store.put([trial(key, seed=writer) for key in keys])
    told.send({found.key: found.seed for found in store.trials([key for keys in puts for key in keys])})


@contextmanager
def killed_after(url: str, first: int, puts: int) -> Iterator[list[int]]:
    """What a writer told until it was killed with SIGKILL."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    writer = PROCESSES.Process(target=write_for_ever, args=(url, first, theirs))
    writer.start()
    theirs.close()
    told = [ours.recv() for _ in range(puts)]
    writer.kill()
    writer.join()
    with suppress(EOFError):
        while True:
            told.append(ours.recv())
    yield told
