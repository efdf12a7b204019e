"""Ray's driver in a process of its own.

Ray ends the process that it serves, without a word, when it loses a part of its own; and what it is told by environment
variables it reads once in the life of a process. So this process has neither Ray nor its secret.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from fedmjp.benchmarks import private_ray
from fedmjp.benchmarks.federation.guard import below, end, is_alive
from fedmjp.benchmarks.private_ray import RayError
from fedmjp.benchmarks.running.engine import StackResults, UploadJob
from fedmjp.benchmarks.running.workbench import Setup
from fedmjp.benchmarks.uploads.source import described
from fedmjp.errors import KILLED, Failure, FedmjpError
from fedmjp.processes import end_with_parent
from fedmjp.running import KEPT

PREFIX, LOG = "fedmjp-ray-", "driver.log"  # of folders, and a file in each
STOP_SECONDS = 10  # that a driver has to take leave of a cluster


class RayDriver:
    """A team of workers as ``RayTeam`` is, behind the process that serves it.

    Args:
        process: Of Ray's driver.
        pipe: To it.
        place: Where Ray runs, as messages name it.
    """

    def __init__(self, process: psutil.Process, pipe: Connection, place: str) -> None:
        self.process, self._pipe, self._place = process, pipe, place
        self.family = {process}

    def workers(self) -> list[int]:
        """List the numbers of the workers that there is room for."""
        numbers: list[int] = self._ask("workers")
        return numbers

    def give(self, worker: int, job: UploadJob, *, alone: bool) -> None:
        """Start a job, as ``RayTeam.give`` does.

        Args:
            worker: Which one has it.
            job: What it is to do.
            alone: Whether it has a new worker to itself.
        """
        self._ask("give", worker, job, alone=alone)

    def wait(self) -> tuple[int, StackResults | Failure | None]:
        """Wait for results of a job, or its end, as ``RayTeam.wait`` does."""
        outcome: tuple[int, StackResults | Failure | None] = self._ask("wait")
        return outcome

    def receive(self) -> Any:
        """Receive an answer, or the error that there is in its place.

        Raises:
            RayError: If the driver has ended.
        """
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise RayError(f"a process of {self._place} {KILLED}; {KEPT}") from None
        self.family |= set(below(self.process))
        if isinstance(answer, FedmjpError):
            raise answer
        return answer

    def _ask(self, name: str, *arguments: object, **options: object) -> Any:
        with suppress(OSError):  # it has ended, as the answer then says
            self._pipe.send((name, arguments, options))
        return self.receive()


@contextmanager
def ray_team(setup: Setup, *, workers: int = 0, address: str = "") -> Iterator[RayDriver]:
    """Have workers in processes of this machine, or on a cluster; nothing of them is left after the context.

    Args:
        setup: Of the run.
        workers: Number of processes of this machine.
        address: HOST:PORT of a cluster's head, in their place.

    Raises:
        RayError: If Ray cannot start, or ends.
        BadInputError: If the cluster does not answer, or cannot do this work.
        WorkerError: If workers cannot do anything.
    """
    folder = private_ray.socket_folder(PREFIX)
    try:
        environment = {} if address else {**private_ray.environment(), "RAY_TMPDIR": str(folder)}
        spawn = multiprocessing.get_context("spawn")
        pipe, remote_end = spawn.Pipe()
        process = spawn.Process(target=lead, args=(remote_end, folder / LOG, environment, setup, workers, address))
        process.start()
        remote_end.close()
        place = f"the Ray cluster at {address}" if address else "Ray on this machine"
        team = RayDriver(psutil.Process(process.pid), pipe, place)
        try:
            team.receive()
            yield team
        finally:
            with _uninterrupted():
                if address:  # the cluster lives on, and ends our workers when we take leave
                    process.terminate()
                    process.join(STOP_SECONDS)
                end(partial(_living, team.family | set(below(team.process))))
                process.join()
                pipe.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def lead(pipe: Connection, log: Path, environment: Mapping[str, str], setup: Setup, workers: int, address: str) -> None:
    """Start Ray in this process, and do what comes through a pipe until this process is ended.

    Args:
        pipe: Brings calls of ``RayTeam``, and takes their answers.
        log: File for what Ray prints.
        environment: Of Ray.
        setup: Of the run.
        workers: As of ``ray_team``.
        address: As of ``ray_team``.
    """
    end_with_parent()
    os.setsid()  # Ctrl-C reaches our parent alone, which ends us
    with log.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ.update(environment)
    try:
        from fedmjp.benchmarks.running.ray_clusters import cluster_team, local_team  # noqa: PLC0415 (reads these)

        with cluster_team(setup, address) if address else local_team(setup, workers) as team:
            answer = None
            while True:
                pipe.send(answer)
                name, arguments, options = pipe.recv()
                answer = getattr(team, name)(*arguments, **options)
    except FedmjpError as error:
        pipe.send(error)
    except Exception as error:  # noqa: BLE001 (told by our parent)
        pipe.send(RayError(f"Ray failed ({' '.join(described(error).split())}); {KEPT}"))


def _living(family: set[psutil.Process]) -> set[psutil.Process]:
    return {process for process in family if is_alive(process)}


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C: whoever presses it again would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
