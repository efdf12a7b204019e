"""Workers that Ray serves: on this machine for one run, or on a cluster that is already running."""

import logging
import math
import os
import platform
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import ray
import torch

from fedmjp import provenance
from fedmjp.benchmarks.folder.output import MARK, OutputFolder
from fedmjp.benchmarks.running.engine import Job
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.workers import Bench, Setup
from fedmjp.errors import BadInputError, ConfigError, FedmjpError, OutputError

# Workers import first from where Ray was joined: there a user's own folder could have the name of one of our packages.
HOME = Path(__file__).resolve().parents[2]
PATIENCE = 10  # seconds that a cluster has to answer
OBJECTS = 100_000_000  # bytes that jobs and the setup may take while they travel on one machine
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no word about what a later Ray will do
}
ON_THIS_MACHINE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "5"}  # else Ray's agents outlive a killed run by a minute


class WorkerError(FedmjpError):
    """Worker processes cannot do anything. Remedy: see the message; fewer workers need less memory."""


class RayTeam:
    """Workers, each an actor in its slot with at most one job, started with its first one.

    Args:
        setup: What they work with; it says how many threads each has.
        size: Number of slots.
        gpus: For each of them, such as 0.5; on CPU each has a core instead.
    """

    def __init__(self, setup: Setup, size: int, gpus: float) -> None:
        self.size = size
        self._setup = ray.put(setup)
        self._here = provenance.code_digest()
        self._actor = ray.remote(num_gpus=gpus, num_cpus=0 if gpus else 1)(_Remote)
        self._actors: dict[int, Any] = {}
        self._ready: list[Any] = []
        self._running: dict[Any, int] = {}

    def give(self, slot: int, job: Job) -> None:
        """Start a job, and an actor for it if need be."""
        if slot not in self._actors:
            self._actors[slot] = self._actor.remote(self._setup, self._here)
            self._ready.append(self._actors[slot].__ray_ready__.remote())
        self._running[self._actors[slot].work.remote(job)] = slot

    def wait(self) -> tuple[int, str | None]:
        """Wait until a job has ended, well or with its worker.

        Returns:
            The slot, and what its worker died of; None if it lives. The slot's next job starts another worker.

        Raises:
            FedmjpError: If the job ended with an error that ends the run.
            WorkerError: If no worker has got to work.
        """
        (ended,), _ = ray.wait(list(self._running), num_returns=1)
        slot = self._running.pop(ended)
        try:
            ray.get(ended)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, FedmjpError):
                raise cause from None
            ray.kill(self._actors.pop(slot))
            reason = str(error).strip().splitlines()[-1].strip()
            if not any(map(_succeeded, self._ready)):
                raise WorkerError(
                    f"a worker process died before it got to work ({reason}); try fewer workers"
                ) from None
            return slot, f"{reason} Mostly for want of memory: lower --workers"
        return slot, None


def _succeeded(call: Any) -> bool:
    try:
        ray.get(call, timeout=0)
    except ray.exceptions.RayError:
        return False
    return True


class _Remote:
    """A worker in a process of its own; it works where fedmjp and the output folder are the same."""

    def __init__(self, setup: Setup, code: str) -> None:
        self._setup, self._code = setup, code
        torch.set_num_threads(setup.threads or 1)

    def work(self, job: Job) -> None:
        """Work a job off."""
        self._bench.engine(job.part).work(job)

    @cached_property
    def _bench(self) -> Bench:
        machine, root = platform.node(), self._setup.output.root
        if provenance.code_digest() != self._code:
            raise WorkerError(f"{machine} of the Ray cluster has another fedmjp; install the same on every machine")
        if not (root / MARK).exists():
            raise OutputError(f"{machine} of the Ray cluster does not see {root}; name a shared --output")
        return self._setup.bench(RunProgress())


@contextmanager
def local_team(setup: Setup, workers: int) -> Iterator[RayTeam]:
    """Workers of a Ray on this machine, which ends with the run, however that ends."""
    os.environ.update(ON_THIS_MACHINE)
    gpus = torch.cuda.device_count() if setup.device == "cuda" else 0
    threads = setup.threads or max(1, provenance.hardware()["cores"] // workers)
    with _connected(
        "local", num_cpus=workers, num_gpus=gpus, object_store_memory=OBJECTS, _node_ip_address="127.0.0.1"
    ):
        yield RayTeam(_travelling(setup, threads), workers, 1 / math.ceil(workers / gpus) if gpus else 0)


@contextmanager
def cluster_team(setup: Setup, address: str) -> Iterator[RayTeam]:
    """Workers on a cluster, as many as it has cores, or GPUs on CUDA.

    Raises:
        BadInputError: If it does not answer, or cannot do this work.
    """
    _knock(address)
    with _connected(address):
        _refuse_files_of_one_machine(setup)
        kind = "GPU" if setup.device == "cuda" else "CPU"
        size = int(ray.cluster_resources().get(kind, 0))
        if not size:
            raise BadInputError(f"the Ray cluster has no {kind}; take another --device")
        yield RayTeam(_travelling(setup, setup.threads or 1), size, int(kind == "GPU"))


def _travelling(setup: Setup, threads: int) -> Setup:
    """As processes need it that start in another folder."""
    return replace(setup, output=OutputFolder(setup.output.root.absolute()), threads=threads)


@contextmanager
def _connected(address: str, **options: Any) -> Iterator[None]:
    """Ray, connected; at the end disconnected, which ends our workers and leaves a cluster running."""
    os.environ.update(ENVIRONMENT)
    try:
        with chdir(HOME):
            ray.init(address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise BadInputError(f"the Ray cluster at {address} cannot be joined: {reason}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--ray {address!r} is not of the form HOST:PORT")
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=PATIENCE)
        except grpc.FutureTimeoutError:
            raise BadInputError(
                f"no Ray cluster answered at {address} within {PATIENCE} s; start one with `ray start --head`"
            ) from None


def _refuse_files_of_one_machine(setup: Setup) -> None:
    machines = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    if (not setup.database or setup.database.startswith("sqlite")) and machines != {platform.node()}:
        raise ConfigError(
            f"the cluster has {', '.join(sorted(machines))}, and SQLite files are safe on one machine alone: "
            "give a PostgreSQL database"
        )
