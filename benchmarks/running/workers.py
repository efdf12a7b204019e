"""What a worker must know, and the engines that it works with."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.pictures import PictureKeeper
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.plan.experiment import Experiment, Keep
from fedmjp.benchmarks.running.engine import Engine
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.uploads.direct import DirectUploads, Memory
from fedmjp.data.selection import Selection


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
        return self.output.store(self.database)

    def bench(self, progress: RunProgress) -> "Bench":
        """What a process works with."""
        keeper = None if self.keep == "none" else self.output
        return Bench(self.experiments, self.selection, self.store(), keeper, progress)

    @property
    def device(self) -> str:
        """Where attacks run: cpu or cuda."""
        return self.experiments[0].scenario.device


class Bench:
    """One process's engines, each made when a job first needs it.

    Args:
        experiments: Those of the plan's parts, in order.
        selection: The pictures of all of them.
        store: The trials.
        pictures: Who keeps pictures; nobody if None.
        progress: Is told what happens.
    """

    def __init__(
        self,
        experiments: Sequence[Experiment],
        selection: Selection,
        store: Store,
        pictures: PictureKeeper | None,
        progress: RunProgress,
    ) -> None:
        self._experiments, self._selection = experiments, selection
        self.store, self._pictures, self._progress = store, pictures, progress
        self._memory = Memory()
        self._engines: dict[int, Engine] = {}

    def engine(self, part: int) -> Engine:
        """The engine of a part of the plan."""
        if part not in self._engines:
            experiment = self._experiments[part]
            source = DirectUploads(experiment, self._selection, self._memory)
            self._engines[part] = Engine(experiment, self._pictures, self.store, self._progress, source)
        return self._engines[part]
