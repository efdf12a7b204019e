"""What a worker must know, and the engines that it works with."""

from dataclasses import dataclass

from benchmarks.folder.output import OutputFolder
from benchmarks.folder.store import Store
from benchmarks.plan.experiment import Experiment, Keep
from benchmarks.running.engine import Engine
from benchmarks.running.progress import RunProgress
from benchmarks.uploads.direct import DirectUploads, Memory
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

    @property
    def device(self) -> str:
        """Where attacks run: cpu or cuda."""
        return self.experiments[0].scenario.device


class Bench:
    """One process's engines, each made when a job first needs it."""

    def __init__(self, setup: Setup, progress: RunProgress) -> None:
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
