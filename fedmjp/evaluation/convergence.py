"""How fast runs come to their accuracy: Top-1 against epochs or rounds, as in MJP's Fig. 6."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmjp.errors import BadInputError
from fedmjp.evaluation.style import COLOURS, MARKERS, STYLE
from fedmjp.training.run_folder import TrainingFolder

TOP1 = "top1"
SIZE_INCHES = (8.0, 5.0)
MARKS = 10  # on a line at most


def history_of(folder: Path) -> pd.DataFrame:
    """The history of a run: epochs or rounds first; BadInputError if it has none with an accuracy."""
    if not folder.is_dir():
        raise BadInputError(f"there is no folder {folder}")
    path = TrainingFolder(folder).history
    if not path.exists():
        raise BadInputError(f"{folder} has no {path.name}: name the folder of a training run")
    try:
        rows = pd.read_csv(path)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError):
        rows = pd.DataFrame()
    if TOP1 not in rows or not rows[TOP1].notna().any():
        raise BadInputError(f"{path} states no {TOP1} of any epoch or round: there is nothing to draw")
    return rows


def convergence(histories: Mapping[str, pd.DataFrame]) -> Figure:
    """A line for each run; BadInputError if some count epochs and others rounds."""
    counters = {name: str(rows.columns[0]) for name, rows in histories.items()}
    first = next(iter(counters))
    for name, counter in counters.items():
        if counter != counters[first]:
            raise BadInputError(
                f"{first} counts {counters[first]}s and {name} {counter}s: compare runs that count the same"
            )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.subplots()
        for (name, rows), colour, marker in zip(histories.items(), cycle(COLOURS), cycle(MARKERS), strict=False):
            drawn = rows.dropna(subset=[TOP1])
            axes.plot(
                drawn.iloc[:, 0],
                100 * drawn[TOP1],
                color=colour,
                marker=marker,
                markevery=max(1, len(drawn) // MARKS),
                label=name,
                linewidth=2,
            )
        axes.set(xlabel=counters[first], ylabel="validation Top-1 (%)")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower right")
    return figure
