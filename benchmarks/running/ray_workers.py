"""Workers that Ray serves, wherever it runs.

They need no folder of this machine: pictures and weights travel through Ray's object store, this fedmjp as a module of
the run's environment, and rows and pictures come back.
"""

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import torch
from torchvision.transforms.v2 import functional as transforms

from fedmjp import provenance
from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.plan.planning import decisive_facts
from fedmjp.benchmarks.running.engine import StackResults, UploadJob
from fedmjp.benchmarks.running.workbench import Setup, Workbench
from fedmjp.config import Checkpoint
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import Selection
from fedmjp.errors import Failure, FedmjpError

PATIENCE = 10  # seconds after which a cluster is asked whether it lost a machine


class WorkerError(FedmjpError):
    """Worker processes cannot do anything. Remedy: see the message; fewer workers need less memory."""


@dataclass(frozen=True)
class StoredPictures:
    """Pictures in Ray's object store, as a source: a machine gets those that its jobs are about."""

    images: Mapping[str, Any]  # references of (3, size, size) arrays
    labels: Mapping[str, int]

    @classmethod
    def of(cls, selection: Selection) -> "StoredPictures":
        """Put the pictures of a selection into the store, in 8 bits where that loses nothing.

        Args:
            selection: Its pictures are read here.

        Raises:
            DataError: If one cannot be read any more.
        """
        images, labels = {}, {}
        for entry in selection.entries:
            image = selection.load(entry).image
            pixels = (image * 255).round().byte()
            lossless = torch.equal(_as_floats(pixels), image)
            images[entry.name] = ray.put((pixels if lossless else image).numpy())
            labels[entry.name] = entry.label
        return cls(images, labels)

    def names(self) -> Sequence[str]:
        """List the names of the pictures."""
        return list(self.images)

    def load(self, name: str) -> LabelledPicture:
        """Get one picture.

        Args:
            name: Of the selection.
        """
        pixels = torch.from_numpy(ray.get(self.images[name]).copy())
        return LabelledPicture(name, _as_floats(pixels), self.labels[name])


def _as_floats(pixels: torch.Tensor) -> torch.Tensor:
    image: torch.Tensor = transforms.to_dtype(pixels, torch.float32, scale=True)
    return image


@dataclass(frozen=True)
class Assignment:
    """What a worker gets before its first job.

    Attributes:
        experiments: Those of the plan's parts, in order.
        selection: The pictures of all of them.
        shows_pictures: Whether results bring pictures along.
        threads: Threads of torch.
        weights: References of checkpoints' contents by SHA-256.
        facts: What must be the same on the worker's machine as here.
        revision: Git revision of the code, which its copies do not know.
    """

    experiments: tuple[Experiment, ...]
    selection: Selection
    shows_pictures: bool
    threads: int
    weights: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    revision: Mapping[str, Any] = field(default_factory=provenance.revision)

    @classmethod
    def of(cls, setup: Setup, threads: int) -> "Assignment":
        """State what workers need to know of a run.

        Args:
            setup: Of the run.
            threads: Threads of torch in each worker.
        """
        facts = decisive_facts(setup.experiments)
        return cls(setup.experiments, setup.selection, setup.keep != "none", threads, facts=facts)

    def travelling(self) -> "Assignment":
        """Put pictures and weights into Ray's object store, for machines that do not have these files."""
        arms = {experiment.scenario.network for experiment in self.experiments}
        files = {arm.weights.sha256: Path(arm.weights.path) for arm in arms if arm.weights}
        weights = {sha256: ray.put(path.read_bytes()) for sha256, path in files.items()}
        source = StoredPictures.of(self.selection)
        return replace(self, selection=replace(self.selection, source=source), weights=weights)

    def require_same_machine(self) -> None:
        """Refuse a machine that would compute other trials than the one that the run was started on.

        Raises:
            WorkerError: With the first difference.
        """
        machine = platform.node()
        try:
            facts = decisive_facts(self.experiments)
        except FedmjpError as error:
            raise WorkerError(f"{machine} of the Ray cluster cannot do this work: {error}") from None
        for name, expected in self.facts.items():
            if facts[name] != expected:
                raise WorkerError(
                    f"{machine} of the Ray cluster would compute other trials: {name} is {facts[name]} there and "
                    f"{expected} here; install the same on every machine"
                )

    def with_files(self, folder: Path) -> "Assignment":
        """Write the weights that travelled into a folder of this machine, and name them there.

        Args:
            folder: Must exist.
        """
        return replace(self, experiments=tuple(self._moved(experiment, folder) for experiment in self.experiments))

    def _moved(self, experiment: Experiment, folder: Path) -> Experiment:
        scenario, weights = experiment.scenario, experiment.scenario.model.weights
        if weights is None:
            return experiment
        path = folder / f"{weights.sha256}{Path(weights.path).suffix}"
        if not path.exists():
            path.write_bytes(ray.get(self.weights[weights.sha256]))
        model = scenario.model.model_copy(update={"weights": Checkpoint(path=str(path), sha256=weights.sha256)})
        return experiment.model_copy(update={"scenario": scenario.model_copy(update={"model": model})})


