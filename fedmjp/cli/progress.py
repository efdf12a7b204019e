"""Progress on the terminal: bars where there is one, a line per phase, epoch or round in any case."""

import math
import threading
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.cli.console import duration, tell

if TYPE_CHECKING:
    from fedmjp.training.accuracy import Accuracy
    from fedmjp.training.central import TrainingEvents
    from fedmjp.training.loop import EpochReport

SILENT_SECONDS = 9.0  # until the next line in a file or a pipe


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "", style="progress.data.speed")


class LiveBars(Progress):
    """Bars that are there while something goes on; a file gets none, and transient ones go away at the end."""

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        numbers = (MofNCompleteColumn(), _Rate(), TimeElapsedColumn(), TimeRemainingColumn())
        columns = (TextColumn("{task.description:<34}"), BarColumn(), *numbers)
        super().__init__(*columns, console=console, disable=not console.is_terminal, transient=transient)
        # Of each picture that cannot be read the reason is told once.
        self.skip = cache(lambda reason: tell(console, f"Skipped: {reason}"))


class TerminalProgress(LiveBars, RunProgress):
    """Shows the phases of a run; where no bar can move, a line every few seconds says how far it is."""

    _task: TaskID | None = None
    _steps: TaskID | None = None

    def start(self) -> None:
        """Begin to show bars."""
        super().start()
        self._ended = threading.Event()
        if not self.console.is_terminal:
            threading.Thread(target=self._tell, daemon=True).start()

    def stop(self) -> None:
        """End the bars."""
        super().stop()
        self._ended.set()

    def _tell(self) -> None:
        while not self._ended.wait(SILENT_SECONDS):
            for task in self.tasks[-1:]:
                is_said = task.time_remaining is None or "to go" in task.description
                remaining = "" if is_said else f", about {task.time_remaining:.0f} s to go in this phase"
                tell(self.console, f"{task.description.strip()}: {task.completed:.0f} of {task.total:.0f}{remaining}")

    def federation(self, rounds: int) -> None:
        """Show that a federated run starts.

        Args:
            rounds: So many.
        """
        self._phase("Federated rounds (Flower starts)", rounds)

    def round(self) -> None:
        """Show that a round starts."""
        if self._task is not None:
            self.update(self._task, advance=1, description="Federated rounds")

    def attacks(self, trials: int) -> None:
        """Show that trials are about to be attacked and scored.

        Args:
            trials: So many.
        """
        self._phase("Attacked and scored", trials)

    def trials(self, count: int) -> None:
        """Show that more trials have rows.

        Args:
            count: So many.
        """
        if self._steps is not None:
            self.remove_task(self._steps)
            self._steps = None
        if self._task is not None:
            self.advance(self._task, count)

    def time_left(self, seconds: float) -> None:
        """Show how long the trials that are left will take.

        Args:
            seconds: By the trials of each experiment that were run.
        """
        if self._task is not None:
            text = f"Attacked and scored, {duration(seconds)} to go" if seconds else "Attacked and scored"
            self.update(self._task, description=text)

    def optimisation(self, step: int, total: int, loss: float) -> None:
        """Show how far an attack that optimises is.

        Args:
            step: Of its steps.
            total: Number of steps.
            loss: At this step.
        """
        if self._steps is None:
            self._steps = self.add_task("", total=total)
        self.update(self._steps, completed=step, total=total, description=f"  optimising, loss {loss:.4g}")

    def _phase(self, description: str, total: int) -> None:
        self._task = self.add_task(description, total=total)
        if not self.console.is_terminal:
            self.console.print(f"{description}: {total}")


class TrainingProgress(LiveBars):
    """Shows the epochs of a central run; of its other processes only what they skip."""

    _task: TaskID | None = None
    _epochs = _pictures = 0

    def __init__(self, console: Console, *, quiet: bool) -> None:
        super().__init__(console)
        self.disable = self.disable or quiet
        self._quiet = quiet

    def events(self) -> "TrainingEvents":
        """Return what a run is to call."""
        from fedmjp.training.central import TrainingEvents

        if self._quiet:
            return TrainingEvents(on_skipped=self.skip)
        return TrainingEvents(self._begin, self._step, self._epoch, self.skip)

    def _begin(self, completed: int, epochs: int, pictures: int) -> None:
        self._epochs, self._pictures = epochs, pictures
        if completed >= epochs:
            self.console.print(f"All {epochs} epochs are done; --fresh starts over.")
            return
        if completed:
            self.console.print(f"Going on after epoch {completed} of {epochs}.")
        self._task = self.add_task(f"Epoch {completed + 1} of {epochs}", total=pictures)

    def _step(self, pictures: int) -> None:
        if self._task is not None:
            self.advance(self._task, pictures)

    def _epoch(self, epoch: int, report: "EpochReport", accuracy: "Accuracy") -> None:
        top1, speed = _top1(accuracy.top1), _speed(report.images_per_second)
        tell(self.console, f"Epoch {epoch} of {self._epochs}: loss {report.loss:.3f}, {top1}, {speed}")
        if self._task is not None and epoch < self._epochs:
            self.reset(self._task, description=f"Epoch {epoch + 1} of {self._epochs}", total=self._pictures)


class FederatedProgress(LiveBars):
    """Shows the rounds of a federated run, some of which were done before."""

    def __init__(self, console: Console, completed: int, rounds: int) -> None:
        super().__init__(console)
        self._rounds = rounds
        self._task = self.add_task("Rounds (Flower starts)", completed=completed, total=rounds)

    def round(self, row: Mapping[Any, Any]) -> None:
        """Show a round that is done.

        Args:
            row: Of the history.
        """
        number, top1, speed = int(row["round"]), _top1(row["top1"]), _speed(row["images_per_second"])
        refused = f", {row['refused']:.0f} refused" if row["refused"] else ""
        skipped = f", {row['skipped']:.0f} unreadable pictures skipped" if row["skipped"] else ""
        loss = "" if math.isnan(row["loss"]) else f"loss {row['loss']:.3f}, "
        summary = f"{row['clients']:.0f} clients{refused}, {loss}{top1}, {speed}{skipped}"
        tell(self.console, f"Round {number} of {self._rounds}: {summary}")
        self.update(self._task, completed=number, description=f"Rounds ({top1}, {speed})")

    def again(self, reason: str) -> None:
        """Say that too few clients answered in a round, which is played again.

        Args:
            reason: From the server.
        """
        tell(self.console, f"Played again: {reason}")


def _top1(share: float) -> str:
    return f"validation Top-1 {100 * share:.1f} %"


def _speed(rate: float) -> str:
    return f"{rate:.0f} images per second"
