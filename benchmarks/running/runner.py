"""Runs what is missing of a plan: in this process, in others of this machine, or on a Ray cluster.

Whoever computes gives rows and pictures back; this process alone writes them.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from fedmjp.benchmarks.campaign.prepare import Prepared
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.plan.trial_plan import PlannedTrial, TrialPlan
from fedmjp.benchmarks.running.engine import Engine, StackResults, UploadJob, jobs, jobs_of
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.ray_driver import RayDriver, ray_team
from fedmjp.benchmarks.running.rescue import lost_place
from fedmjp.benchmarks.running.retention import Retention
from fedmjp.benchmarks.running.workbench import Setup, Workbench
from fedmjp.errors import Failure, OutputGoneError

if TYPE_CHECKING:
    from fedmjp.benchmarks.running.ray_workers import RayTeam

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Recorder:
    """Writes results: pictures into a folder, then rows into the store, so that a row there has its pictures."""

    output: OutputFolder
    store: Store
    progress: RunProgress

    def missing(self, trials: Sequence[PlannedTrial]) -> tuple[PlannedTrial, ...]:
        """Return the trials that have no final row yet; failed ones are tried again.

        Args:
            trials: Of a plan.
        """
        finished = self.store.finished([trial.key for trial in trials])
        return tuple(trial for trial in trials if trial.key not in finished)

    def write(self, results: StackResults) -> None:
        """Write results, and tell the progress.

        Args:
            results: Of one stack of uploads.

        Raises:
            StoreError: If the database failed.
            OutputError: If pictures cannot be written.
            OutputGoneError: If the folder went away; the rows are in the open database.
        """
        gone = lost_place(self.output, self.store)
        if not gone:
            self.output.kept.save(results.pictures)
        self.store.put(results.rows)
        if gone:
            raise OutputGoneError(f"{self.output.root} is not where it was")
        self.progress.trials(len(results.rows))


def run_experiment(
    engine: Engine, trials: Sequence[PlannedTrial], recorder: Recorder, source_error: str | None = None
) -> None:
    """Run what is missing of one experiment's trials, in this process.

    Args:
        engine: Of the experiment.
        trials: All of the experiment.
        recorder: Writes the results.
        source_error: Why uploads that the source lacks could not be recorded.

    Raises:
        StoreError: If the database failed.
        OutputError: If pictures cannot be written.
    """
    finished = {trial.key for trial in trials} - {trial.key for trial in recorder.missing(trials)}
    for job in jobs_of(0, trials, finished):
        for results in engine.results(job.trials, source_error):
            recorder.write(results)


def run_campaign(
    prepared: Prepared, output: OutputFolder, progress: RunProgress, *, database: str, workers: int, ray: str
) -> int:
    """Run what is missing of a campaign, within its budget.

    Args:
        prepared: The campaign.
        output: Its folder.
        progress: Is told what happens.
        database: URL of the trials; the folder's own file if empty.
        workers: Processes on this machine; 0 means one per GPU, or one on CPU.
        ray: Address of a cluster that works instead, HOST:PORT; none if empty.

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

    def is_spent() -> bool:
        return hours is not None and time.monotonic() - began > hours * SECONDS_PER_HOUR

    if ray:
        return run_ray(prepared.plan, setup, address=ray, progress=progress, stop=is_spent)
    gpus = torch.cuda.device_count() if setup.device == "cuda" else 1
    return run_local(prepared.plan, setup, workers=workers or max(1, gpus), progress=progress, stop=is_spent)


