"""A figure of a training run's history."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import MaxNLocator

from fedmjp.drawings import save_plot


def draw(history: Path, figure: Path, *, title: str) -> None:
    """Draw loss and validation accuracy over epochs or rounds.

    Args:
        history: CSV file of the run.
        figure: PNG file to write.
        title: Title of the figure.
    """
    rows = pd.read_csv(history)
    counter = rows.columns[0]
    plot, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    for column, label, style in (("loss", "training", "-"), ("validation_loss", "validation", "--")):
        if column in rows:
            above.plot(rows[counter], rows[column], style, color="#0072B2", label=label)
    above.set_ylabel("cross-entropy")
    above.legend(frameon=False)
    below.plot(rows[counter], 100 * rows["top1"], color="#D55E00")
    below.set_ylim(bottom=0)
    below.set_ylabel("validation Top-1 (%)")
    below.set_xlabel(counter)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    plot.suptitle(title)
    save_plot(plot, figure, dots_per_inch=150)
    plt.close(plot)
