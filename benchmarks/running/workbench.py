"""What a run works with, in whichever process its jobs are done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.plan.experiment import Experiment, Keep
from fedmjp.benchmarks.running.engine import Engine
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.uploads.direct import DirectUploads, Memory
from fedmjp.data.selection import Selection


@dataclass(frozen=True)
class Setup:
    """What a run works with.

    Attributes:
        output: Folder that pictures go to.
        experiments: Those of the plan's parts, in order.
        selection: The pictures of all of them.
        database: URL of the trials; the output folder's own file if empty.
        keep: Which pictures stay.
        threads: Threads of torch per process; None shares the cores out. Other numbers of threads can change the
            last bits of a score.
    """

    output: OutputFolder
    experiments: tuple[Experiment, ...]
    selection: Selection
    database: str = ""
    keep: Keep = "extremes"
    threads: int | None = None

    def store(self) -> Store:
        """Open the database of trials."""
        return self.output.store(self.database)

    @property
    def device(self) -> str:
        """Return where attacks run: cpu or cuda."""
        return self.experiments[0].scenario.device


@dataclass
class Workbench:
    """One process's engines, each built when a job first needs it.

    Attributes:
        experiments: Those of the plan's parts, in order.
        selection: The pictures of all of them.
        progress: Hears of each attack's iterations.
        shows_pictures: Whether results bring pictures along.
        environment: That rows name; None asks this process.
    """

    experiments: Sequence[Experiment]
    selection: Selection
    progress: RunProgress = field(default_factory=RunProgress)
    shows_pictures: bool = True
    environment: Mapping[str, Any] | None = None
    _memory: Memory = field(default_factory=Memory)
    _engines: dict[int, Engine] = field(default_factory=dict)

    def engine(self, part: int) -> Engine:
        """Return the engine of a part of the plan.

        Args:
            part: Its place in the plan.
        """
        if part not in self._engines:
            experiment = self.experiments[part]
            source = DirectUploads(experiment, self.selection, self._memory)
            self._engines[part] = Engine(experiment, source, self.progress, self.shows_pictures, self.environment)
        return self._engines[part]
