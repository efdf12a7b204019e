"""SIGKILL at random moments, Ctrl-C and full disks: nothing is lost, doubled or half written."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import connection, forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import torch

from fedmjp.benchmarks.federation.guard import MODULE, PREFIX, SUPEREXEC, end_abandoned
from fedmjp.benchmarks.folder.pictures import png_of, save_png
from fedmjp.benchmarks.plan.trial_plan import TrialPlan
from fedmjp.benchmarks.running.runner import run_local
from fedmjp.benchmarks.running.workbench import Setup
from fedmjp.errors import FedmjpError, StoreError
from fedmjp.files import PARTIAL
from tests.experiments import Told, files, moved, rows, small_campaign
from tests.processes import alive, title

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.test_kills"])
KILLS = 20  # of a run in one process; tests/faults kills those of several
LONGEST = 0.6  # seconds of work before a kill
FIRST = "the first trials are in the store"
BYTES = 60_000  # that a file may have on the full disk


class Announced(Told):
    """Says when work begins, and when the first of several processes has done a job: kills are aimed at work."""

    def __init__(self, line: "Connection[object, object]") -> None:
        super().__init__()
        self.line = line

    def attacks(self, trials: int) -> None:
        self.line.send(trials)

    def trials(self, done: int) -> None:
        if done and not self.done:
            self.line.send(FIRST)
        super().trials(done)


def work(plan: TrialPlan, setup: Setup, workers: int, line: "Connection[object, object]", largest_file: int) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))  # Python ignores SIGXFSZ
    try:
        run_local(plan, setup, workers=workers, progress=Announced(line))
        line.send("done")
    except FedmjpError as error:
        line.send(error)
    except KeyboardInterrupt:
        line.send("interrupted")


class Run:
    """A run in a process of its own, which has announced its work."""

    def __init__(self, plan: TrialPlan, setup: Setup, *, workers: int = 1, largest_file: int = 0) -> None:
        forkserver.ensure_running()  # which outlives the run
        before = descendants()
        self.line, there = CONTEXT.Pipe()
        self.process: BaseProcess = CONTEXT.Process(target=work, args=(plan, setup, workers, there, largest_file))
        self.process.start()
        there.close()
        assert self.line.poll(60)
        self.announced = self.line.recv()
        # Its workers are children of the fork server, as it is itself.
        self.members = lambda: descendants() - before

    def end(self, number: signal.Signals) -> list[psutil.Process]:
        """Send a signal; which of the run's processes are left after a while."""
        members = self.members()
        assert self.process.pid
        with suppress(ProcessLookupError):  # the run may have ended by itself
            os.kill(self.process.pid, number)
        self.process.join(30)
        return psutil.wait_procs(members, timeout=20)[1]


def descendants() -> set[psutil.Process]:
    running = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended, and may wait to be reaped
            if "resource_tracker" not in "".join(process.cmdline()):
                running.add(process)
    return running


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrialPlan, Setup]:
    plan, setup = small_campaign(tmp_path_factory.mktemp("uninterrupted"))
    run_local(plan, setup, workers=1, progress=Told())
    return plan, setup


@pytest.mark.slow
def test_kill_9_at_random_moments_changes_nothing(tmp_path: Path, uninterrupted: tuple[TrialPlan, Setup]) -> None:
    plan, setup = uninterrupted[0], moved(uninterrupted[1], tmp_path)
    chance = random.Random(1)
    former: dict[str, object] = {}
    in_work = 0
    for _ in range(KILLS):
        run = Run(plan, setup)
        time.sleep(chance.uniform(0, LONGEST))
        in_work += run.process.is_alive()
        assert not run.end(signal.SIGKILL), "no process survives"
        now = rows(plan, setup)
        assert former.items() <= now.items(), "finished trials stay as they were"
        former = dict(now)
    assert in_work > KILLS / 2, "kills hit runs that had work"
    assert run_local(plan, setup, workers=1, progress=Told()) == 0
    assert rows(plan, setup) == rows(*uninterrupted)
    assert files(setup) == files(uninterrupted[1])


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_quickly_and_keeps_rows(
    tmp_path: Path, uninterrupted: tuple[TrialPlan, Setup]
) -> None:
    plan, setup = uninterrupted[0], moved(uninterrupted[1], tmp_path)
    run = Run(plan, setup, workers=2)
    assert run.line.recv() == FIRST
    began = time.monotonic()
    assert not run.end(signal.SIGINT)
    assert time.monotonic() - began < 10
    assert run.line.recv() == "interrupted"
    assert 0 < len(rows(plan, setup)) < len(plan.tasks)


