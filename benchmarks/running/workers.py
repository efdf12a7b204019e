"""Works a plan off in this process, or in several on this machine."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Protocol, Self

import torch

from benchmarks.folder.output import OutputFolder
from benchmarks.folder.store import Store
from benchmarks.plan.experiment import Experiment, Plan
from benchmarks.running.engine import Engine, Job, JobReport, Progress, Silent, jobs
from benchmarks.running.retention import Keep, Retention
from benchmarks.uploads.direct import DirectUploads, Memory
from fedmjp import provenance
from fedmjp.data.selection import Selection
from fedmjp.errors import FedmjpError

VISIBLE = "CUDA_VISIBLE_DEVICES"


class WorkerError(FedmjpError):
    """Worker processes cannot do anything. Remedy: see the message; fewer workers need less memory."""


class JobProgress(Progress, Protocol):
    """What a run tells: as the engine does, and each job that has come to its end."""

    def job(self, report: JobReport) -> None:
        """A job was worked off."""


@dataclass(frozen=True)
class Setup:
    """What a worker must know to work on a plan; it travels to other processes.

    Attributes:
        output: Where pictures go.
        experiments: Those of the plan's parts, in order.
        selection: The pictures of all of them.
        database: URL of the trials; the output folder's own file if empty.
        keep: Which pictures stay.
        threads: Of torch per process; None shares the cores out. Other numbers of threads can change the
            last bits of a score.
    """

    output: OutputFolder
    experiments: tuple[Experiment, ...]
    selection: Selection
    database: str = ""
    keep: Keep = "extremes"
    threads: int | None = None

    def store(self) -> Store:
        """Open the trials."""
        return Store.open(self.database) if self.database else Store.at(self.output.database)

    @property
    def device(self) -> str:
        """Where attacks run: cpu or cuda."""
        return self.experiments[0].scenario.device


class Bench:
    """One process's engines, each made when a job first needs it."""

    def __init__(self, setup: Setup, progress: Progress) -> None:
        self._setup, self._progress = setup, progress
        self.store = setup.store()
        self._memory = Memory()
        self._engines: dict[int, Engine] = {}

    def engine(self, part: int) -> Engine:
        """The engine of a part of the plan."""
        if part not in self._engines:
            experiment, setup = self._setup.experiments[part], self._setup
            self._engines[part] = Engine(
                experiment,
                setup.output,
                self.store,
                self._progress,
                DirectUploads(experiment, setup.selection, self._memory),
                save_pictures=setup.keep != "none",
            )
        return self._engines[part]

    def work(self, job: Job) -> JobReport:
        """Work a job off."""
        return self.engine(job.part).work(job)

    def attempt(self, job: Job) -> JobReport | FedmjpError:
        """Work a job off for another process, which gets the errors that end a run as values."""
        try:
            return self.work(job)
        except FedmjpError as error:
            return error


@dataclass(frozen=True)
class Death:
    """A worker that ended in the middle of a job."""

    reason: str


Outcome = JobReport | Death | FedmjpError


class Team(Protocol):
    """Workers, each in its slot with at most one job."""

    @property
    def size(self) -> int:
        """Number of slots."""

    def give(self, slot: int, job: Job) -> None:
        """Start a job."""

    def wait(self) -> Sequence[tuple[int, Outcome]]:
        """Wait until at least one job has ended; those that have. Dead workers are replaced later."""


