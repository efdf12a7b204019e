"""Progress of a training run on the terminal: a bar where there is one, a line per epoch in any case."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn

from fedmjp.cli.progress import LiveBars, Rate

if TYPE_CHECKING:
    from fedmjp.training.accuracy import Accuracy
    from fedmjp.training.central import TrainingEvents
    from fedmjp.training.loop import EpochReport


class TrainingProgress(LiveBars):
    """Shows epochs."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
        super().__init__(console, *columns)
        self._epochs = self._pictures = 0
        self._task: TaskID | None = None

    def events(self) -> "TrainingEvents":
        """What a run is to call."""
        from fedmjp.training.central import TrainingEvents

        return TrainingEvents(self._start, self._step, self._epoch, self.skip)

    def _start(self, done: int, epochs: int, pictures: int) -> None:
        self._epochs, self._pictures = epochs, pictures
        if done >= epochs:
            self._console.print(f"All {epochs} epochs are done; --fresh starts over.")
            return
        if done:
            self._console.print(f"Going on after epoch {done} of {epochs}.")
        self._task = self._bars.add_task(f"Epoch {done + 1} of {epochs}", total=pictures)

    def _step(self, pictures: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, pictures)

    def _epoch(self, epoch: int, report: "EpochReport", accuracy: "Accuracy") -> None:
        self._console.print(
            f"Epoch {epoch} of {self._epochs}: loss {report.loss:.3f}, validation Top-1 {100 * accuracy.top1:.1f} %, "
            f"{report.images_per_second:.0f} images per second",
            highlight=False,
        )
        if self._task is not None and epoch < self._epochs:
            self._bars.reset(self._task, description=f"Epoch {epoch + 1} of {self._epochs}", total=self._pictures)
