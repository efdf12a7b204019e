"""The store: what is finished stays, nothing is doubled, whatever is killed. On SQLite and on PostgreSQL."""

import math
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pandas as pd
import pytest
from sqlalchemy import Double

from fedmjp.benchmarks.folder.store import _TRIALS, Store
from fedmjp.benchmarks.folder.trials import MEASURED, TRIAL_COLUMNS
from fedmjp.errors import GAVE_UP, OutputError, StoreError
from tests import databases
from tests.databases import (
    PER_PUT,
    PROCESSES,
    keys_in,
    killed_after,
    locked,
    open_plainly,
    trial,
    write_against_others,
)

server, postgresql, url, store = databases.server, databases.postgresql, databases.url, databases.store

ROOM = 400_000  # bytes of a disk that is soon full


def test_a_trial_comes_back_as_it_was_put(store: Store) -> None:
    put = trial(
        "a",
        scores={"psnr": math.inf, "lpips_alex": None},
        diagnostics={"loss": [0.1, 1e-300], "ü": {"é": "\0"}},
        environment={"versions": {"torch": "2.15.0"}, "revision": None},
        realised_ratio=0.1 + 0.2,
        weights_sha256="ff",
        attack_seconds=1e-9,
        seed=2**63 - 1,
    )
    store.put([put])
    assert store.trials(["a"]) == [put]


def test_a_finished_trial_is_never_overwritten(store: Store) -> None:
    store.put([trial("a")])
    store.put([trial("a", scores={"psnr": 99.0})])
    store.put([trial("a", status="failed", error="late failure")])
    (found,) = store.trials(["a"])
    assert (found.status, found.scores["psnr"]) == ("ok", 12.5)


def test_a_failed_trial_is_a_row_and_is_replaced_by_a_later_attempt(store: Store) -> None:
    store.put([trial("a", status="failed", error="no gradient")])
    assert store.finished(["a"]) == set()
    store.put([trial("a", status="failed", error="no memory")])
    assert store.trials(["a"])[0].error == "no memory"
    store.put([trial("a", environment={"revision": "mended"})])
    assert store.finished(["a"]) == {"a"}
    (found,) = store.trials(["a"])
    assert (found.error, found.environment) == (None, {"revision": "mended"})
    assert store.counts() == {"ok": 1}


def test_a_trial_whose_attack_gave_up_is_finished(store: Store) -> None:
    store.put([trial("a", status="failed", error=f"{GAVE_UP}all zero"), trial("b", status="failed", error="no memory")])
    assert store.finished(["a", "b"]) == {"a"}


def test_a_batch_that_names_a_trial_twice_follows_the_same_rules(store: Store) -> None:
    store.put([trial("a", status="failed"), trial("a", seed=1), trial("a", seed=2)])
    assert [(found.status, found.seed) for found in store.trials(["a"])] == [("ok", 1)]


def test_an_error_of_any_letters_is_stored(store: Store) -> None:
    store.put([trial("a", status="failed", error="zero \0, surrogate \udc80, ü")])
    assert store.trials(["a"])[0].error == "zero \\x00, surrogate \\udc80, ü"


def test_only_the_trials_asked_for_come_back_in_the_order_of_bytes(store: Store) -> None:
    store.put([trial("a-2"), trial("B"), trial("a1", status="failed"), trial("left out")])
    asked = ["a1", "a-2", "B", "unknown"]
    assert store.finished(asked) == {"a-2", "B"}
    assert {row.key: row.status for row in store.trials(asked)} == {"a-2": "ok", "B": "ok", "a1": "failed"}
    assert [found.key for found in store.trials(asked)] == ["B", "a-2", "a1"]
    assert list(store.frame(asked)["key"]) == ["B", "a-2", "a1"]
    assert list(store.frame()["key"]) == ["B", "a-2", "a1", "left out"]


def test_more_keys_than_a_query_takes(store: Store) -> None:
    keys = [f"{number:05}" for number in range(2_500)]
    store.put([trial(key, status="ok" if int(key) % 3 else "failed") for key in keys])
    assert store.finished(keys) == {key for key in keys if int(key) % 3}
    assert list(store.frame(keys)["key"]) == keys
    assert store.counts() == {"ok": 1666, "failed": 834}


def test_a_frame_has_the_trials_and_their_environments(store: Store) -> None:
    put = [trial(key, environment={"machine": key == "a"}, realised_ratio=0.25) for key in "abc"]
    store.put(put)
    frame, environments = store.frame(), store.environments()
    assert len(environments) == 2
    assert [environments[digest] for digest in frame["environment_sha256"]] == [each.environment for each in put]
    for column in frame.columns.drop("environment_sha256"):
        theirs = [getattr(each, column) for each in put]
        assert [None if pd.api.types.is_scalar(x) and pd.isna(x) else x for x in frame[column]] == theirs


@pytest.mark.parametrize("keys", [None, [], ["unknown"]])
def test_a_frame_of_nothing_has_its_columns(store: Store, keys: list[str] | None) -> None:
    frame = store.frame(keys)
    assert len(frame) == 0
    assert {"key", "scores", "environment_sha256", "recorded_at"} <= set(frame.columns)
    assert frame["mask_ratio"].mean() is not None


def test_nothing_to_put_is_fine(store: Store) -> None:
    store.put([])
    assert store.trials([]) == []
    assert store.counts() == {}


