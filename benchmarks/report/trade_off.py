"""Plot of privacy against utility: what the strongest attack recovers, and what the model is worth."""

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry
from benchmarks.report.drawing import (
    CEILING_NOTE,
    DASHED,
    LEAKAGE_LABEL,
    Plot,
    Style,
    capped,
    defence_handles,
    facets,
    interval_of,
    judging,
    leakage_scale,
    legend,
    plain,
    reference_handles,
    styles,
)
from fedmjp.threat import ThreatModel

HEIGHT_INCHES = 3.3
MARKERS = "osD^vPX*"


def trade_off(board: Board, server: ThreatModel, prefix: str) -> list[Plot]:
    """One figure of all models whose accuracy is known."""
    judged = [entry for entry in judging(board, server) if entry.utility]
    if not judged:
        return []
    drawn = styles(board)
    models = list(dict.fromkeys(entry.model for entry in judged))
    figure, columns = facets(judged, HEIGHT_INCHES)
    ends = [end for entry in judged for end in interval_of(entry)]
    for setting, axes in columns.items():
        for entry in judged:
            if entry.setting == setting and entry.utility:
                _point(axes, entry.utility.top1, entry, drawn[entry.defence], _marker(models.index(entry.model)))
        axes.axhline(board.recognisable_at, **DASHED)
        axes.margins(x=0.12)
        leakage_scale(axes, [*ends, board.recognisable_at], "y")
        axes.set_xlabel("top-1 accuracy in %")
    next(iter(columns.values())).set_ylabel(LEAKAGE_LABEL)
    shapes = [
        Line2D([], [], color="black", linestyle="", marker=_marker(place), fillstyle="none", label=plain(model))
        for place, model in enumerate(models)
    ]
    legend(figure, [*defence_handles(board, judged), *reference_handles(board, with_floor=False), *shapes])
    caption = (
        "Leakage of the strongest attack (mean and 95 % interval) against top-1 accuracy; low and right is best. A "
        f"larger marker is a higher mask ratio. {CEILING_NOTE}"
    )
    return [Plot(f"{prefix}-utility", server, "Leakage against accuracy", caption, figure)]


def _marker(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def _point(axes: Axes, top1: float, entry: Entry, style: Style, marker: str) -> None:
    colour = style.colour
    size = 4.5 + 8 * entry.mask_ratio
    mean = capped(entry.metrics[LEAKAGE].mean)
    axes.plot([top1, top1], interval_of(entry), color=colour, linestyle=style.line, linewidth=1)
    axes.plot([top1], [mean], marker, color=colour, markersize=size, fillstyle="none", markeredgewidth=1.3)
