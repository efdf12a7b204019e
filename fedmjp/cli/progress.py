"""Progress on the terminal: bars where there is one, a line per phase where there is none."""

from types import TracebackType
from typing import Self

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

from benchmarks.running.progress import RunProgress

FILE_WIDTH = 140


def wide_console() -> Console:
    """The terminal as wide as it is; files and pipes wide enough for every column."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


class Rate(ProgressColumn):
    """How many per second."""

    def render(self, task: Task) -> Text:
        """Empty until there is a rate."""
        return Text(f"{task.speed:.1f}/s" if task.speed else "", style="progress.data.speed")


class LiveBars:
    """Bars that are there while something goes on; a context manager.

    Args:
        console: The terminal; a file gets no bars.
        columns: Of a bar.
        transient: Whether the bars go away at the end.
    """

    def __init__(self, console: Console, *columns: ProgressColumn, transient: bool = False) -> None:
        self._console = console
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=transient)
        self._skipped: set[str] = set()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def skip(self, reason: str) -> None:
        """A picture cannot be read; it is told once."""
        if reason not in self._skipped:
            self._skipped.add(reason)
            self._console.print(f"Skipped: {reason}", highlight=False, markup=False, soft_wrap=True)


class TerminalProgress(LiveBars, RunProgress):
    """Shows the phases of a run."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description:<34}"),
            BarColumn(),
            MofNCompleteColumn(),
            Rate(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        super().__init__(console, *columns)
        self._task: TaskID | None = None
        self._steps: TaskID | None = None

    def federation(self, rounds: int) -> None:
        """A federated run of so many rounds starts."""
        self._phase("Federated rounds (Flower starts)", rounds)

    def round(self) -> None:
        """A round starts."""
        if self._task is not None:
            self._bars.update(self._task, advance=1, description="Federated rounds")

    def attacks(self, trials: int) -> None:
        """So many trials are about to be attacked and scored."""
        self._phase("Attacked and scored", trials)

    def trials(self, done: int) -> None:
        """So many more trials are in the store."""
        if self._steps is not None:
            self._bars.remove_task(self._steps)
            self._steps = None
        if self._task is not None:
            self._bars.advance(self._task, done)

    def optimisation(self, done: int, total: int, loss: float) -> None:
        """An attack that optimises has done so many of its steps."""
        if self._steps is None:
            self._steps = self._bars.add_task("", total=total)
        self._bars.update(self._steps, completed=done, total=total, description=f"  optimising, loss {loss:.4g}")

    def _phase(self, description: str, total: int) -> None:
        self._task = self._bars.add_task(description, total=total)
        if not self._console.is_terminal:
            self._console.print(f"{description}: {total}")
