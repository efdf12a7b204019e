"""Real Flower runs through the private SuperLink: what crosses the wire, who sees what, what is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedmjp.attacks.adversary import Adversary
from fedmjp.benchmarks.federation.connection import Connection, environment, free_port, program
from fedmjp.benchmarks.federation.guard import marked
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.benchmarks.federation.superlink import CONNECTION, PrivateSuperLink
from fedmjp.metrics.scoring import score_pictures
from fedmjp.models.build import build_vit
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.scenario import Scenario, make_run_config
from fedmjp.settings import Setting
from tests.conftest import ROOT
from tests.experiments import record_directly
from tests.processes import heed_interrupts, listeners, wait_until

pytestmark = pytest.mark.slow

SCENARIO = Scenario.parse(
    {
        "model": {"name": "deit_tiny", "image_size": 64, "patch_size": 8},
        "defences": ["mjp", "gaussian:noise=0.001"],
        "clients": 2,
        "pictures_per_client": 2,
    }
)
OPTIONS = "--model deit_tiny --defence mjp --defence gaussian:noise=0.001 --pictures-per-client 2"
FEDMJP = [sys.executable, "-c", "from fedmjp.cli import main; main()"]
AUDITING = Path(__file__).parent / "auditing"


@dataclass(frozen=True)
class FederatedRun:
    """A run of `fedmjp record` from an installed wheel, outside the clone, watched."""

    folder: RunFolder
    output: str
    notes: list[str]
    left_behind: list[str]


WORKER = "PYTEST_XDIST_WORKER"  # tells pytest's processes apart, and whatever they start


def family(marker: str, since: float) -> list[str]:
    return [command for _, command in processes(marker, since)]


def processes(marker: str, since: float) -> list[tuple[psutil.Process, str]]:
    """Processes of a run: those with the marker in their environment or in a private SuperLink's folder.

    Runs that tests start beside it, in pytest's other process, are not of its family.
    """
    found, own = [], os.environ.get(WORKER)
    for process in psutil.process_iter():
        try:
            environment = environment_of(process)
            if environment.get(WORKER, own) != own:
                continue
            marked = environment.get("FEDMJP_TEST") == marker
            inside = process.create_time() >= since and process.cwd().startswith("/tmp/fedmjp-")
            if marked or inside:
                found.append((process, " ".join(process.cmdline())))
        except psutil.Error:
            continue
    return found


def environment_of(process: psutil.Process) -> dict[str, str]:
    """A process's environment, or that of its next ancestor with any: Ray's agents wipe theirs."""
    one: psutil.Process | None = process
    while one is not None:
        if environment := one.environ():
            return environment
        one = one.parent()
    return {}


@pytest.fixture(scope="module")
def federated(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> FederatedRun:
    root = tmp_path_factory.mktemp("federated")
    installed, elsewhere, output = root / "installed", root / "elsewhere", root / "output"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", installed, wheel]
    subprocess.run(pip, check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(installed), str(AUDITING)]),
        "AUDIT_RUN": str(output),
        "AUDIT_NOTES": str(root / "notes"),
        "FEDMJP_TEST": str(root),
    }
    where = [sys.executable, "-c", "import fedmjp.benchmarks; print(fedmjp.benchmarks.__file__, fedmjp.__file__)"]
    origin = subprocess.run(where, cwd=elsewhere, env=environment, capture_output=True, text=True, check=True).stdout
    assert origin.count(str(installed)) == 2, "the wheel is what runs"
    started = time.time()
    done = subprocess.run(
        [*FEDMJP, "record", *OPTIONS.split(), "--image-size", "64", "--patch-size", "8", "--output", output],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left_behind = family(str(root), started)
    assert list(elsewhere.iterdir()) == []
    notes = (root / "notes").read_text().splitlines()
    return FederatedRun(RunFolder(output), done.stdout, notes, left_behind)


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The same uploads computed in this process, with as many threads as a Flower client gets."""
    folder = RunFolder(tmp_path_factory.mktemp("direct"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    record_directly([SCENARIO], folder)
    torch.set_num_threads(threads)
    return folder


def by_picture(folder: RunFolder) -> dict[tuple[str, ...], tuple[PrivateBatch, Upload]]:
    return {names: folder.record(SCENARIO, path) for names, (path,) in folder.index(SCENARIO).items()}


def test_direct_and_federated_give_the_same_tensors(federated: FederatedRun, direct: RunFolder) -> None:
    ours, theirs = by_picture(direct), by_picture(federated.folder)
    assert ours.keys() == theirs.keys()
    assert len(ours) == SCENARIO.uploads
    for key, (batch, upload) in ours.items():
        their_batch, their_upload = theirs[key]
        for name in ("clean", "shuffled", "mask", "source", "labels"):
            assert torch.equal(getattr(batch, name), getattr(their_batch, name)), name
        assert upload.weights == their_upload.weights, "the server sent the weights that direct mode builds"
        assert upload.tensors.keys() == their_upload.tensors.keys()
        for name, tensor in upload.tensors.items():
            assert torch.allclose(tensor, their_upload.tensors[name], rtol=1e-5, atol=1e-9), name


def test_direct_and_federated_give_the_same_scores(federated: FederatedRun, direct: RunFolder) -> None:
    adversary = Adversary(build_vit(SCENARIO.network), SCENARIO.threat, seed=0)
    ours, theirs = by_picture(direct), by_picture(federated.folder)
    for key, (batch, upload) in ours.items():
        for setting in (Setting.B, Setting.C):
            found = [
                score_pictures(
                    adversary.reconstruct("patch_embedding", [each], {}, on_progress=lambda *_: None)[0],
                    batch,
                    setting,
                    metrics=("mse", "psnr", "ssim", "fft2d"),
                    protocol="float",
                )
                for each in (upload, theirs[key][1])
            ]
            for name, value in found[0].items():
                assert value is not None
                assert torch.allclose(value, found[1][name], rtol=1e-2, atol=1e-6), (key, setting, name)


def test_server_side_code_never_opens_the_evaluators_folder(federated: FederatedRun) -> None:
    seen = {tuple(note.split()[:2]) for note in federated.notes}
    assert ("server", "uploads") in seen, "the watch recognises the server"
    assert ("client", "evaluator") in seen, "the watch sees what clients leave"
    assert ("launcher", "evaluator") in seen, "the watch sees what the evaluator reads"
    assert ("server", "evaluator") not in seen
    assert ("client", "uploads") not in seen


def test_the_run_leaves_no_process_behind_and_says_where_records_are(federated: FederatedRun) -> None:
    assert federated.left_behind == []
    assert "4 uploads in" in federated.output
    assert (federated.folder.root / "manifest.json").exists()


@pytest.mark.parametrize("strike", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_an_interrupted_run_leaves_no_process_behind(tmp_path: Path, strike: signal.Signals) -> None:
    environment = {**os.environ, "FEDMJP_TEST": str(tmp_path)}
    arguments = ["record", "--model", "deit_tiny", "--image-size", "64", "--patch-size", "8"]
    arguments += [
        "--pictures-per-client",
        "4",
        "--uploads-per-picture",
        "2",
    ]  # not over too soon
    started = time.time()
    process = subprocess.Popen(
        [*FEDMJP, *arguments, "--output", tmp_path / "output"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    wait_until(lambda: any("ray::" in command for command in family(str(tmp_path), started)), seconds=120)
    wait_until(lambda: len(listeners(each for each, _ in processes(str(tmp_path), started))) >= 6, seconds=60)
    open_to = listeners(each for each, _ in processes(str(tmp_path), started))
    assert {listener.ip for listener in open_to if not ip_address(listener.ip).is_loopback} == set()
    process.send_signal(strike)
    _, printed = process.communicate(timeout=60)
    if strike is signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted" in printed
        assert family(str(tmp_path), started) == []
    # After kill -9 nobody is left to wait for the guard, so the test does.
    wait_until(lambda: not family(str(tmp_path), started), seconds=20)
    time.sleep(2)
    assert family(str(tmp_path), started) == [], "nothing started anew"


def test_the_private_superlink_obeys_nobody_else_as_flowers_own_does(tmp_path: Path) -> None:
    def ask(stranger: Path, port: int) -> dict[str, Any]:
        (stranger / "config.toml").write_text(
            f'[superlink]\ndefault = "link"\n[superlink.link]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        return Connection(stranger, "link").ask("ls", "link", "--format", "json")

    with PrivateSuperLink(simulation=False) as superlink:
        assert superlink.ask("ls", CONNECTION, "--format", "json")["success"]
        (listener,) = listeners(marked(superlink.home))
        refused = ask(tmp_path, listener.port)
        assert not refused["success"]
        assert "Authentication failed" in refused["error-message"]
        assert (superlink.home / "credentials.yaml").stat().st_mode & 0o777 == 0o600
    port = free_port()
    command = [program("flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(
        command, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as flowers:
        try:
            wait_until(lambda: bool(ask(tmp_path, port)["success"]), seconds=60)
        finally:
            flowers.terminate()


def test_flwr_run_works_in_the_clone_as_flowers_users_expect(tmp_path: Path) -> None:
    clone = tmp_path / "fedmjp"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", clone], check=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "FLWR_HOME": str(tmp_path / "flower"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FEDMJP_TEST": str(tmp_path),
    }
    started = time.time()
    moving = SCENARIO.model_copy(update={"server_learning_rate": 0.1})
    run_config = f"scenarios='{make_run_config([moving]).scenarios}'"  # Flower reads no escaped quotes here
    try:
        done = subprocess.run(
            ["flwr", "run", ".", "--stream", "--run-config", run_config],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        listed = subprocess.run(
            ["flwr", "ls", "--format", "json"], cwd=clone, env=environment, capture_output=True, text=True, check=True
        )
    finally:  # the SuperLink that Flower starts for itself stays until it is stopped
        for process in psutil.process_iter(["cmdline"]):
            if "--port" in (process.info["cmdline"] or []) and str(port) in process.info["cmdline"]:
                with suppress(psutil.NoSuchProcess):  # one of them ends with the other
                    process.terminate()
    printed = done.stdout + done.stderr
    assert "[ROUND 2/2] done" in printed, printed[-3000:]
    assert [run["status"] for run in json.loads(listed.stdout)["runs"]] == ["finished:completed"]
    wait_until(lambda: not family(str(tmp_path), started), seconds=60)
