"""A campaign on a Ray cluster of three nodes on this machine, whose workers share no folder with the run."""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from PIL import Image
from ray.cluster_utils import Cluster

import fedmjp
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.running import ray_clusters, ray_workers
from fedmjp.benchmarks.running.engine import StackResults, UploadJob
from fedmjp.benchmarks.running.ray_clusters import cluster_team
from fedmjp.benchmarks.running.ray_workers import Assignment, StoredPictures, Worker, WorkerError
from fedmjp.benchmarks.running.runner import Foreman, run_local, run_ray
from fedmjp.benchmarks.running.workbench import Setup
from fedmjp.errors import BadInputError, ConfigError
from tests import test_workers
from tests.databases import PROCESSES
from tests.experiments import Told, files, moved, rows, small_campaign

quick = test_workers.quick
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nodes cannot import tests
# A node that is gone is noticed within seconds, and processes end with the one that started them.
NODES: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
SYSTEM = {"health_check_period_ms": 500, "health_check_failure_threshold": 2, "health_check_initial_delay_ms": 0}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of a core each, which work in an empty folder and die with this process."""
    with pytest.MonkeyPatch.context() as patch, chdir(tmp_path_factory.mktemp("nodes")):
        patch.delenv("PYTHONPATH", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_register_timeout_seconds", "30")  # 60 otherwise, for each that does not start
        cluster = Cluster()
        try:
            cluster.add_node(**NODES, _system_config=SYSTEM)
            for _ in range(2):
                cluster.add_node(**NODES)
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture
def cluster(nodes: Cluster) -> str:
    """Address of the cluster, which has three nodes again if a test has killed one."""
    while len(nodes.list_all_nodes()) < 3:
        nodes.add_node(**NODES)
    nodes.wait_for_nodes()
    return str(nodes.address)


def run_here(
    plan: TrialPlan, setup: Setup, *, address: str, progress: Told, stop: Callable[[], bool] = lambda: False
) -> int:
    """What ``run_ray`` does, with Ray's driver in this process, where tests put workers of theirs."""
    with cluster_team(setup, address) as team:
        return Foreman(plan, setup, progress, stop).hand_out(team)


def hide(data: Path) -> bool:
    """Take the pictures away once a run has read them; asked before each job."""
    if data.exists():
        data.rename(data.with_name("hidden"))
    return False


class Dying(Told):
    """Progress of a run that is killed when its first rows are written."""

    def trials(self, done: int) -> None:
        if done:
            os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(plan: TrialPlan, setup: Setup, address: str, data: Path) -> None:
    run_ray(plan, setup, address=address, progress=Dying(), stop=lambda: hide(data))


class Mortal(Worker):
    """A worker that dies, between results, at the pictures of this environment: each time, or until a file appears."""

    def work(self, job: UploadJob) -> Iterator[StackResults]:
        for results in super().work(job):
            yield results
            victims = dict(pair.split("=") for pair in os.environ["VICTIMS"].split())
            for picture in {row.picture for row in results.rows} & victims.keys():
                marker = victims[picture]
                if not (marker and Path(marker).exists()):
                    if marker:
                        Path(marker).touch()
                    time.sleep(1)  # the results before are on their way
                    os.kill(os.getpid(), signal.SIGKILL)


class Stillborn:
    """A worker that dies before any work."""

    def __init__(self, *_: object) -> None:
        os.abort()

    def work(self, job: UploadJob) -> Iterator[StackResults]:
        yield from ()


class Curious(Worker):
    """A worker that reports where its code is from, where it works, and whether it sees a folder."""

    def work(self, job: UploadJob) -> Iterator[StackResults]:
        for results in super().work(job):
            about = {"code": fedmjp.__file__, "cwd": str(Path.cwd()), "node": ray.get_runtime_context().get_node_id()}
            for row in results.rows:
                row.diagnostics = about
            yield results


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialPlan, Setup]:
    plan, setup = small_campaign(tmp_path_factory.mktemp("alone"), seeds=(0,))
    run_local(plan, setup, workers=1, progress=Told())
    return plan, setup