def test_writers_at_once_double_nothing_lose_nothing_and_agree_who_was_first(url: str) -> None:
    shared = [[f"shared-{put}-{part}" for part in range(16)] for put in range(12)]
    writers = []
    for writer in range(4):  # they make the tables at once, too
        own = [[f"own-{writer}-{put}"] for put in range(12)]
        turned = [list(reversed(keys)) if writer % 2 else keys for keys in shared]
        puts = [keys for both in zip(turned, own, strict=True) for keys in both]
        ours, theirs = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=write_against_others, args=(url, writer, puts, theirs))
        process.start()
        theirs.close()
        writers.append((process, ours))
    found = [ours.recv() for _, ours in writers]
    for process, _ in writers:
        process.join()
        assert process.exitcode == 0
    keys = keys_in(url)
    assert sorted(keys) == sorted({key for each in found for key in each})
    assert len(keys) == 12 * 16 + 4 * 12
    for key in (key for put in shared for key in put):
        assert len({each[key] for each in found}) == 1, "a finished trial was overwritten"


def test_kill_9_loses_no_finished_trial_and_doubles_none(url: str) -> None:
    chance = random.Random(0)
    announced = 0
    for _ in range(8):
        with killed_after(url, announced, chance.randrange(1, 30)) as told:
            announced = told[-1] + 1
        keys = keys_in(url)
        assert len(keys) == len(set(keys))
        assert {f"key-{number}-{part}" for number in range(announced) for part in range(PER_PUT)} <= set(keys)
        assert len(keys) % PER_PUT == 0, "a transaction is whole or absent"


def test_a_writer_waits_for_another_program(url: str, store: Store) -> None:
    with locked(url) as connection:
        release = threading.Timer(0.3, connection.rollback)
        release.start()
        store.put([trial("a")])
        release.join()
    assert store.finished(["a"]) == {"a"}


def test_a_lock_longer_than_the_timeout_is_told_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmjp.benchmarks.folder.store.BUSY_MILLISECONDS", 100)
    store = Store.open(url)
    store.put([trial("a")])
    with locked(url), pytest.raises(StoreError, match=r"lock.*finished trials are kept; .* and run again$") as caught:
        store.put([trial("b")])
    assert "\n" not in str(caught.value)
    store.put([trial("b")])
    assert store.finished(["a", "b"]) == {"a", "b"}


def test_a_database_of_another_version_is_named(url: str) -> None:
    with open_plainly(url) as connection:
        connection.execute("create table trials (key varchar(64) primary key)")
        connection.commit()
    with pytest.raises(OutputError, match="another version of fedmjp"):
        Store.open(url)


def test_the_file_lies_where_it_should_whatever_the_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "a?b%20c#d@e"
    folder.mkdir()
    Store.at(folder / "trials.sqlite").put([trial("a")])
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert (folder / "trials.sqlite").exists()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "trials.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(OutputError, match=r"trials\.sqlite .*--fresh"):
        Store.at(tmp_path / "trials.sqlite")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"nowhere/trials\.sqlite"):
        Store.at(tmp_path / "nowhere" / "trials.sqlite")


def test_a_database_that_may_only_be_read_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.at(tmp_path / "trials.sqlite")
    store.put([trial("a")])
    with store._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = 1")
    with pytest.raises(StoreError, match=r"readonly database; finished trials are kept"):
        store.put([trial("b")])
    assert store.finished(["a", "b"]) == {"a"}


def fill_a_disk(path: Path, told: Connection) -> None:
    """Writes until the disk is full, then finds room and goes on."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = Store.at(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))
    done: list[str] = []
    try:
        while len(done) < 100_000:
            keys = [f"{len(done) + part:06}" for part in range(16)]
            store.put([trial(key) for key in keys])
            done += keys
    except StoreError as error:
        told.send((done, store.finished(done), str(error)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.put([trial("later")])
    told.send(store.finished(["later"]))


def test_a_full_disk_is_told_in_one_line_and_damages_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    ours, theirs = PROCESSES.Pipe(duplex=False)
    writer = PROCESSES.Process(target=fill_a_disk, args=(path, theirs))
    writer.start()
    theirs.close()
    done, finished, error = ours.recv()
    assert finished == set(done) != set()
    assert error.startswith(f"The trials database {path} failed: ")
    assert "see that the disk has room" in error
    assert "\n" not in error
    assert ours.recv() == {"later"}
    writer.join()
    with sqlite3.connect(path) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
    assert sorted(keys_in(f"sqlite:///{path}")) == [*done, "later"]


@pytest.mark.parametrize(
    "url", ["", "trials.sqlite", "sqlite://", "sqlite:///:memory:", "sqlite://user:s3cr3t@host/x", "mysql://u:s3cr3t@h/d",
            "postgresql://u:s3@cr3t@host/d", "postgresql://u:x@s3cr3t:port/d", "postgresql+asyncpg://u:s3cr3t@h/d"],
)  # fmt: skip
def test_a_url_that_cannot_be_used_is_refused_with_the_form_and_without_its_password(url: str) -> None:
    with pytest.raises(OutputError, match="write sqlite:///FILE or postgresql://") as caught:
        Store.open(url)
    assert "cr3t" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_table_has_the_columns_of_trials() -> None:
    assert tuple(_TRIALS.c.keys()) == TRIAL_COLUMNS
    assert tuple(column.name for column in _TRIALS.c if isinstance(column.type, Double)) == MEASURED


def test_the_store_imports_neither_torch_nor_pandas_nor_a_driver() -> None:
    heavy = {"torch", "pandas", "numpy", "psycopg"}
    code = f"import sys, fedmjp.benchmarks.folder.store; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
