"""Plot of leakage against mask ratio: the strongest attack on each defence, with its interval."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry
from benchmarks.report.drawing import (
    CEILING_NOTE,
    DASHED,
    DOTTED,
    LEAKAGE_LABEL,
    Plot,
    Style,
    by_model,
    capped,
    defence_handles,
    facets,
    floors,
    interval_of,
    judging,
    leakage_scale,
    legend,
    name_of,
    reference_handles,
    styles,
)
from fedmjp.threat import ThreatModel

HEIGHT_INCHES = 3.2
DODGE = 0.012  # between defences at one ratio, of the axis
WIDEST = 0.06  # between the first and the last of many


def mask_ratios(board: Board, server: ThreatModel, prefix: str) -> list[Plot]:
    """One figure per model of which some setting saw two ratios or more."""
    caption = (
        "against the share of patches that are shuffled or masked: the strongest attack on each defence, mean and 95 % "
        f"interval. The dotted line is the grey guess. {CEILING_NOTE}"
    )
    return [
        Plot(
            f"{prefix}-mask-ratio-{place}",
            server,
            f"Leakage against mask ratio, {name_of(entries[0])}",
            f"Leakage of {name_of(entries[0])} {caption}",
            _figure(board, server, entries),
        )
        for place, entries in enumerate(by_model(judging(board, server)), start=1)
        if _has_ratios(entries)
    ]


def _has_ratios(entries: Sequence[Entry]) -> bool:
    return any(
        len({entry.mask_ratio for entry in entries if (entry.defence, entry.setting) == found}) > 1
        for found in {(entry.defence, entry.setting) for entry in entries}
    )


def _figure(board: Board, server: ThreatModel, entries: Sequence[Entry]) -> Figure:
    references = [e for e in board.entries if e.server == server and e.leakage and e.model == entries[0].model]
    guesses = floors([entry for entry in references if entry.protocol == entries[0].protocol])
    figure, columns = facets(entries, HEIGHT_INCHES)
    ends = [end for entry in entries for end in interval_of(entry)]
    present = {entry.defence for entry in entries}
    drawn = {defence: style for defence, style in styles(board).items() if defence in present}
    for setting, axes in columns.items():
        for place, (defence, style) in enumerate(drawn.items()):
            line = [entry for entry in entries if entry.setting == setting and entry.defence == defence]
            shift = min(DODGE, WIDEST / len(drawn)) * (place - (len(drawn) - 1) / 2)
            _line(axes, sorted(line, key=lambda entry: entry.mask_ratio), style, shift)
        axes.axhline(board.recognisable_at, **DASHED)
        if setting in guesses:
            axes.axhline(guesses[setting], **DOTTED)
        leakage_scale(axes, [*ends, *guesses.values(), board.recognisable_at], "y")
        axes.set_xlabel("mask ratio")
    next(iter(columns.values())).set_ylabel(LEAKAGE_LABEL)
    legend(figure, [*defence_handles(board, entries), *reference_handles(board, with_floor=bool(guesses))])
    return figure


def _line(axes: Axes, entries: Sequence[Entry], style: Style, shift: float) -> None:
    if not entries:
        return
    means = [capped(entry.metrics[LEAKAGE].mean) for entry in entries]
    ends = [interval_of(entry) for entry in entries]
    errors = [
        [mean - low for mean, (low, _) in zip(means, ends, strict=True)],
        [high - mean for mean, (_, high) in zip(means, ends, strict=True)],
    ]
    axes.errorbar(
        [entry.mask_ratio + shift for entry in entries],
        means,
        errors,
        color=style.colour,
        linestyle=style.line,
        marker=style.marker,
        markersize=4.5,
        linewidth=1.4,
        elinewidth=1.2,
        capsize=2.5,
    )