@pytest.mark.slow
def test_killed_nodes_and_a_killed_run_lose_and_double_nothing_though_no_folder_is_shared(
    nodes: Cluster, cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Pictures and weights vanish once the run has read them; a node dies; the run is cut off, and goes on."""
    monkeypatch.setattr("fedmjp.benchmarks.running.engine.CHUNK", 1)
    monkeypatch.setattr(ray_workers, "Worker", Curious)
    data = tmp_path / "data"
    (data / "class").mkdir(parents=True)
    for number in range(6):
        pixels = torch.randint(256, (64, 64, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(data / "class" / f"{number}.png")
    grid = {"attacks": ("patch_embedding", "grey"), "defences": ("none",), "settings": ("a",)}
    plan, setup = small_campaign(tmp_path / "undisturbed", pictures=6, seeds=(0,), keep="all", source=str(data), **grid)
    run_local(plan, setup, workers=1, progress=Told())
    disturbed = moved(setup, tmp_path / "disturbed", keep="all")

    class Disturbing(Told):
        def trials(self, done: int) -> None:
            super().trials(done)
            if done and len(nodes.list_all_nodes()) == 3:
                nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)

    process = PROCESSES.Process(target=run_and_die, args=(plan, disturbed, cluster, data))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert data.with_name("hidden").exists(), "workers had no file of the data"
    data.with_name("hidden").rename(data)
    before = rows(plan, disturbed)
    assert 0 < len(before) < len(plan.tasks)
    assert run_here(plan, disturbed, address=cluster, progress=Disturbing(), stop=lambda: hide(data)) == 0
    found = disturbed.store().frame()
    assert sorted(found["key"]) == sorted(trial.key for trial in plan.tasks)
    assert set(found["status"]) == {"ok"}
    undisturbed = setup.store().frame()
    assert found["scores"].tolist() == undisturbed["scores"].tolist()
    assert rows(plan, disturbed).items() >= before.items(), "finished trials stay as they were"
    assert files(disturbed) == files(setup)
    reports = [about for about in found["diagnostics"] if "node" in about]
    assert len({about["node"] for about in reports}) > 1
    for about in reports:
        assert "runtime_resources" in about["code"], "the code has travelled"
        assert not about["cwd"].startswith(str(tmp_path))
    (revision,) = {str(environment["revision"]) for environment in disturbed.store().environments().values()}
    assert revision == str(next(iter(setup.store().environments().values()))["revision"])


@pytest.mark.slow
def test_a_job_that_kills_its_worker_is_tried_again_and_becomes_failed_rows_the_second_time(
    cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedmjp.benchmarks.running.engine.CHUNK", 1)
    # One job per picture: every death costs the start of a worker.
    grid = {"attacks": ("patch_embedding", "grey"), "defences": ("none",), "settings": ("a",)}
    plan, setup = small_campaign(tmp_path / "deadly", seeds=(0,), **grid)
    once, always = dict.fromkeys(trial.picture.name for trial in plan.tasks[:2])

    class Victims(Mortal):
        def __init__(self, *arguments: Any) -> None:
            os.environ["VICTIMS"] = f"{once}={tmp_path / 'died'} {always}="
            super().__init__(*arguments)

    monkeypatch.setattr(ray_workers, "Worker", Victims)
    told = Told()
    assert run_here(plan, setup, address=cluster, progress=told) == 0
    assert (tmp_path / "died").exists()
    found = rows(plan, setup)
    assert len(found) == len(plan.tasks) == told.done
    failed = {key: row["error"] for key, row in found.items() if row["status"] == "failed"}
    of_victim = {trial.key for trial in plan.tasks if trial.picture.name == always}
    assert failed.keys() < of_victim, "what a worker finished before it died stays"
    for error in failed.values():
        assert re.fullmatch(r"the worker process died \(.*died.*\); the trial was tried twice", str(error))
    monkeypatch.undo()
    assert run_local(plan, setup, workers=1, progress=Told()) == 0
    assert {row["status"] for row in rows(plan, setup).values()} == {"ok"}, "failed trials are tried again"


@pytest.mark.slow
def test_workers_that_never_get_to_work_end_the_run(
    cluster: str, quick: tuple[TrialPlan, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_workers, "Worker", Stillborn)
    with pytest.raises(WorkerError, match="died before it got to work"):
        run_here(*quick, address=cluster, progress=Told())


@pytest.mark.slow
def test_a_machine_with_other_packages_is_refused_in_one_line(
    cluster: str, quick: tuple[TrialPlan, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = ray_workers.decisive_facts(quick[1].experiments)
    monkeypatch.setattr(ray_workers, "decisive_facts", lambda _: facts | {"torch": "1.0"})
    with pytest.raises(WorkerError, match=r"would compute other trials: torch is .* there and 1\.0 here") as error:
        run_here(*quick, address=cluster, progress=Told())
    assert "\n" not in str(error.value)
    assert not rows(*quick)


def test_a_machine_is_refused_with_the_first_difference(quick: tuple[TrialPlan, Setup]) -> None:
    assignment = Assignment.of(quick[1], threads=1)
    assignment.require_same_machine()
    other = replace(assignment, facts=assignment.facts | {"the digest of fedmjp's code": "0"})
    with pytest.raises(WorkerError, match=r"the digest of fedmjp's code is .* there and 0 here; install the same"):
        other.require_same_machine()


def test_pictures_travel_without_loss(quick: tuple[TrialPlan, Setup], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "get", lambda value: value)
    selection = quick[1].selection
    travelled = replace(selection, source=StoredPictures.of(selection))
    for entry in selection.entries:
        assert travelled.source.images[entry.name].dtype == "uint8"
        assert torch.equal(travelled.load(entry).image, selection.load(entry).image)


def test_an_address_where_nothing_answers_is_one_line_in_time(
    planned: tuple[TrialPlan, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_clusters, "PATIENCE", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(BadInputError, match=f"no Ray cluster answered at {address} within 0.5 s"):
            run_here(*planned, address=address, progress=Told())


@pytest.mark.parametrize("address", ["", "auto", "head:", "ray://head"])
def test_a_malformed_address_is_refused(planned: tuple[TrialPlan, Setup], address: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form HOST:PORT"):
        run_here(*planned, address=address, progress=Told())
