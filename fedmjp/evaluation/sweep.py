"""Figures against the mask ratio of x~, as in MJP's Fig. 3."""

import math
from collections.abc import Sequence
from itertools import cycle

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedmjp.evaluation.figures import Estimate, Line
from fedmjp.evaluation.plots import COLOURS, MARKERS, STYLE
from fedmjp.evaluation.runs import distinguish_kinds

PANELS = {"top1_shuffled": "Top-1 of x~ (%)", "difference": "Diff. Norm.", "consistency": "Consistency (%)"}
SIZE_INCHES = (13.0, 4.6)
LEGEND_INCHES = 0.28  # of height for each line
LEGEND_LETTERS = 120  # that have room side by side
HANDLE_LETTERS = 6


def draw_sweep(lines: Sequence[Line], data: str) -> Figure:
    """Draw a line for each kind of run; the band is the standard deviation over seeds, or one seed's interval.

    Args:
        lines: Of all kinds and mask ratios.
        data: Name of the pictures, for the title.
    """
    kinds = list(dict.fromkeys(line.kind for line in lines))
    common, names = distinguish_kinds(kinds)
    columns = min(len(kinds), max(1, LEGEND_LETTERS // (HANDLE_LETTERS + max(map(len, names)))))
    with mpl.rc_context(STYLE):
        height = SIZE_INCHES[1] + LEGEND_INCHES * math.ceil(len(kinds) / columns)
        figure = Figure(figsize=(SIZE_INCHES[0], height), layout="constrained")
        row = figure.subplots(1, len(PANELS))
        for axes, (measure, label) in zip(row, PANELS.items(), strict=True):
            for kind, name, colour, marker in zip(kinds, names, cycle(COLOURS), cycle(MARKERS), strict=False):
                points = _collect_points([line for line in lines if line.kind == kind], measure)
                _draw_line(axes, points, name, colour, marker)
            axes.set(xlabel="mask ratio of x~", ylabel=label)
            axes.set_xlim(left=0)
        row[1].set_ylim(bottom=0)
        row[2].set_ylim(top=100)
        figure.suptitle(f"{common}{lines[0].pictures:,} pictures of {data}", fontsize=12)
        handles, _ = row[0].get_legend_handles_labels()
        figure.legend(
            handles=handles, loc="outside lower left", ncols=columns, title=_describe_bands(lines), alignment="left"
        )
    return figure


def _collect_points(lines: Sequence[Line], measure: str) -> list[tuple[float, Estimate]]:
    """Sort the estimates by ratio; the accuracy on x~ of ratio 0 is that on x."""
    points = [(line.ratio, estimate) for line in lines if (estimate := line.spreads[measure]) is not None]
    whole = lines[0].spreads["top1"]
    if measure == "top1_shuffled" and whole is not None and all(ratio > 0 for ratio, _ in points):
        points.append((0.0, whole))
    return sorted(points, key=lambda point: point[0])


def _draw_line(axes: Axes, points: Sequence[tuple[float, Estimate]], name: str, colour: str, marker: str) -> None:
    ratios, values = [ratio for ratio, _ in points], [estimate.value for _, estimate in points]
    axes.plot(ratios, values, color=colour, marker=marker, label=name, linewidth=2, clip_on=False)
    bands = [estimate.band for _, estimate in points]
    axes.fill_between(ratios, [low for low, _ in bands], [high for _, high in bands], color=colour, alpha=0.18, lw=0)


def _describe_bands(lines: Sequence[Line]) -> str:
    seeds = {line.seeds > 1 for line in lines}
    several, single = "standard deviation over seeds", "95 % interval over pictures of the only seed"
    return f"Bands: {several if True in seeds else single}{f', or {single}' if len(seeds) > 1 else ''}"
