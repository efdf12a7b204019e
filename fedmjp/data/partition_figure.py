"""A figure of which client has how many pictures of which class."""

from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmjp.data.partitions import Partition
from fedmjp.drawings import save_plot

WIDTH, PIXELS_PER_INCH = 10.0, 150
TALLEST = 12.0


def counts_by_client(partition: Partition, labels: np.ndarray) -> np.ndarray:
    """Count each client's pictures of each class, (clients, classes).

    Args:
        partition: The shares.
        labels: (pictures,) int64 of all pictures.
    """
    classes = int(labels.max()) + 1
    return np.stack([np.bincount(labels[share], minlength=classes) for share in partition.shares])


def draw_partition(partition: Partition, labels: np.ndarray, path: Path) -> None:
    """Save a figure with a row per client, a column per class, and each client's number of pictures.

    The colours are logarithmic, because Dirichlet shares differ by orders of magnitude; white is no picture.

    Args:
        partition: The shares.
        labels: (pictures,) int64 of all pictures.
        path: PNG file to write.
    """
    counts = counts_by_client(partition, labels)
    height = float(np.clip(1.6 + 0.28 * len(counts), 3.0, TALLEST))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid, totals = figure.subplots(1, 2, sharey=True, width_ratios=(6, 1))
    visible, norm = np.ma.masked_equal(counts, 0), LogNorm(1, max(counts.max(), 2))
    picture = grid.imshow(visible, aspect="auto", interpolation="nearest", cmap="viridis_r", norm=norm)
    figure.colorbar(
        picture, ax=grid, location="left", label="pictures of the class", fraction=0.04, pad=0.02, aspect=40
    )
    grid.set(xlabel="class", ylabel="client")
    for axis in (grid.xaxis, grid.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    totals.barh(np.arange(len(counts)), counts.sum(axis=1), color="0.45")
    totals.set_xlabel("pictures")
    totals.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    totals.tick_params(axis="y", left=False, labelleft=False)
    totals.spines[["top", "right"]].set_visible(False)
    if len(partition.dropped):
        figure.suptitle(f"{len(partition.dropped):,} of {len(labels):,} pictures are with no client", fontsize=9)
    save_plot(figure, path, dots_per_inch=PIXELS_PER_INCH)
