"""Top-1 of runs against epochs or rounds, as in MJP's Fig. 6, and the style of all line plots."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmjp.errors import BadInputError
from fedmjp.training.run_folder import TrainingFolder

# Okabe and Ito's colours that can be told from white, with markers for those who cannot tell the colours.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE: Any = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
TOP1 = "top1"
SIZE_INCHES = (8.0, 5.0)
MARKS = 10  # on a line at most


def read_history(folder: Path) -> pd.DataFrame:
    """Read the history of a training run, with epochs or rounds in the first column.

    Args:
        folder: Of the run.

    Raises:
        BadInputError: If it has no history with an accuracy.
    """
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


def draw_convergence(histories: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw a line of Top-1 for each run.

    Args:
        histories: By name of the run.

    Raises:
        BadInputError: If some count epochs and others rounds.
    """
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