class Worker:
    """A worker in a process of its own."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._bench: Workbench | None = None
        torch.set_num_threads(assignment.threads)

    def work(self, job: UploadJob) -> Iterator[StackResults]:
        """Run a job.

        Args:
            job: Of the plan whose experiments the worker has.

        Raises:
            WorkerError: If this machine would compute other trials.
        """
        self._bench = self._bench or self._prepare()
        yield from self._bench.engine(job.part).results(job.trials)

    def _prepare(self) -> Workbench:
        self._assignment.require_same_machine()
        local = self._assignment
        if local.weights:
            self._folder = TemporaryDirectory(prefix="fedmjp-")
            local = local.with_files(Path(self._folder.name))
        environment = provenance.environment() | {"revision": local.revision}
        return Workbench(
            local.experiments, local.selection, shows_pictures=local.shows_pictures, environment=environment
        )


class RayTeam:
    """Workers, each an actor with at most one job, started with its first one.

    Args:
        assignment: What they work with.
        kind: Resource of which each worker takes some: CPU or GPU.
        share: How much of it a worker takes, such as half a GPU.
    """

    def __init__(self, assignment: Assignment, kind: str, share: float) -> None:
        self._assignment = ray.put(assignment)
        self._kind, self._share = kind, share
        gpus, cores = (share, 0.0) if kind == "GPU" else (0.0, share)
        self._actor = ray.remote(num_gpus=gpus, num_cpus=cores)(Worker)
        self._actors: dict[int, Any] = {}
        self._ready: dict[int, Any] = {}
        self._running: dict[Any, int] = {}
        self._has_worked, self._number = False, 0

    def workers(self) -> list[int]:
        """List the numbers of the workers that the cluster has room for: those that run, then new ones.

        Raises:
            WorkerError: If there is no room for any.
        """
        room = self._room()
        if not room and not self._running:
            raise WorkerError(f"the Ray cluster has no {self._kind} any more; finished trials are kept, run again")
        new = range(self._number, self._number + room - len(self._actors))
        return [*self._actors, *new]

    def _room(self) -> int:
        return math.floor(float(ray.cluster_resources().get(self._kind, 0)) / self._share + 1e-9)

    def give(self, worker: int, job: UploadJob, *, alone: bool) -> None:
        """Start a job, and an actor for it if there is none.

        Args:
            worker: Which one, of ``workers``; it has no job.
            job: What it is to do.
            alone: Whether all idle workers end first, this one included: the job has a new one to itself.
        """
        if alone:
            for idle in self._actors.keys() - set(self._running.values()):
                self._end(idle)
        if worker not in self._actors:
            self._number = max(self._number, worker + 1)
            self._actors[worker] = self._actor.remote(self._assignment)
            self._ready[worker] = self._actors[worker].__ray_ready__.remote()
        self._running[self._actors[worker].work.remote(job)] = worker

    def wait(self) -> tuple[int, StackResults | Failure | None]:
        """Wait for results of a job, or its end, well or with its worker.

        Returns:
            The worker, and its results; or what it died of; or None if its job is done. The next job of a worker that
            died starts another one.

        Raises:
            FedmjpError: If the job ended with an error that ends the run.
            WorkerError: If no worker has got to work.
        """
        while True:
            answered, _ = ray.wait(list(self._running), num_returns=1, timeout=PATIENCE)
            if answered:
                return self._receive(answered[0])
            lost = self._homeless()
            if lost is not None:
                self._running = {results: worker for results, worker in self._running.items() if worker != lost}
                self._end(lost)
                return lost, Failure("the Ray cluster lost the machine that was to run it.")

    def _receive(self, results: Any) -> tuple[int, StackResults | Failure | None]:
        worker = self._running[results]
        try:
            received: StackResults = ray.get(next(results))
        except StopIteration:
            del self._running[results]
            return worker, None
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, FedmjpError):
                raise cause from None
            del self._running[results]
            reason = str(error).strip().splitlines()[-1].strip()
            has_started = self._has_worked or any(map(_succeeded, self._ready.values()))
            self._end(worker)
            if not has_started:
                raise WorkerError(
                    f"a worker process died before it got to work ({reason}); try fewer workers"
                ) from None
            return worker, Failure(f"{reason} Mostly for want of memory: lower --workers")
        self._has_worked = True
        return worker, received

    def _homeless(self) -> int | None:
        """Find a worker that waits for a machine, where there is none for it any more."""
        if len(self._actors) <= self._room():
            return None
        waiting = (worker for worker in self._running.values() if not _succeeded(self._ready[worker]))
        return next(waiting, None)

    def _end(self, worker: int) -> None:
        ray.kill(self._actors.pop(worker))
        self._has_worked |= _succeeded(self._ready.pop(worker))


def _succeeded(call: Any) -> bool:
    try:
        ray.get(call, timeout=0)
    except ray.exceptions.RayError:
        return False
    return True
