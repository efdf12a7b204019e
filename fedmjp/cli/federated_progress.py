"""Progress of a federated run on the terminal: a bar where there is one, a line per round in any case."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedmjp.cli.progress import LiveBars

if TYPE_CHECKING:
    from benchmarks.federation.training import RoundReport


class FederatedProgress(LiveBars):
    """Shows rounds.

    Args:
        console: The terminal, or a file.
        done: Rounds that were done before.
        rounds: All rounds.
    """

    def __init__(self, console: Console, done: int, rounds: int) -> None:
        self._rounds = rounds
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        super().__init__(console, *columns)
        self._task = self._bars.add_task("Rounds (Flower starts)", completed=done, total=rounds)

    def round(self, report: "RoundReport") -> None:
        """A round is done."""
        top1, speed = f"validation Top-1 {100 * report.top1:.1f} %", f"{report.images_per_second:.0f} images per second"
        refused = f", {report.refused} refused" if report.refused else ""
        skipped = f", {report.skipped} unreadable pictures skipped" if report.skipped else ""
        loss = "" if report.loss is None else f"loss {report.loss:.3f}, "
        told = f"{report.clients} clients{refused}, {loss}{top1}, {speed}{skipped}"
        self._console.print(f"Round {report.round} of {self._rounds}: {told}", highlight=False)
        self._bars.update(self._task, completed=report.round, description=f"Rounds ({top1}, {speed})")

    def skipped(self, reason: str) -> None:
        """A picture of the validation split cannot be read."""
        self._console.print(f"Skipped: {reason}", highlight=False, markup=False, soft_wrap=True)
