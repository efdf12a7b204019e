"""A Ray that a run starts for itself: strangers are refused, and whatever of it dies is told in one line."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import grpc
import psutil
import pytest
import ray
import yaml

from fedmjp.benchmarks import private_ray
from fedmjp.benchmarks.private_ray import RayError
from fedmjp.benchmarks.running.ray_driver import ray_team
from tests.experiments import small_campaign
from tests.processes import alive, heed_interrupts, listeners, title, wait_until

# It has no secret and an empty environment; what a Ray of one machine calls itself, it knows.
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
CAMPAIGN = {
    "name": "watched",
    "data": {"pictures": 4},
    "image_size": 64,
    "patch_size": 8,
    "metrics": ["mse", "psnr"],
    "grids": [{"models": ["deit_tiny"], "attacks": ["patch_embedding", "grey"]}],
    "seeds": list(range(200)),
}


def visit(address: str) -> subprocess.CompletedProcess[str]:
    environment = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "2"}
    command = [sys.executable, "-c", STRANGER, address]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False)


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
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator["subprocess.Popen[str]"]:
    """A campaign with two workers, one of which works."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "campaign.yaml").write_text(yaml.safe_dump(CAMPAIGN))
    command = [sys.executable, "-m", "fedmjp", "campaign", "run", "campaign.yaml", "--output", "run", "--workers", "2"]
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OWNER": "the owner's"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    ) as process:
        try:
            wait_until(lambda: process.poll() is not None or is_at_work(process), seconds=300)
            assert process.poll() is None, "it works"
            yield process
        finally:
            process.kill()


def is_at_work(process: "subprocess.Popen[str]") -> bool:
    return any("ray::Worker.work" in name for name, _ in titles(process))


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def titles(process: "subprocess.Popen[str]") -> list[tuple[str, list[str]]]:
    return [each for each in map(title, family(process)) if each is not None]


def gcs(process: "subprocess.Popen[str]") -> psutil.Process:
    return next(each for each in family(process) if each.name() == "gcs_server")


@pytest.fixture
def unlocked() -> Iterator[str]:
    """Address of a Ray as it is by itself."""
    with subprocess.Popen(
        [sys.executable, "-c", OPEN],
        env={**os.environ, "OWNER": "the owner's"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("\n")


@pytest.mark.slow
def test_a_stranger_runs_code_in_a_ray_as_it_is_by_itself_and_not_in_ours(
    unlocked: str, run: "subprocess.Popen[str]"
) -> None:
    assert visit(unlocked).stdout.strip() == "the owner's", "the stranger is able to"
    (listener,) = listeners([gcs(run)])
    refused = visit(f"127.0.0.1:{listener.port}")
    assert refused.returncode == 1
    assert not refused.stdout
    assert "Unauthenticated" in refused.stderr


@pytest.mark.slow
def test_every_listener_of_a_run_is_of_this_machine_and_refuses_strangers(run: "subprocess.Popen[str]") -> None:
    found = listeners(family(run))
    assert len(found) >= 5, "GCS, raylet twice, agent, driver, worker"
    assert {listener.ip for listener in found if not ip_address(listener.ip).is_loopback} == set()
    refusing = [listener.port for listener in found if answers(listener.port) == {grpc.StatusCode.UNAUTHENTICATED}]
    assert len(refusing) >= 4


@pytest.mark.slow
def test_the_secret_is_in_the_environment_of_the_run_and_nowhere_else(run: "subprocess.Popen[str]") -> None:
    environment = gcs(run).environ()
    secret, folder = environment["RAY_AUTH_TOKEN"], Path(environment["RAY_TMPDIR"])
    assert len(secret) == 64
    assert "RAY_AUTH_TOKEN" not in psutil.Process(run.pid).environ()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not [words for _, words in titles(run) if secret in " ".join(words)]
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            assert not path.is_file() or secret.encode() not in path.read_bytes()


@pytest.mark.slow
def test_ctrl_c_pressed_twice_is_one_line_and_leaves_nothing(run: "subprocess.Popen[str]") -> None:
    """The last test of the run."""
    folder, processes = Path(gcs(run).environ()["RAY_TMPDIR"]), family(run)
    run.send_signal(signal.SIGINT)
    time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    _, printed = run.communicate(timeout=60)
    assert (run.returncode, printed) == (130, "Error: interrupted; whatever was finished is kept\n")
    assert not psutil.wait_procs(processes, timeout=10)[1]
    assert not folder.exists()


@pytest.mark.slow
def test_a_ray_that_loses_a_part_of_its_own_ends_the_run_in_one_line(tmp_path: Path) -> None:
    _, setup = small_campaign(tmp_path, seeds=(0,))
    with ray_team(setup, workers=1) as team:
        next(process for process in team.family if process.name() == "raylet").kill()

        def ask() -> None:
            while True:
                team.workers()
                time.sleep(0.2)

        with pytest.raises(RayError) as error:
            ask()
    line = r"a process of Ray on this machine was killed, .+ --workers; whatever was finished is kept, and .+"
    assert re.fullmatch(line, str(error.value))
    assert not [process for process in team.family if alive(process)]


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