def test_a_full_disk_ends_the_run_in_one_line_and_the_next_goes_on(
    tmp_path: Path, uninterrupted: tuple[TrialPlan, Setup]
) -> None:
    plan, setup = uninterrupted[0], moved(uninterrupted[1], tmp_path)
    run = Run(plan, setup, largest_file=BYTES)
    error = run.line.recv()
    if error == FIRST:
        error = run.line.recv()
    run.process.join()
    assert isinstance(error, StoreError)
    assert "finished trials are kept" in str(error)
    assert "\n" not in str(error)
    finished = rows(plan, setup)
    assert 0 < len(finished) < len(plan.tasks)
    assert {row["status"] for row in finished.values()} == {"ok"}
    run_local(plan, setup, workers=1, progress=Told())
    assert rows(plan, setup) == rows(*uninterrupted)
    assert files(setup) == files(uninterrupted[1])


def save_on_a_full_disk(path: Path, line: "Connection[object, object]") -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        save_png(png_of(torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))), path)
    except FedmjpError as error:
        line.send(str(error))


def test_a_picture_on_a_full_disk_is_whole_or_absent(tmp_path: Path) -> None:
    here, there = CONTEXT.Pipe()
    process = CONTEXT.Process(target=save_on_a_full_disk, args=(tmp_path / "x" / "picture.png", there))
    process.start()
    connection.wait([here, process.sentinel], timeout=60)
    assert "picture.png cannot be written: File too large" in here.recv()
    process.join()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_a_killed_run_left_half_written_is_cleaned_up(
    tmp_path: Path, uninterrupted: tuple[TrialPlan, Setup]
) -> None:
    plan, setup = uninterrupted[0], moved(uninterrupted[1], tmp_path)
    root = setup.output.pictures
    (root / "cell").mkdir(parents=True)
    (root / "cell" / f".{uuid4().hex}{PARTIAL}").write_bytes(b"half")
    outside = tmp_path / f".{uuid4().hex}{PARTIAL}"
    outside.touch()
    run_local(plan, setup, workers=1, progress=Told(), stop=lambda: True)
    assert not files(setup)
    assert outside.exists()


def test_a_superlink_ends_with_its_guard_and_what_it_started_with_the_next_superlink(tmp_path: Path) -> None:
    home = tmp_path / f"{PREFIX}of-a-test"
    home.mkdir()
    inherited = {**os.environ, "FLWR_HOME": str(home)}
    sleep = ["sleep", "100"]
    guard = subprocess.Popen([sys.executable, "-P", "-m", MODULE, home, *sleep], env=inherited, stdin=subprocess.PIPE)
    app = subprocess.Popen(sleep, env=inherited)
    try:
        deadline = time.monotonic() + 30
        while not (superlinks := psutil.Process(guard.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        end_abandoned(tmp_path)
        assert app.poll() is None, "what is guarded is left alone"
        guard.kill()
        guard.communicate()
        while alive(superlinks[0]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert app.poll() is None
        end_abandoned(tmp_path)
        assert app.poll() is not None
        assert not home.exists()
    finally:
        for process in (guard, app):
            process.kill()
            process.wait()


def test_a_superlink_without_its_superexec_is_ended(tmp_path: Path) -> None:
    (tmp_path / "flower-superexec").symlink_to(Path("/bin/sleep").resolve())
    superlink = [sys.executable, "-c", "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(100)"]
    superlink += [str(tmp_path / "flower-superexec"), "100"]
    home = tmp_path / "home"
    home.mkdir()
    guard = subprocess.Popen([sys.executable, "-P", "-m", MODULE, home, *superlink], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        below: list[psutil.Process] = []
        while not any(found is not None and found[0] in SUPEREXEC for found in map(title, below)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
            below = psutil.Process(guard.pid).children(recursive=True)
        below[1].kill()
        assert guard.wait(30) == 0
        assert not below[0].is_running()
    finally:
        guard.kill()
        guard.wait()
