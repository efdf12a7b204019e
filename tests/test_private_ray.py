"""A Ray that a run starts for itself: strangers are refused, and whatever of it dies is told in one line."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import grpc
import psutil
import pytest
import ray

from fedmjp.benchmarks import private_ray
from fedmjp.benchmarks.private_ray import RayError
from fedmjp.benchmarks.running.engine import jobs
from fedmjp.benchmarks.running.ray_driver import RayDriver, ray_team
from tests.experiments import small_campaign
from tests.processes import alive, listeners

# It has no secret and an empty environment; what a Ray of its own would be called, it knows.
STRANGER = """
import os, sys
import ray
ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
owner = ray.remote(num_cpus=0)(lambda: os.environ["OWNER"])
print(ray.get(owner.remote(), timeout=30))
"""
OPEN = """
import ray
about = ray.init("local", num_cpus=1, object_store_memory=80_000_000, include_dashboard=False)
print(about.address_info["gcs_address"])
input()
"""
METHODS = re.compile(r"'(/ray\.rpc\.[\w.]+/\w+)'")  # of the services that Ray brings stubs of


def visit(address: str) -> subprocess.CompletedProcess[str]:
    environment = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "2"}
    command = [sys.executable, "-c", STRANGER, address]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False)


def services() -> list[str]:
    stubs = (Path(ray.__file__).parent / "core" / "generated").glob("*_pb2_grpc.py")
    return sorted({method for stub in stubs for method in METHODS.findall(stub.read_text())})


def answers(port: int) -> set[grpc.StatusCode]:
    """What a port answers to calls without a secret, but that it does not know the call."""
    codes = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in services():
            try:
                channel.unary_unary(method)(b"", timeout=5)
                codes.add(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.add(error.code())
    return codes - {grpc.StatusCode.UNIMPLEMENTED}


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayDriver]:
    """Two workers, one of which works; nothing of them is left."""
    plan, setup = small_campaign(tmp_path_factory.mktemp("team"), seeds=(0,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OWNER", "the owner's")
        with ray_team(setup, workers=2) as team:
            folder = Path(gcs(team).environ()["RAY_TMPDIR"])
            team.give(team.workers()[0], jobs(plan)[0], alone=False)
            team.wait()
            yield team
    assert not [process for process in team.family if alive(process)]
    assert not folder.exists()


def gcs(team: RayDriver) -> psutil.Process:
    return next(process for process in team.family if alive(process) and process.name() == "gcs_server")


@pytest.fixture
def unlocked() -> Iterator[str]:
    """Address of a Ray as it is by itself."""
    environment = {**os.environ, "OWNER": "the owner's"}
    with subprocess.Popen(
        [sys.executable, "-c", OPEN],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("\n")


@pytest.mark.slow
def test_a_stranger_runs_code_in_a_ray_as_it_is_by_itself_and_not_in_ours(unlocked: str, team: RayDriver) -> None:
    assert visit(unlocked).stdout.strip() == "the owner's", "the stranger is able to"
    (listener,) = listeners([gcs(team)])
    refused = visit(f"127.0.0.1:{listener.port}")
    assert refused.returncode == 1
    assert not refused.stdout
    assert "Unauthenticated" in refused.stderr


@pytest.mark.slow
def test_every_listener_of_a_run_is_of_this_machine_and_refuses_strangers(team: RayDriver) -> None:
    found = listeners(process for process in team.family if alive(process))
    assert len(found) >= 5, "GCS, raylet twice, agent, driver, worker"
    assert {listener.ip for listener in found if not ip_address(listener.ip).is_loopback} == set()
    refusing = [listener.port for listener in found if answers(listener.port) == {grpc.StatusCode.UNAUTHENTICATED}]
    assert len(refusing) >= 4


@pytest.mark.slow
def test_the_secret_is_in_the_environment_of_the_run_and_nowhere_else(team: RayDriver) -> None:
    living = [process for process in team.family if alive(process)]
    environment = gcs(team).environ()
    secret, folder = environment["RAY_AUTH_TOKEN"], Path(environment["RAY_TMPDIR"])
    assert len(secret) == 64
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert folder.stat().st_mode & 0o777 == 0o700
    for process in living:
        with suppress(psutil.NoSuchProcess):
            assert secret not in " ".join(process.cmdline())
    for path in folder.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes()


def test_no_two_runs_have_the_same_secret() -> None:
    first, second = private_ray.environment(), private_ray.environment()
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]


def test_a_ray_that_would_answer_anybody_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_ray, "version", lambda _: "2.51.1")
    with pytest.raises(RayError, match=r"Ray 2\.51\.1 runs the code of whoever connects; pip install 'ray>=2\.52'"):
        private_ray.environment()


def test_a_temporary_folder_too_deep_for_sockets_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    monkeypatch.setattr(private_ray, "USUAL", str(tmp_path / "missing"))
    with pytest.raises(RayError, match=rf"neither {tmp_path}/missing nor {deep} is; set TMPDIR$"):
        private_ray.socket_folder("fedmjp-ray-")
    assert not list(deep.iterdir())


@pytest.mark.slow
def test_a_ray_that_loses_a_part_of_its_own_ends_the_run_in_one_line(team: RayDriver) -> None:
    """The last test: nothing of the team is left."""
    next(process for process in team.family if process.name() == "raylet").kill()

    def ask() -> None:
        while True:
            team.workers()

    with pytest.raises(RayError) as error:
        ask()
    line = r"(a process of Ray on this machine was killed, .+|Ray failed \(.+\)); whatever was finished is kept, and .+"
    assert re.fullmatch(line, str(error.value))
