"""How a run ends on the terminal."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import typer

from fedmjp.cli.console import tell
from fedmjp.errors import GAVE_UP

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from fedmjp.benchmarks.folder.trials import TrialResult
    from fedmjp.benchmarks.plan.trial_plan import Cell

FAILED = 1
BAD_INPUT = 2
FILES = "leaderboard.html (open it in a browser), .md, .csv, .json, .tex, manifest.json, plots/, pictures/"
BOUND = "Rows marked bound were given more than any server sees: they limit what attacks can reach."


def tell_outcome(
    failed: "pd.DataFrame", output: Path, console: "Console", unusable: Sequence[str] = (), *, figure: bool = False
) -> None:
    """Tell where results are and which trials failed, most frequent error first.

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
    tell_errors(failed["error"], console, unusable)


def tell_errors(errors: Iterable[str], console: "Console", unusable: Sequence[str] = ()) -> None:
    """Tell the errors of failed trials, most frequent first, and end as ``tell_outcome`` does.

    Args:
        errors: One per failed trial.
        console: The terminal.
        unusable: Uploads that could not be attacked.
    """
    counts = Counter(errors)
    retries = any(not error.startswith(GAVE_UP) for error in counts)
    for error, count in counts.most_common():
        style = None if error.startswith(GAVE_UP) else "bold red"
        tell(console, f"{count} {'trial' if count == 1 else 'trials'} failed: {error}", style=style)
    if retries:
        tell(console, "The same command tries again what did not give up, and nothing else.")
    tell(console, *(f"Unusable upload {problem}" for problem in unusable), style="bold red")
    if unusable:
        raise typer.Exit(BAD_INPUT)
    if retries:
        raise typer.Exit(FAILED)


def print_scores(cells: Sequence["Cell"], trials: Sequence["TrialResult"], console: "Console") -> None:
    """Print one row per attack, defence and setting, and the notes without which nobody should read them.

    Args:
        cells: The planned cells, in the order of the rows.
        trials: Their trials, done or failed.
        console: The terminal.
    """
    from rich import box
    from rich.table import Table

    rows = [_summary(cell, trials) for cell in cells]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="Scores against the private pictures", title_justify="left"
    )
    for name in names:
        table.add_column(name, justify="left" if name in ("model", "defence", "attack") else "right")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in names))
    console.print(table)
    tell(console, *(f"- {note}" for note in dict.fromkeys(_notes(cells))))


def _summary(cell: "Cell", trials: Sequence["TrialResult"]) -> dict[str, str]:
    from fedmjp.metrics import EXACT

    label = {"floor": "baseline", "bound": "bound", "attack": ""}[cell.role]
    columns = cell.columns.items()
    of_cell = [trial for trial in trials if all(getattr(trial, name) == value for name, value in columns)]
    scores = [trial.scores for trial in of_cell if trial.status == "ok"]
    failures = len(of_cell) - len(scores)
    row = {
        "model": cell.model,
        "defence": cell.defence,
        "mask ratio": f"{cell.mask_ratio:g}" if cell.mask_ratio else "",
        "attack": f"{cell.attack} ({label})" if label else cell.attack,
        "setting": str(cell.setting),
        "n": str(len(scores)),
        "failed": str(failures) if failures else "",
    }
    if cell.reveals == "pictures":
        psnr, ssim = _values(scores, "psnr"), _values(scores, "ssim")
        return row | {
            "recovered exactly": f"{sum(value >= EXACT for value in psnr)} of {len(psnr)}",
            "median PSNR, dB": f"{median(psnr):.1f}" if psnr else "",
            "worst PSNR, dB": f"{max(psnr):.1f}" if psnr else "",
            "median SSIM": f"{median(ssim):.3f}" if ssim else "",
        }
    shares = {name: _values(scores, metric) for name, metric in SHARES.items()}
    return row | {name: f"{100 * sum(values) / len(values):.0f}" for name, values in shares.items() if values}


SHARES = {"labels right, %": "label_accuracy", "found among all, %": "rank1", "members known, %": "membership"}


def _values(scores: Iterable[Mapping[str, float | None]], metric: str) -> list[float]:
    return [value for row in scores if (value := row.get(metric)) is not None]


def _notes(cells: Sequence["Cell"]) -> Iterator[str]:
    from fedmjp.metrics import EXACT, metric

    for planned in cells:
        yield planned.threat.sentence(cell.pipeline for cell in cells if cell.threat == planned.threat)
    for planned in cells:
        if planned.caveat:
            yield f"{planned.caveat[0].upper()}{planned.caveat[1:].removesuffix('.')}."
        if planned.left_out:
            yield f"{planned.attack} is not run on {planned.left_out} pictures that its prior was made of."
    if any(planned.role == "bound" for planned in cells):
        yield BOUND
    yield (
        "Settings: a, gradient of x, compared with x; b, gradient of the shuffled x~, compared with x~; c, gradient of "
        f"x~, compared with x. Recovered exactly: {EXACT:g} dB or more. Worst is the most revealing picture."
    )
    if any(planned.weights == "untrained" for planned in cells):
        yield "Weights are initial ones drawn from the seed (untrained) where scores.csv names no others."
    if reason := metric("lpips_alex").missing():
        yield f"lpips_alex is empty: {reason}; `fedmjp doctor` says what to do."
