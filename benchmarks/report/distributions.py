"""Plot of leakage per picture: every picture a dot, grouped by defence, between guess and bound."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, BoardEntry
from fedmjp.benchmarks.leaderboard.headline import headline
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.report.drawing import (
    CEILING_NOTE,
    REFERENCE,
    Plot,
    Scale,
    Style,
    cap_leakage,
    draw_panels,
    group_by_model,
    legend,
    make_handles,
    measure_floors,
    name_system,
    plain,
    select_styles,
)
from fedmjp.benchmarks.report.legend import name_defence
from fedmjp.threat import ThreatModel

ATTACKS = 3  # per defended model: the strongest
DOTS = 100  # per row: more are drawn as so many evenly spread ones
ROW_INCHES = 0.24
GOLDEN = 0.618034  # spreads the dots of a row upwards without a pattern
SPREAD = 0.5
BOUND = Line2D([], [], color=REFERENCE, linestyle="", marker="|", markersize=11, markeredgewidth=2.5, label="bound")


class _Label(NamedTuple):
    """One row: an attack under a defence; without an attack, the heading of its group."""

    defence: str
    mask_ratio: float
    attack: str | None


def plot_distributions(board: Board, server: ThreatModel, prefix: str) -> list[Plot]:
    """Plot the leakage of each picture: one figure per model, a row per attack and defence, a column per setting.

    Args:
        board: The board.
        server: The server's view of undefended clients.
        prefix: Beginning of the plots' names.
    """
    caption = (
        f"Every dot is a picture, the bar is the median. Of many pictures {DOTS} evenly spread ones are drawn, of many "
        f"attacks the {ATTACKS} strongest on each defence. The dotted line is the grey guess, the grey mark the median "
        f"of an attacker who was given more than any server sees. {CEILING_NOTE}"
    )
    scored = [entry for entry in board.entries if entry.server == server and entry.n]
    return [
        Plot(
            f"{prefix}-leakage-{place}",
            server,
            f"Leakage per picture, {name_system(entries[0])}",
            f"Leakage per picture of {name_system(entries[0])}. {caption}",
            _figure(board, entries),
        )
        for place, entries in enumerate(group_by_model(scored), start=1)
        if any(entry.role == "attack" for entry in entries)
    ]


def _figure(board: Board, entries: Sequence[BoardEntry]) -> Figure:
    ranked = [entry for entry in entries if entry.role == "attack"]
    drawn = select_styles(board, ranked)
    labels = _labels(ranked, list(drawn))
    attacks = [entry for entry in ranked if _label(entry) in labels]
    bounds = [entry for entry in entries if entry.role == "bound"]
    values = [value for entry in attacks for value in entry.scores[LEAKAGE].values()]
    values += [entry.metrics[LEAKAGE].median for entry in bounds]
    scale = Scale("x", board.recognisable_at, values, measure_floors(entries))

    def draw(axes: Axes, setting: str) -> None:
        for entry in attacks:
            if entry.setting == setting:
                _dots(axes, labels.index(_label(entry)), entry, drawn[entry.defence])
        for entry in bounds:
            if entry.setting == setting:
                _bound(axes, entry, labels)

    settings = [str(entry.setting) for entry in attacks]
    figure = draw_panels(settings, scale, draw, height=1.2 + ROW_INCHES * len(labels), against="")
    for axes in figure.axes:
        for place, label in enumerate(labels):
            if place and label.attack is None:
                axes.axhline(place - 0.5, color=REFERENCE, linewidth=0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
    first = figure.axes[0]
    first.set_yticks(range(len(labels)), [_text(label) for label in labels])
    for label, tick in zip(labels, first.get_yticklabels(), strict=True):
        tick.set_fontweight("bold" if label.attack is None else "normal")
    first.set_ylim(len(labels) - 0.4, -0.6)
    legend(figure, scale, [*make_handles(drawn), *([BOUND] if bounds else [])])
    return figure


def _label(entry: BoardEntry) -> _Label:
    return _Label(entry.defence, entry.mask_ratio, entry.attack)


def _text(label: _Label) -> str:
    if label.attack is not None:
        return plain(label.attack)
    return plain(name_defence(label.defence, 0)) + (f", {label.mask_ratio:g}" if label.mask_ratio else "")


def _labels(attacks: Sequence[BoardEntry], defences: Sequence[str]) -> list[_Label]:
    """List the rows by defence and ratio under a heading, the strongest attack of each group first."""
    strongest_first = sorted(attacks, key=headline, reverse=True)
    labels = dict.fromkeys(_label(entry) for entry in strongest_first)
    groups = grouped(labels, lambda label: (defences.index(label.defence), label.mask_ratio))
    return [
        label
        for group in sorted(groups)
        for label in (groups[group][0]._replace(attack=None), *groups[group][:ATTACKS])
    ]


def _dots(axes: Axes, place: int, entry: BoardEntry, style: Style) -> None:
    """Draw strokes without length under round caps, as one line, which is one element of the picture."""
    ordered = sorted(map(cap_leakage, entry.scores[LEAKAGE].values()))
    count = min(DOTS, len(ordered))
    values = [ordered[round(k * (len(ordered) - 1) / max(1, count - 1))] for k in range(count)]
    heights = [place + SPREAD * ((k * GOLDEN) % 1 - 0.5) for k in range(count)]
    across = [x for value in values for x in (value, value, float("nan"))]
    upwards = [y for height in heights for y in (height, height, float("nan"))]
    axes.plot(across, upwards, color=style.colour, linewidth=3.2, alpha=0.6, solid_capstyle="round")
    median = cap_leakage(entry.metrics[LEAKAGE].median)
    axes.plot([median, median], [place - 0.38, place + 0.38], color=style.colour, linewidth=2.2, solid_capstyle="butt")


def _bound(axes: Axes, entry: BoardEntry, labels: Sequence[_Label]) -> None:
    """Draw a bound across the rows of its defence."""
    rows = [place for place, label in enumerate(labels) if label[:2] == _label(entry)[:2]]
    if rows:
        median = cap_leakage(entry.metrics[LEAKAGE].median)
        ends = [rows[0] + 0.58, rows[-1] + 0.42]
        axes.plot([median, median], ends, color=REFERENCE, linewidth=2.5, solid_capstyle="butt", zorder=1.5)