def run_local(
    plan: Plan, setup: Setup, *, workers: int, progress: JobProgress, stop: Callable[[], bool] = lambda: False
) -> int:
    """Run what is missing of a plan on this machine.

    Args:
        plan: Whose trials are not finished, or failed, are run.
        setup: For the plan.
        workers: Processes. One works in this process. On CUDA each sees one GPU.
        progress: Is told what happens.
        stop: Asked before each job; once it holds, no more are started.

    Returns:
        Trials that were left because of ``stop``.

    Raises:
        StoreError: If the database failed.
        OutputError: If pictures cannot be written.
        WorkerError: If workers die before they get to work.
    """
    bench = Bench(setup, progress if workers == 1 else Silent())
    missing = jobs(plan, bench.store)
    foreman = Foreman(plan, setup, bench, progress, stop)
    if workers == 1:
        with _threads(setup.threads):
            return foreman.work_alone(missing)
    with LocalTeam(setup, workers) as team:
        return foreman.hand_out(missing, team)


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
    progress: JobProgress
    stop: Callable[[], bool]
    _suspects: deque[Job] = field(default_factory=deque)
    _held: dict[int, tuple[Job, bool]] = field(default_factory=dict)
    _computed: dict[int, int] = field(default_factory=dict)

    def work_alone(self, missing: Sequence[Job]) -> int:
        """In this process; the engine tells trials itself."""
        waiting = deque(missing)
        with self._pictures(missing) as pictures:
            while waiting and not self.stop():
                job = waiting.popleft()
                pictures.starts(job.trials)
                self._ended(job, self.bench.work(job), pictures)
        return _trials(waiting)

    def hand_out(self, missing: Sequence[Job], team: Team) -> int:
        """To other processes."""
        waiting = deque(missing)
        with self._pictures(missing) as pictures:
            while True:
                self._fill(team, waiting, pictures)
                if not self._held:
                    return _trials(waiting) + _trials(self._suspects)
                for slot, outcome in team.wait():
                    job, again = self._held.pop(slot)
                    report = self._judged(job, outcome, again=again)
                    if report:
                        self.progress.trials(len(job.trials))
                        self._ended(job, report, pictures)

    def _fill(self, team: Team, waiting: deque[Job], pictures: Retention) -> None:
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
        own, others = self._computed.get(slot), set(self._computed.values())
        preferred = chain(
            (place for place, job in enumerate(waiting) if job.uploads == own),
            (place for place, job in enumerate(waiting) if job.uploads not in others),
        )
        place = next(preferred, 0)
        job = waiting[place]
        del waiting[place]
        self._computed[slot] = job.uploads
        return job

    def _judged(self, job: Job, outcome: Outcome, *, again: bool) -> JobReport | None:
        """The job's end, if this was it."""
        if isinstance(outcome, FedmjpError):
            raise outcome
        if isinstance(outcome, JobReport):
            return outcome
        if not again:
            self._suspects.append(job)
            return None
        reason = f"the worker process died ({outcome.reason}); the trial was tried twice"
        return self.bench.engine(job.part).give_up(job, reason)

    def _ended(self, job: Job, report: JobReport, pictures: Retention) -> None:
        pictures.ends(job.trials)
        self.progress.job(report)

    @contextmanager
    def _pictures(self, missing: Sequence[Job]) -> Iterator[Retention]:
        pictures = Retention(self.setup.keep, self.plan, self.setup.output.pictures, self.bench.store)
        self.progress.attacks(_trials(missing))
        yield pictures
        pictures.sweep()


def _trials(left: Sequence[Job]) -> int:
    return sum(len(job.trials) for job in left)


@dataclass
class _Worker:
    process: BaseProcess
    line: "Connection[Job, Outcome | None]"
    job: Job
    ready: bool = False


class LocalTeam:
    """Processes on this machine, each started with its first job; a context manager that ends them.

    Our own rather than an executor's, which ends all of them when one dies and does not say how it died.
    """

    def __init__(self, setup: Setup, workers: int) -> None:
        self.size = workers
        self._setup = setup
        self._threads = setup.threads or max(1, provenance.hardware()["cores"] // max(1, workers))
        # Imports are paid for once. CUDA does not survive a fork, but starts only after it.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._workers: dict[int, _Worker] = {}
        self._proven = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # At once: whatever is half done is neither a row nor a picture yet.
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.join()
            worker.line.close()

    def give(self, slot: int, job: Job) -> None:
        """Start a job, and a process for it if need be."""
        if slot not in self._workers:
            self._workers[slot] = self._started(slot, job)
            return
        self._workers[slot].job = job
        _send(self._workers[slot])

    def wait(self) -> list[tuple[int, Outcome]]:
        """Wait until at least one job has ended; those that have."""
        ended: list[tuple[int, Outcome]] = []
        while not ended:
            broken_or_full = connection.wait([worker.line for worker in self._workers.values()])
            for slot in [slot for slot, worker in self._workers.items() if worker.line in broken_or_full]:
                outcome = self._heard(slot)
                ended += [] if outcome is None else [(slot, outcome)]
        return ended

    def _heard(self, slot: int) -> Outcome | None:
        worker = self._workers[slot]
        try:
            outcome = worker.line.recv()
        except (EOFError, ConnectionError):
            return self._buried(slot)
        if outcome is None:
            worker.ready = self._proven = True
            _send(worker)
        return outcome

    def _buried(self, slot: int) -> Death:
        worker = self._workers.pop(slot)
        worker.process.join()
        worker.line.close()
        code = worker.process.exitcode or 0
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        if not self._proven:
            raise WorkerError(f"a worker process died before it got to work ({reason}); try fewer workers")
        return Death(reason)

    def _started(self, slot: int, job: Job) -> _Worker:
        here, there = self._context.Pipe()
        environment = {VISIBLE: _gpu(slot)} if self._setup.device == "cuda" else {}
        arguments = (there, self._setup, self._threads, environment)
        process = self._context.Process(target=_serve, args=arguments, name=f"worker {slot}", daemon=True)
        process.start()
        there.close()  # so that the line breaks when the process dies
        return _Worker(process, here, job)


def _send(worker: _Worker) -> None:
    with suppress(ConnectionError):  # a worker that has just died is heard of next
        worker.line.send(worker.job)


def _gpu(slot: int) -> str:
    named = os.environ.get(VISIBLE)
    names = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    return names[slot % len(names)]


def _serve(line: "Connection[Outcome | None, Job]", setup: Setup, threads: int, environment: Mapping[str, str]) -> None:
    """What a worker process does until the line to the parent breaks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    try:
        bench = Bench(setup, Silent())
    except FedmjpError as error:
        line.send(error)
        return
    line.send(None)
    with suppress(EOFError, ConnectionError):
        while True:
            line.send(bench.attempt(line.recv()))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # in the middle of whatever is computed
