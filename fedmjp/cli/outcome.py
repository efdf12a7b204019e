"""How a run ends on the terminal."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.store import Trial

FAILED = 1
BAD_INPUT = 2
FILES = "report.html, leaderboard.csv, leaderboard.md, reconstructions.png, manifest.json, trials.sqlite, pictures/"


def tell_outcome(failed: "Sequence[Trial]", output: Path, console: "Console", unusable: Sequence[str] = ()) -> None:
    """Say where results are and what failed, most frequent error first.

    Ends with code 2 if uploads were unusable (they are named), with code 1 if anything else failed.
    """
    console.print(f"\nWritten to {output}: {FILES}.", highlight=False, markup=False)
    for error, count in Counter(trial.error for trial in failed).most_common():
        trials = "trial" if count == 1 else "trials"
        console.print(f"{count} {trials} failed: {error}", style="bold red", markup=False, soft_wrap=True)
    for problem in unusable:
        console.print(f"Unusable upload {problem}", style="bold red", markup=False, soft_wrap=True)
    if unusable:
        raise typer.Exit(BAD_INPUT)
    if failed:
        raise typer.Exit(FAILED)
