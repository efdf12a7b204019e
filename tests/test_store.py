"""The store: what is finished stays, nothing is doubled, whatever is killed."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fedmjp.errors import OutputError
from fedmjp.store import Store, Trial

WRITER = """
import sys
from pathlib import Path
from tests.test_store import trial
from fedmjp.store import Store
store = Store.at(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), 100_000):
    store.put([trial(f"key-{number}-{part}") for part in range(3)])
    print(number, flush=True)
"""
ROOT = Path(__file__).parents[1]


def trial(key: str, status: str = "ok", **values: object) -> Trial:
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
    return Trial(key=key, status=status, **{**fields, **values})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.at(tmp_path / "trials.sqlite")


def test_a_trial_comes_back_as_it_was_put(store: Store) -> None:
    store.put([trial("a")])
    (found,) = store.trials(["a"])
    assert (found.key, found.status, found.scores) == ("a", "ok", {"psnr": 12.5, "lpips_alex": None})


def test_a_finished_trial_is_never_overwritten(store: Store) -> None:
    store.put([trial("a")])
    store.put([trial("a", scores={"psnr": 99.0})])
    store.put([trial("a", status="failed", error="late failure")])
    (found,) = store.trials(["a"])
    assert (found.status, found.scores["psnr"]) == ("ok", 12.5)


def test_a_failed_trial_is_a_row_and_is_replaced_by_a_later_success(store: Store) -> None:
    store.put([trial("a", status="failed", error="no gradient")])
    assert store.finished(["a"]) == set()
    assert store.trials(["a"])[0].error == "no gradient"
    store.put([trial("a")])
    assert store.finished(["a"]) == {"a"}
    assert len(store.trials(["a"])) == 1
    assert store.trials(["a"])[0].error is None


def test_only_the_trials_asked_for_come_back(store: Store) -> None:
    store.put([trial("a"), trial("b")])
    assert store.finished(["b", "c"]) == {"b"}
    assert [found.key for found in store.trials(["b", "c"])] == ["b"]


def test_a_database_of_another_version_is_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "trials.sqlite") as connection:
        connection.execute("create table trials (key text primary key)")
    with pytest.raises(OutputError, match="another version of fedmjp"):
        Store.at(tmp_path / "trials.sqlite")


def test_the_file_lies_where_it_should_whatever_the_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "a?b%20c#d"
    folder.mkdir()
    Store.at(folder / "trials.sqlite").put([trial("a")])
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert (folder / "trials.sqlite").exists()


def test_nothing_to_put_is_fine(store: Store) -> None:
    store.put([])
    assert store.trials([]) == []


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "trials.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(OutputError, match="--fresh"):
        Store.at(tmp_path / "trials.sqlite")


@pytest.mark.slow
def test_kill_9_loses_no_finished_trial_and_doubles_none(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite"
    chance = random.Random(0)
    announced = 0
    for _ in range(5):
        command = [sys.executable, "-c", WRITER, str(path), str(announced)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(chance.randrange(1, 60)):
                announced = int(process.stdout.readline()) + 1
            os.kill(process.pid, signal.SIGKILL)
            rest = process.stdout.read().splitlines()
            announced = int(rest[-1]) + 1 if rest else announced
        with sqlite3.connect(path) as connection:
            keys = [key for (key,) in connection.execute("select key from trials")]
        assert len(keys) == len(set(keys))
        assert {f"key-{number}-{part}" for number in range(announced) for part in range(3)} <= set(keys)
        assert len(keys) % 3 == 0, "a transaction is whole or absent"
