"""Figures of position embeddings (projections, similarity, spectrum) and of the last block's attention."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from fedmjp.evaluation.plots import COLOURS, STYLE
from fedmjp.evaluation.positions import Floats, PositionTable, compute_similarities, project_on_principal_axes

PANEL_INCHES = 3.2
TILES_INCHES = 4.6
GAP = 1  # cells between two maps
DEPTHS = 3  # dimensions of the principal components that are drawn


def project_by_umap(rows: Floats, seed: int) -> Floats:
    """Project rows by UMAP with its default settings, (patches, 2).

    Args:
        rows: (patches, dim).
        seed: Of UMAP.
    """
    from umap import UMAP  # noqa: PLC0415 (compiles for seconds)

    points: Floats = UMAP(n_components=2, random_state=seed, n_jobs=1).fit_transform(rows).astype(np.float64)
    return points


def draw_projections(tables: Sequence[PositionTable], flat: Sequence[Floats]) -> Figure:
    """Draw Fig. 1 and 7: the first three principal components of each table, and its projection by UMAP.

    Args:
        tables: One per run.
        flat: Of each table its projection (patches, 2).
    """
    height = PANEL_INCHES * len(tables)
    with mpl.rc_context({**STYLE, "font.size": 10}):
        figure = Figure(figsize=(3 * PANEL_INCHES, height), layout="constrained")
        for number, (table, points) in enumerate(zip(tables, flat, strict=True)):
            colours = _colour_by_place(table)
            space: Any = figure.add_subplot(len(tables), 2, 2 * number + 1, projection="3d")
            plane = figure.add_subplot(len(tables), 2, 2 * number + 2)
            components = project_on_principal_axes(table.rows, DEPTHS)
            drawn: list[tuple[Any, Floats]] = [(space, components), (plane, points)]
            for axes, places in drawn:
                for row in np.split(places, table.grid):
                    axes.plot(*row.T, color="0.8", linewidth=0.6, zorder=0)
                axes.scatter(*places.T, c=colours, s=18, linewidths=0)
            space.set(title=f"{table.name}: principal components", xticks=[], yticks=[], zticks=[])
            plane.set(title=f"{table.name}: UMAP", xticks=[], yticks=[])
        figure.suptitle("a patch is redder the lower, and greener the further right it lies; lines follow its row")
    return figure


def draw_similarities(tables: Sequence[PositionTable]) -> Figure:
    """Draw a map per patch for each table: the cosines of its row with all rows, in the places of the picture."""
    figure = Figure(figsize=(TILES_INCHES * len(tables), TILES_INCHES + 0.6), layout="constrained")
    for axes, table in zip(np.atleast_1d(figure.subplots(1, len(tables))), tables, strict=True):
        side, cosines = table.grid, compute_similarities(table.rows)
        tiles = np.full((side, side + GAP, side, side + GAP), np.nan)
        tiles[:, :side, :, :side] = cosines.reshape(side, side, side, side).transpose(0, 2, 1, 3)
        heatmap = axes.imshow(tiles.reshape(side * (side + GAP), -1), vmin=-1, vmax=1, cmap="RdBu_r")
        axes.set(title=table.name, xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set_visible(False)
    figure.colorbar(heatmap, ax=figure.axes, shrink=0.6, label="cosine")
    return figure


def draw_energy(spectra: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw Fig. 4 by name of the run: the share of all singular values that the k largest have."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 4.4), layout="constrained")
        axes = figure.subplots()
        for (name, spectrum), colour in zip(spectra.items(), cycle(COLOURS), strict=False):
            axes.plot(spectrum["k"], 100 * spectrum["share"], color=colour, label=name, linewidth=2)
        axes.set(xlabel="largest singular values, k", ylabel="share of their sum (%)", ylim=(0, 101))
        axes.set_xlim(left=0)
        axes.legend(loc="lower right")
    return figure


def draw_attention(picture: Tensor, attention: Mapping[str, Tensor]) -> Figure:
    """Draw Fig. 8: a picture, and the attention of each run with a column per head.

    Args:
        picture: (3, size, size) in [0, 1].
        attention: By name of the run, (heads, patches).
    """
    heads = max(len(maps) for maps in attention.values())
    size = picture.shape[-1]
    figure = Figure(figsize=(1.5 * (heads + 1), 1.7 * len(attention)), layout="constrained")
    grid = figure.subplots(len(attention), heads + 1, squeeze=False)
    for row, (name, maps) in zip(grid, attention.items(), strict=True):
        row[0].imshow(picture.permute(1, 2, 0).numpy())
        row[0].set_ylabel(name, fontsize=8)
        side = math.isqrt(maps.shape[1])
        upsampled = F.interpolate(maps.view(1, len(maps), side, side), size=(size, size), mode="nearest")[0]
        for number, (axes, head) in enumerate(zip(row[1:], upsampled, strict=False), start=1):
            axes.imshow(head.numpy(), cmap="viridis")
            axes.set_title(f"head {number}", fontsize=8)
        for axes in row:
            axes.set(xticks=[], yticks=[])
        for axes in row[len(maps) + 1 :]:
            axes.set_visible(False)
    return figure


def _colour_by_place(table: PositionTable) -> Floats:
    """Choose colours by row and column, (patches, 3)."""
    share = table.places / max(1, table.grid - 1)
    colours: Floats = np.column_stack([share, np.full(len(share), 0.5)])
    return colours
