"""How a run ends on the terminal."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedmjp.cli.console import tell
from fedmjp.errors import GAVE_UP

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

FAILED = 1
BAD_INPUT = 2
FILES = "leaderboard.html (open it in a browser), .md, .csv, .json, .tex, manifest.json, plots/, pictures/"


def tell_outcome(
    failed: "pd.DataFrame", output: Path, console: "Console", unusable: Sequence[str] = (), *, figure: bool = False
) -> None:
    """Say where results are and what failed, most frequent error first.

    Ends with code 2 if there were unusable uploads (they are named), with code 1 if anything else failed. That an
    attack gave up is a result.

    Args:
        failed: Failed trials, as rows of ``Store.frame``.
        output: The folder of results.
        console: The terminal.
        unusable: Uploads that could not be attacked.
        figure: Whether there is a figure of all reconstructions.
    """
    tell(console, f"\nWritten to {output}: {'reconstructions.jpg, ' if figure else ''}{FILES}.")
    errors = Counter(failed["error"])
    again = any(not error.startswith(GAVE_UP) for error in errors)
    for error, count in errors.most_common():
        style = None if error.startswith(GAVE_UP) else "bold red"
        tell(console, f"{count} {'trial' if count == 1 else 'trials'} failed: {error}", style=style)
    if again:
        tell(console, "The same command tries again what did not give up, and nothing else.")
    tell(console, *(f"Unusable upload {problem}" for problem in unusable), style="bold red")
    if unusable:
        raise typer.Exit(BAD_INPUT)
    if again:
        raise typer.Exit(FAILED)