def run_local(
    plan: TrialPlan, setup: Setup, *, workers: int, progress: RunProgress, stop: Callable[[], bool] = lambda: False
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
        RayError: If Ray cannot start, or ends.
        WorkerError: If workers die before they get to work.
    """
    foreman = Foreman(plan, setup, progress, stop)
    if workers == 1:
        with _threads(setup.threads):
            return foreman.work_alone()
    with ray_team(setup, workers=workers) as team:
        return foreman.hand_out(team)


def run_ray(
    plan: TrialPlan, setup: Setup, *, address: str, progress: RunProgress, stop: Callable[[], bool] = lambda: False
) -> int:
    """Run what is missing of a plan as ``run_local`` does, on a Ray cluster that this machine belongs to.

    It has one worker per core, or per GPU on CUDA. Pictures, weights and this fedmjp travel to the workers, which
    need its packages and nothing else.

    Args:
        plan: As of ``run_local``.
        setup: For the plan.
        address: HOST:PORT of the cluster's head.
        progress: Is told what happens.
        stop: As of ``run_local``.

    Raises:
        BadInputError: If the cluster does not answer, or cannot do this work.
        RayError: If the cluster ends.
        WorkerError: If a machine of the cluster would compute other trials.
    """
    foreman = Foreman(plan, setup, progress, stop)
    with ray_team(setup, address=address) as team:
        return foreman.hand_out(team)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    former = torch.get_num_threads()
    torch.set_num_threads(count or former)
    try:
        yield
    finally:
        torch.set_num_threads(former)


class Pace:
    """Measures how long trials of each part take, to say how long the remaining ones will."""

    def __init__(self) -> None:
        self._seconds, self._trials = defaultdict[int, float](float), Counter[int]()

    def add(self, job: UploadJob, seconds: float) -> None:
        """Count a finished job.

        Args:
            job: All of its trials count.
            seconds: Of one worker.
        """
        self._seconds[job.part] += seconds
        self._trials[job.part] += len(job.trials)

    def remaining(self, waiting: Iterable[UploadJob]) -> float:
        """Estimate the seconds that jobs take one worker; a part of which none was run is taken for an average one.

        Args:
            waiting: The jobs.
        """
        mean = sum(self._seconds.values()) / max(1, self._trials.total())
        rates = {part: self._seconds[part] / count for part, count in self._trials.items() if count}
        return sum(len(job.trials) * rates.get(job.part, mean) for job in waiting)


@dataclass
class Foreman:
    """Hands jobs out, one at a time to each worker, writes their results, and copes with workers that die.

    A job whose worker died is tried once more when all others are done, alone, because memory may have
    been short. If its worker dies again, what is missing of it becomes failed rows.
    """

    plan: TrialPlan
    setup: Setup
    progress: RunProgress
    stop: Callable[[], bool]
    _suspects: deque[UploadJob] = field(default_factory=deque)
    _in_work: dict[int, tuple[UploadJob, bool, float]] = field(default_factory=dict)  # by worker: again?, since when
    _computed: dict[int, int] = field(default_factory=dict)
    _pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        self._recorder = Recorder(self.setup.output, self.setup.store(), self.progress)
        shows_pictures = self.setup.keep != "none"
        self._bench = Workbench(self.setup.experiments, self.setup.selection, self.progress, shows_pictures)

    def work_alone(self) -> int:
        """Run the jobs in this process, and return the number of trials that are left."""
        with self._started() as (waiting, retention):
            while waiting and not self.stop():
                job, began = waiting.popleft(), time.monotonic()
                retention.start(job.trials)
                missing = self._missing(job)
                for results in self._bench.engine(job.part).results(missing.trials) if missing.trials else ():
                    self._recorder.write(results)
                retention.mark_finished(job.trials)
                self._pace.add(job, time.monotonic() - began)
                self.progress.time_left(self._pace.remaining(waiting))
        return _trials(waiting)

    def hand_out(self, team: "RayDriver | RayTeam") -> int:
        """Let other processes run the jobs, and return the number of trials that are left.

        Args:
            team: The processes.
        """
        with self._started() as (waiting, retention):
            while True:
                self._fill(team, waiting, retention)
                if not self._in_work:
                    return _trials(waiting) + _trials(self._suspects)
                worker, outcome = team.wait()
                if isinstance(outcome, StackResults):
                    self._recorder.write(outcome)
                    continue
                job, is_retry, began = self._in_work.pop(worker)
                if isinstance(outcome, Failure) and not is_retry:
                    self._suspects.append(job)
                    continue
                if isinstance(outcome, Failure):
                    reason = f"the worker process died ({outcome}); the trial was tried twice"
                    self._recorder.write(
                        self._bench.engine(job.part).give_up(self._recorder.missing(job.trials), reason)
                    )
                retention.mark_finished(job.trials)
                self._pace.add(job, time.monotonic() - began)
                working = [job for job, *_ in self._in_work.values()]
                seconds = self._pace.remaining(chain(waiting, self._suspects, working))
                self.progress.time_left(seconds / max(1, len(working)))

    def _missing(self, job: UploadJob) -> UploadJob:
        """Leave out trials that another run on the same database, or a worker that died, has finished since."""
        missing = self._recorder.missing(job.trials)
        if len(missing) < len(job.trials):
            self.progress.trials(len(job.trials) - len(missing))
        return replace(job, trials=missing)

    def _fill(self, team: "RayDriver | RayTeam", waiting: deque[UploadJob], retention: Retention) -> None:
        """Give every idle worker a job, or a single one a job that has killed its worker."""
        for worker in [worker for worker in team.workers() if worker not in self._in_work]:
            is_retry = not waiting
            if not (waiting or (self._suspects and not self._in_work)) or self.stop():
                return
            job = self._suspects.popleft() if is_retry else self._next(worker, waiting)
            if not is_retry:
                retention.start(job.trials)
            missing = replace(job, trials=self._recorder.missing(job.trials)) if is_retry else self._missing(job)
            if not missing.trials:
                retention.mark_finished(job.trials)
                continue
            self._in_work[worker] = job, is_retry, time.monotonic()
            team.give(worker, missing, alone=is_retry)

    def _next(self, worker: int, waiting: deque[UploadJob]) -> UploadJob:
        """Take a job whose uploads this worker has computed, or no worker has; the first one if there is none."""
        computed, elsewhere = self._computed.get(worker), set(self._computed.values())
        preferred = chain(
            (place for place, job in enumerate(waiting) if job.uploads == computed),
            (place for place, job in enumerate(waiting) if job.uploads not in elsewhere),
        )
        place = next(preferred, 0)
        job = waiting[place]
        del waiting[place]
        self._computed[worker] = job.uploads
        return job

    @contextmanager
    def _started(self) -> Iterator[tuple[deque[UploadJob], Retention]]:
        """Give the missing jobs, and what deletes pictures: once more at the end."""
        store = self._recorder.store
        waiting = deque(jobs(self.plan, store.finished([trial.key for trial in self.plan.tasks])))
        retention = Retention(self.setup.keep, self.plan, self.setup.output.kept, store)
        self.progress.attacks(_trials(waiting))
        yield waiting, retention
        retention.sweep()


def _trials(waiting: Iterable[UploadJob]) -> int:
    return sum(len(job.trials) for job in waiting)
