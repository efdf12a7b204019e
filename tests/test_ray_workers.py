"""A campaign on a Ray cluster of this machine gives the rows of a local run."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.plan.experiment import Plan
from fedmjp.benchmarks.running import ray_workers
from fedmjp.benchmarks.running.engine import Job
from fedmjp.benchmarks.running.ray_workers import WorkerError
from fedmjp.benchmarks.running.runner import run_local, run_ray
from fedmjp.benchmarks.running.workers import Setup
from fedmjp.data.pictures import LabelledPicture, PictureSource
from fedmjp.errors import BadInputError, ConfigError, OutputError, StoreError
from tests import test_workers
from tests.experiments import Told, files, moved, rows, small_campaign
from tests.test_workers import fill_the_disk

quick = test_workers.quick

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a cluster of two cores, ended by its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short: sockets lie in it
        command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=2"]
        command += [f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        command += ["--object-store-memory=80000000", f"--temp-dir={folder}"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]  # free ones, instead of 10002 and what follows
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
        environment["RAY_worker_register_timeout_seconds"] = "30"  # 60 otherwise, for each worker that does not start
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert any("Ray runtime started" in line for line in process.stdout)
            try:
                yield f"127.0.0.1:{port}"
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)


@dataclass(frozen=True)
class Deadly:
    """Pictures some of which kill the process that loads them, unless spared, each time or until a file appears."""

    source: PictureSource
    killers: dict[str, Path | None]
    spared: int

    def names(self) -> list[str]:
        return list(self.source.names())

    def load(self, name: str) -> LabelledPicture:
        once = self.killers.get(name)
        if name in self.killers and os.getpid() != self.spared and not (once and once.exists()):
            if once:
                once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.source.load(name)


class Stillborn:
    """A worker that dies before any work."""

    def __init__(self, *_: object) -> None:
        os.abort()

    def work(self, job: Job) -> None: ...


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Setup]:
    plan, setup = small_campaign(tmp_path_factory.mktemp("alone"), seeds=(0,))
    run_local(plan, setup, workers=1, progress=Told())
    return plan, setup


@pytest.mark.slow
def test_it_gives_the_rows_and_pictures_of_a_local_run(
    cluster: str, planned: tuple[Plan, Setup], tmp_path: Path
) -> None:
    plan, alone = planned
    setup = moved(alone, tmp_path)
    told = Told()
    assert run_ray(plan, setup, address=cluster, progress=told) == 0
    assert told.announced == told.done == len(plan.trials)
    assert rows(plan, setup) == rows(plan, alone)
    assert files(setup) == files(alone)


@pytest.mark.slow
def test_a_job_that_kills_its_worker_is_tried_again_and_becomes_failed_rows_the_second_time(
    cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedmjp.benchmarks.running.engine.CHUNK", 1)
    # One job per picture: every death costs the start of a worker.
    grid = {"attacks": ("grey",), "defences": ("none",), "settings": ("a",)}
    plan, setup = small_campaign(tmp_path / "deadly", seeds=(0,), **grid)
    once, always = (plan.trials[place].picture.name for place in (2, 3))
    assert once != always
    source = Deadly(setup.selection.source, {once: tmp_path / "died", always: None}, spared=os.getpid())
    told = Told()
    deadly = replace(setup, selection=replace(setup.selection, source=source))
    assert run_ray(plan, deadly, address=cluster, progress=told) == 0
    assert (tmp_path / "died").exists()
    found = rows(plan, setup)
    assert len(found) == len(plan.trials) == told.done
    failed = {key: row["error"] for key, row in found.items() if row["status"] == "failed"}
    assert failed.keys() == {trial.key for trial in plan.trials if trial.picture.name == always}
    for error in failed.values():
        assert re.fullmatch(r"the worker process died \(.*died.*\); the trial was tried twice", str(error))
    assert run_local(plan, setup, workers=1, progress=Told()) == 0
    assert {row["status"] for row in rows(plan, setup).values()} == {"ok"}, "failed trials are tried again"


@pytest.mark.slow
def test_workers_that_never_get_to_work_end_the_run(
    cluster: str, quick: tuple[Plan, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_workers, "_Remote", Stillborn)
    with pytest.raises(WorkerError, match="died before it got to work"):
        run_ray(*quick, address=cluster, progress=Told())


@pytest.mark.slow
def test_a_database_that_fails_in_a_worker_ends_the_run(cluster: str, quick: tuple[Plan, Setup]) -> None:
    plan, setup = quick
    fill_the_disk(plan, setup)
    told = Told()
    with pytest.raises(StoreError, match="database or disk is full") as error:
        run_ray(plan, setup, address=cluster, progress=told)
    assert "\n" not in str(error.value)
    finished = rows(plan, setup)
    assert finished
    assert told.done <= len(finished) < len(plan.trials)


@pytest.mark.slow
def test_a_run_that_is_stopped_says_what_it_left(cluster: str, quick: tuple[Plan, Setup]) -> None:
    plan, setup = quick
    told = Told()
    left = run_ray(plan, setup, address=cluster, progress=told, stop=lambda: told.done >= 3)
    assert 0 < left == len(plan.trials) - told.done
    assert len(rows(plan, setup)) == told.done


@pytest.mark.slow
def test_files_of_one_machine_are_refused_on_several(
    cluster: str, planned: tuple[Plan, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, setup = planned
    monkeypatch.setattr(ray_workers.platform, "node", lambda: "another-machine")
    with pytest.raises(ConfigError, match="SQLite files are safe on one machine alone"):
        run_ray(plan, setup, address=cluster, progress=Told())


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_refused(cluster: str, planned: tuple[Plan, Setup], tmp_path: Path) -> None:
    plan, setup = planned
    database = f"sqlite:///{tmp_path / 'trials.sqlite'}"
    unshared = replace(setup, output=OutputFolder(tmp_path / "unshared"), database=database)
    with pytest.raises(OutputError, match="does not see"):
        run_ray(plan, unshared, address=cluster, progress=Told())


def test_an_address_where_nothing_answers_is_one_line_in_time(
    planned: tuple[Plan, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_workers, "PATIENCE", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(BadInputError, match=f"no Ray cluster answered at {address} within 0.5 s"):
            run_ray(*planned, address=address, progress=Told())


@pytest.mark.parametrize("address", ["", "auto", "head:", "ray://head"])
def test_a_malformed_address_is_refused(planned: tuple[Plan, Setup], address: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form HOST:PORT"):
        run_ray(*planned, address=address, progress=Told())
