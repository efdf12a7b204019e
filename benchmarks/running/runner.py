"""Runs what is missing of a plan, where and with how many processes it is asked to."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import torch

from fedmjp.benchmarks.campaign.prepare import Prepared
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.plan.experiment import Plan
from fedmjp.benchmarks.running.engine import Job, jobs
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.retention import Retention
from fedmjp.benchmarks.running.workers import Bench, Setup

if TYPE_CHECKING:
    from fedmjp.benchmarks.running.ray_workers import RayTeam

SECONDS_PER_HOUR = 3600


def run_campaign(
    prepared: Prepared, output: OutputFolder, progress: RunProgress, *, database: str, workers: int, ray: str
) -> int:
    """Work a campaign off, within its budget.

    Args:
        prepared: The campaign.
        output: Its folder.
        progress: Is told what happens.
        database: URL of the trials; the folder's own file if empty.
        workers: Processes on this machine; 0 means one per GPU, or one on CPU.
        ray: Address of a cluster that works instead; none if empty.

    Returns:
        How many trials the budget left for another run.
    """
    setup = Setup(
        output=output,
        database=database,
        experiments=tuple(part.experiment for part in prepared.plan.parts),
        selection=prepared.selection,
        keep=prepared.campaign.keep,
    )
    hours, began = prepared.campaign.budget.hours, time.monotonic()

    def spent() -> bool:
        return hours is not None and time.monotonic() - began > hours * SECONDS_PER_HOUR

    if ray:
        return run_ray(prepared.plan, setup, address=ray, progress=progress, stop=spent)
    gpus = torch.cuda.device_count() if setup.device == "cuda" else 1
    return run_local(prepared.plan, setup, workers=workers or max(1, gpus), progress=progress, stop=spent)


def run_local(
    plan: Plan, setup: Setup, *, workers: int, progress: RunProgress, stop: Callable[[], bool] = lambda: False
) -> int:
    """Run what is missing of a plan on this machine.

    Args:
        plan: Whose trials are not finished, or failed, are run.
        setup: For the plan.
        workers: Processes. A single worker is this process. On CUDA each sees one GPU.
        progress: Is told what happens.
        stop: Asked before each job; once it holds, no more are started.

    Returns:
        How many trials were left because of ``stop``.

    Raises:
        StoreError: If the database failed.
        OutputError: If pictures cannot be written.
        WorkerError: If workers die before they get to work.
    """
    if workers == 1:
        with _threads(setup.threads):
            return Foreman(plan, setup, setup.bench(progress), progress, stop).work_alone()
    from fedmjp.benchmarks.running.ray_workers import local_team  # noqa: PLC0415 (Ray takes seconds)

    with local_team(setup, workers) as team:
        return Foreman(plan, setup, setup.bench(progress), progress, stop).hand_out(team)


def run_ray(
    plan: Plan, setup: Setup, *, address: str, progress: RunProgress, stop: Callable[[], bool] = lambda: False
) -> int:
    """Run what is missing of a plan as ``run_local`` does, on the cluster whose head is at ``address``, HOST:PORT.

    It has one worker per core, or per GPU on CUDA. Every machine needs this fedmjp, the pictures, the weights, the
    database and the output folder under the same names.

    Raises:
        BadInputError: If the cluster does not answer, or cannot do this work.
        WorkerError: If a machine of the cluster is not set up as it must be.
    """
    from fedmjp.benchmarks.running.ray_workers import cluster_team  # noqa: PLC0415 (Ray takes seconds)

    with cluster_team(setup, address) as team:
        return Foreman(plan, setup, setup.bench(progress), progress, stop).hand_out(team)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    former = torch.get_num_threads()
    torch.set_num_threads(count or former)
    try:
        yield
    finally:
        torch.set_num_threads(former)


@dataclass
class Foreman:
    """Hands jobs out, one at a time to each worker, and copes with workers that die.

    A job whose worker died is tried once more when all others are done, alone, because memory may have
    been short. If its worker dies again, what is missing of it becomes failed rows.
    """

    plan: Plan
    setup: Setup
    bench: Bench
    progress: RunProgress
    stop: Callable[[], bool]
    _suspects: deque[Job] = field(default_factory=deque)
    _held: dict[int, tuple[Job, bool]] = field(default_factory=dict)
    _computed: dict[int, int] = field(default_factory=dict)

    def work_alone(self) -> int:
        """In this process; the engine tells trials itself. The number of trials that are left."""
        with self._begun() as (waiting, pictures):
            while waiting and not self.stop():
                job = waiting.popleft()
                pictures.starts(job.trials)
                self.bench.engine(job.part).work(job)
                pictures.ends(job.trials)
        return _trials(waiting)

    def hand_out(self, team: "RayTeam") -> int:
        """To other processes. The number of trials that are left."""
        with self._begun() as (waiting, pictures):
            while True:
                self._fill(team, waiting, pictures)
                if not self._held:
                    return _trials(waiting) + _trials(self._suspects)
                slot, death = team.wait()
                job, again = self._held.pop(slot)
                if death and not again:
                    self._suspects.append(job)
                    continue
                if death:
                    reason = f"the worker process died ({death}); the trial was tried twice"
                    self.bench.engine(job.part).give_up(job, reason)
                self.progress.trials(len(job.trials))
                pictures.ends(job.trials)

    def _fill(self, team: "RayTeam", waiting: deque[Job], pictures: Retention) -> None:
        """Give every idle worker a job, or a single one a job that has killed its worker."""
        for slot in [slot for slot in range(team.size) if slot not in self._held]:
            again = not waiting
            if not (waiting or (self._suspects and not self._held)) or self.stop():
                return
            job = self._suspects.popleft() if again else self._next(slot, waiting)
            self._held[slot] = job, again
            pictures.starts(job.trials)
            team.give(slot, job)

    def _next(self, slot: int, waiting: deque[Job]) -> Job:
        """One whose uploads this worker has computed, or no worker has; the first one if there is none."""
        computed, others = self._computed.get(slot), set(self._computed.values())
        preferred = chain(
            (place for place, job in enumerate(waiting) if job.uploads == computed),
            (place for place, job in enumerate(waiting) if job.uploads not in others),
        )
        place = next(preferred, 0)
        job = waiting[place]
        del waiting[place]
        self._computed[slot] = job.uploads
        return job

    @contextmanager
    def _begun(self) -> Iterator[tuple[deque[Job], Retention]]:
        """The jobs that are missing, and who deletes pictures: once more at the end."""
        finished = self.bench.store.finished([trial.key for trial in self.plan.trials])
        missing = deque(jobs(self.plan, finished))
        pictures = Retention(self.setup.keep, self.plan, self.setup.output.pictures, self.bench.store)
        self.progress.attacks(_trials(missing))
        yield missing, pictures
        pictures.sweep()


def _trials(left: Sequence[Job]) -> int:
    return sum(len(job.trials) for job in left)
