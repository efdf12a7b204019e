"""Plot of leakage per picture: every picture a dot, grouped by defence, between guess and bound."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry
from benchmarks.report.drawing import (
    CEILING_NOTE,
    DASHED,
    DOTTED,
    REFERENCE,
    Plot,
    Style,
    by_model,
    capped,
    defence_handles,
    defence_name,
    facets,
    floors,
    leakage_scale,
    legend,
    name_of,
    plain,
    reference_handles,
    styles,
)
from fedmjp.threat import ThreatModel

ATTACKS = 3  # per defended model: the strongest
DOTS = 100  # per row: more are drawn as so many evenly spread ones
ROW_INCHES = 0.24
GOLDEN = 0.618034  # spreads the dots of a row upwards without a pattern
SPREAD = 0.5


class _Label(NamedTuple):
    """One row: an attack under a defence; without an attack, the heading of its group."""

    defence: str
    mask_ratio: float
    attack: str | None


def distributions(board: Board, server: ThreatModel, prefix: str) -> list[Plot]:
    """One figure per model, one row per attack and defence, one column per setting."""
    caption = (
        f"Every dot is a picture, the bar is the median. Of many pictures {DOTS} evenly spread ones are drawn, of many "
        f"attacks the {ATTACKS} strongest on each defence. The dotted line is the grey guess, the grey mark the median "
        f"of an attacker who was given more than any server sees. {CEILING_NOTE}"
    )
    scored = [entry for entry in board.entries if entry.server == server and entry.leakage]
    return [
        Plot(
            f"{prefix}-leakage-{place}",
            server,
            f"Leakage per picture, {name_of(entries[0])}",
            f"Leakage per picture of {name_of(entries[0])}. {caption}",
            _figure(board, entries),
        )
        for place, entries in enumerate(by_model(scored), start=1)
        if any(entry.role == "attack" for entry in entries)
    ]


def _figure(board: Board, entries: Sequence[Entry]) -> Figure:
    drawn = styles(board)
    labels = _labels(entries, list(drawn))
    attacks = [entry for entry in entries if entry.role == "attack" and _label(entry) in labels]
    bounds = [entry for entry in entries if entry.role == "bound"]
    guesses = floors(entries)
    figure, columns = facets(attacks, height=1.2 + ROW_INCHES * len(labels))
    values = [value for entry in attacks for value in entry.leakage.values()]
    values += [entry.metrics[LEAKAGE].median for entry in bounds]
    for setting, axes in columns.items():
        for entry in attacks:
            if entry.setting == setting:
                _dots(axes, labels.index(_label(entry)), entry, drawn[entry.defence])
        for entry in bounds:
            if entry.setting == setting:
                _bound(axes, entry, labels)
        axes.axvline(board.recognisable_at, **DASHED)
        if setting in guesses:
            axes.axvline(guesses[setting], **DOTTED)
        for place, label in enumerate(labels):
            if place and label.attack is None:
                axes.axhline(place - 0.5, color=REFERENCE, linewidth=0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        leakage_scale(axes, [*values, *guesses.values(), board.recognisable_at], "x")
    first = next(iter(columns.values()))
    first.set_yticks(range(len(labels)), [_text(label) for label in labels])
    for label, tick in zip(labels, first.get_yticklabels(), strict=True):
        tick.set_fontweight("bold" if label.attack is None else "normal")
    first.set_ylim(len(labels) - 0.4, -0.6)
    bound = [
        Line2D([], [], color=REFERENCE, linestyle="", marker="|", markersize=11, markeredgewidth=2.5, label="bound")
    ]
    legend(
        figure,
        [
            *defence_handles(board, attacks),
            *(bound if bounds else []),
            *reference_handles(board, with_floor=bool(guesses)),
        ],
    )
    return figure


def _label(entry: Entry) -> _Label:
    return _Label(entry.defence, entry.mask_ratio, entry.attack)


def _text(label: _Label) -> str:
    if label.attack is not None:
        return plain(label.attack)
    return plain(defence_name(label.defence)) + (f", {label.mask_ratio:g}" if label.mask_ratio else "")


def _labels(entries: Sequence[Entry], defences: Sequence[str]) -> list[_Label]:
    """Rows grouped by defence and ratio under a heading, the strongest attack of each group first."""
    peaks: dict[_Label, float] = {}
    for entry in entries:
        if entry.role == "attack":
            label = _label(entry)
            peaks[label] = max(peaks.get(label, 0.0), entry.metrics[LEAKAGE].mean)
    groups: dict[tuple[int, float], list[_Label]] = {}
    for label in sorted(peaks, key=lambda label: -peaks[label]):
        groups.setdefault((defences.index(label.defence), label.mask_ratio), []).append(label)
    return [label for group in sorted(groups) for label in _group(groups[group])]


def _group(labels: Sequence[_Label]) -> list[_Label]:
    return [labels[0]._replace(attack=None), *labels[:ATTACKS]]


def _dots(axes: Axes, place: int, entry: Entry, style: Style) -> None:
    """Strokes without length under round caps, as one line, which is one element of the picture."""
    ordered = sorted(map(capped, entry.leakage.values()))
    steps = max(1, min(DOTS, len(ordered)) - 1)
    shown = ordered if len(ordered) <= DOTS else [ordered[round(k * (len(ordered) - 1) / steps)] for k in range(DOTS)]
    heights = [place + SPREAD * ((k * GOLDEN) % 1 - 0.5) for k in range(len(shown))]
    across = [x for value in shown for x in (value, value, float("nan"))]
    upwards = [y for height in heights for y in (height, height, float("nan"))]
    axes.plot(across, upwards, color=style.colour, linewidth=3.2, alpha=0.6, solid_capstyle="round")
    median = capped(entry.metrics[LEAKAGE].median)
    axes.plot([median, median], [place - 0.38, place + 0.38], color=style.colour, linewidth=2.2, solid_capstyle="butt")


def _bound(axes: Axes, entry: Entry, labels: Sequence[_Label]) -> None:
    """Across the rows of the defence that it belongs to."""
    rows = [place for place, label in enumerate(labels) if label == _label(entry)._replace(attack=label.attack)]
    if rows:
        median = capped(entry.metrics[LEAKAGE].median)
        ends = [rows[0] + 0.58, rows[-1] + 0.42]
        axes.plot([median, median], ends, color=REFERENCE, linewidth=2.5, solid_capstyle="butt", zorder=1.5)
