"""Progress of an evaluation on the terminal: a bar where there is one."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from fedmjp.cli.progress import LiveBars, Rate


class EvaluationProgress(LiveBars):
    """Shows how many pictures are done.

    Args:
        console: The terminal.
        pictures: Those of all models together.
    """

    def __init__(self, console: Console, pictures: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
        super().__init__(console, *columns, transient=True)
        self._task = self._bars.add_task("Pictures", total=pictures)

    def advance(self, pictures: int) -> None:
        """So many more are done."""
        self._bars.advance(self._task, pictures)
