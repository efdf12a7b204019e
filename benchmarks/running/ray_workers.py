"""Works a plan off on a Ray cluster that is already running."""

import logging
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.folder.output import MARK, OutputFolder
from benchmarks.plan.experiment import Plan
from benchmarks.running.engine import Job, JobReport, Silent, jobs
from benchmarks.running.workers import Bench, Death, Foreman, JobProgress, Outcome, Setup, WorkerError
from fedmjp import provenance
from fedmjp.errors import BadInputError, ConfigError, FedmjpError, OutputError

PATIENCE = 10  # seconds that a cluster has to answer


def run_ray(
    plan: Plan, setup: Setup, *, address: str, progress: JobProgress, stop: Callable[[], bool] = lambda: False
) -> int:
    """Run what is missing of a plan on a cluster, one worker per core, or per GPU on CUDA.

    Every machine of it needs this fedmjp, the pictures, the weights, the database and the output folder
    under the same names.

    Args:
        plan: Whose trials are not finished, or failed, are run.
        setup: For the plan.
        address: HOST:PORT of the cluster's head.
        progress: Is told what happens.
        stop: Asked before each job; once it holds, no more are started.

    Returns:
        Trials that were left because of ``stop``.

    Raises:
        BadInputError: If the cluster does not answer, or cannot do this work.
        StoreError: If the database failed.
        OutputError: If pictures cannot be written.
        WorkerError: If a machine of the cluster is not set up as it must be.
    """
    setup = replace(setup, output=OutputFolder(setup.output.root.absolute()))
    with _connected(address) as ray:
        _refuse_files_of_one_machine(ray, setup)
        size = _slots(ray, setup.device)
        bench = Bench(setup, Silent())
        return Foreman(plan, setup, bench, progress, stop).hand_out(jobs(plan, bench.store), RayTeam(ray, setup, size))


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected; disconnected at the end, which ends our workers and leaves the cluster running."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # no word about what a later Ray will do
    try:
        import ray  # noqa: PLC0415 (takes seconds)
    except ImportError:
        raise BadInputError("--ray needs ray, which is not installed; pip install 'flwr[simulation]'") from None
    _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise BadInputError(f"the Ray cluster at {address} cannot be joined: {reason}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself would try for minutes."""
    import grpc  # type: ignore[import-untyped] # noqa: PLC0415 (comes with Flower, as Ray does)

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


def _refuse_files_of_one_machine(ray: Any, setup: Setup) -> None:
    machines = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    if (not setup.database or setup.database.startswith("sqlite")) and machines != {platform.node()}:
        raise ConfigError(
            f"the cluster has {', '.join(sorted(machines))}, and SQLite files are safe on one machine alone: "
            "give a PostgreSQL database"
        )


def _slots(ray: Any, device: str) -> int:
    kind = "GPU" if device == "cuda" else "CPU"
    count = int(ray.cluster_resources().get(kind, 0))
    if not count:
        raise BadInputError(f"the Ray cluster has no {kind}; take another --device")
    return count


class RayTeam:
    """Actors on a cluster, each started with its first job."""

    def __init__(self, ray: Any, setup: Setup, size: int) -> None:
        self.size = size
        self._ray = ray
        self._setup = ray.put(replace(setup, threads=setup.threads or 1))
        self._here = provenance.code_digest()
        needs = {"num_gpus": 1, "num_cpus": 0} if setup.device == "cuda" else {"num_cpus": 1}
        self._actor = ray.remote(**needs)(_Remote)
        self._actors: dict[int, Any] = {}
        self._running: dict[Any, int] = {}

    def give(self, slot: int, job: Job) -> None:
        """Start a job, and an actor for it if need be."""
        if slot not in self._actors:
            self._actors[slot] = self._actor.remote(self._setup, self._here)
        self._running[self._actors[slot].work.remote(job)] = slot

    def wait(self) -> list[tuple[int, Outcome]]:
        """Wait until a job has ended."""
        (ended,), _ = self._ray.wait(list(self._running), num_returns=1)
        slot = self._running.pop(ended)
        try:
            outcome: Outcome = self._ray.get(ended)
        except self._ray.exceptions.RayError as error:
            self._ray.kill(self._actors.pop(slot))
            outcome = Death(_last_line(error))
        return [(slot, outcome)]


class _Remote:
    """A worker on a machine of the cluster."""

    def __init__(self, setup: Setup, code: str) -> None:
        import torch  # noqa: PLC0415

        torch.set_num_threads(setup.threads or 1)
        self._bench: Bench | FedmjpError = _misfit(setup, code) or _opened(setup)

    def work(self, job: Job) -> JobReport | FedmjpError:
        """Work a job off; errors that end the run are values."""
        return self._bench.attempt(job) if isinstance(self._bench, Bench) else self._bench


def _misfit(setup: Setup, code: str) -> FedmjpError | None:
    machine = platform.node()
    if provenance.code_digest() != code:
        return WorkerError(f"{machine} of the Ray cluster has another fedmjp; install the same on every machine")
    if not (setup.output.root / MARK).exists():
        return OutputError(f"{machine} of the Ray cluster does not see {setup.output.root}; name a shared --output")
    return None


def _opened(setup: Setup) -> Bench | FedmjpError:
    try:
        return Bench(setup, Silent())
    except FedmjpError as error:
        return error


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
