"""Plots of a leaderboard: leakage per picture, privacy against utility, leakage against mask ratio."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry
from benchmarks.report import numbers
from benchmarks.report.rows import strongest, threats
from fedmjp.threat import ThreatModel

# Okabe and Ito's colours that keep a contrast of 3:1 on white and on near black.
DEFENCE_COLOURS = {"none": "#d55e00", "jigsaw": "#009e73", "mjp": "#0072b2"}
LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c0699a")
LINE_STYLES = ("-", "--")
REFERENCE = "#808080"
MARKERS = "osD^vPX*"
POINTS = 25  # pictures up to which each one is drawn
SERIES = len(LINE_COLOURS) * len(LINE_STYLES)
ROW_INCHES = 0.21
LETTERS = 48  # of a label, before it is cut
HANDLE_INCHES = 0.5
LETTER_INCHES = 0.06
LEAKAGE_LABEL = "leakage, PSNR in dB"
DASHED: Any = {"color": "black", "linewidth": 0.8, "linestyle": "--"}
DOTTED: Any = {"color": REFERENCE, "linewidth": 1.2, "linestyle": ":"}
STYLE: Any = {
    "svg.hashsalt": "fedmjp",
    "svg.fonttype": "none",  # text stays text: searchable, and in the reader's own font
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Plot:
    """A figure, its file name, the threat model, and what it shows in words."""

    name: str
    threat: ThreatModel
    caption: str
    figure: Figure


def plots(board: Board) -> list[Plot]:
    """All plots that the board has the numbers for, one threat model after the other."""
    with mpl.rc_context(STYLE):
        return [
            plot
            for index, threat in enumerate(threats(board), start=1)
            for plot in (
                *_distributions(board, threat, f"threat-{index}"),
                *_trade_off(board, threat, f"threat-{index}"),
                *_ratios(board, threat, f"threat-{index}"),
            )
        ]


def _entries(board: Board, threat: ThreatModel) -> list[Entry]:
    return [entry for entry in board.entries if entry.threat == threat and entry.leakage]


def _models(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries of one model with one set of weights each, scored alike."""
    found: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        found.setdefault((entry.model, entry.weights, entry.protocol), []).append(entry)
    return list(found.values())


def _distributions(board: Board, threat: ThreatModel, prefix: str) -> list[Plot]:
    """One figure per model, one row per attack and defence, one column per setting."""
    caption = (
        "Leakage per picture of {model}. Boxes hold the middle half of the pictures, whiskers 5 to 95 %, the bar is "
        "the median; ticks are single pictures where there are few. Grey boxes are bounds, the dotted line is the "
        "grey guess, the dashed one is where a picture counts as recognisable."
    )
    return [
        Plot(
            f"{prefix}-leakage-{place}",
            threat,
            caption.format(model=_name(entries[0])),
            _boxes(board, entries),
        )
        for place, entries in enumerate(_models(_entries(board, threat)), start=1)
        if any(entry.role != "floor" for entry in entries)
    ]


def _boxes(board: Board, entries: Sequence[Entry]) -> Figure:
    shown = [entry for entry in entries if entry.role != "floor"]
    labels = list(dict.fromkeys(_label(entry) for entry in shown))
    floors = {str(entry.setting): entry.metrics[LEAKAGE].mean for entry in entries if entry.role == "floor"}
    figure, facets = _facets(shown, height=1.1 + ROW_INCHES * len(labels))
    for setting, axes in facets.items():
        _boxes_of([entry for entry in shown if entry.setting == setting], labels, axes)
        axes.axvline(board.recognisable_at, **DASHED)
        if setting in floors:
            axes.axvline(floors[setting], **DOTTED)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(LEAKAGE_LABEL)
    first = next(iter(facets.values()))
    first.set_yticks(range(len(labels)), labels)
    first.set_ylim(len(labels) - 0.4, -0.6)
    handles = [
        *(Line2D([], [], color=colour, linewidth=4, label=name) for name, colour in _colours(shown).items()),
        *([Line2D([], [], **DOTTED, label="grey guess")] if floors else []),
        Line2D([], [], **DASHED, label=f"recognisable, {board.recognisable_at:g} dB"),
    ]
    _legend(figure, handles)
    return figure


def _boxes_of(entries: Sequence[Entry], labels: Sequence[str], axes: Axes) -> None:
    """One box per entry, in the row of its label."""
    places = [labels.index(_label(entry)) for entry in entries]
    values = [list(entry.leakage.values()) for entry in entries]
    parts = axes.boxplot(
        values,
        positions=places,
        orientation="horizontal",
        widths=0.62,
        whis=(5, 95),
        showfliers=False,
        showcaps=False,
        patch_artist=True,
        manage_ticks=False,
        medianprops={"linewidth": 2},
    )
    colours = [_colour(entry) for entry in entries]
    for colour, box, median in zip(colours, parts["boxes"], parts["medians"], strict=True):
        box.set(facecolor=(*mpl.colors.to_rgb(colour), 0.22), edgecolor=colour)
        median.set_color(colour)
    for colour, whisker in zip([colour for colour in colours for _ in range(2)], parts["whiskers"], strict=True):
        whisker.set_color(colour)
    for place, found, colour in zip(places, values, colours, strict=True):
        if len(found) <= POINTS:
            _ticks(axes, place, found, colour)


def _ticks(axes: Axes, place: int, values: Sequence[float], colour: str) -> None:
    """All of them as one broken line, which is one element of the picture."""
    across = [x for value in values for x in (value, value, float("nan"))]
    upwards = [y for _ in values for y in (place - 0.2, place + 0.2, float("nan"))]
    axes.plot(across, upwards, color=colour, linewidth=0.7)


def _label(entry: Entry) -> str:
    role = "" if entry.role == "attack" else f" ({entry.role})"
    ratio = f" {entry.mask_ratio:g}" if entry.mask_ratio else ""
    return _plain(f"{entry.attack}{role} | {_defence(entry.defence)}{ratio}")


def _name(entry: Entry) -> str:
    return f"{entry.model} ({numbers.weights(entry.weights)}, scored as {entry.protocol})"


def _colour(entry: Entry) -> str:
    return DEFENCE_COLOURS[entry.defence] if entry.role == "attack" else REFERENCE


def _colours(entries: Sequence[Entry]) -> dict[str, str]:
    """What the colours of the entries mean, for a legend."""
    attacked = {entry.defence for entry in entries if entry.role == "attack"}
    found = {_defence(name): colour for name, colour in DEFENCE_COLOURS.items() if name in attacked}
    return found | ({"bound": REFERENCE} if any(entry.role == "bound" for entry in entries) else {})


def _defence(name: str) -> str:
    return "no defence" if name == "none" else name


def _plain(text: str) -> str:
    """Text without mathematics, which matplotlib would read between dollars, and not too long."""
    shown = text if len(text) <= LETTERS else f"{text[: LETTERS - 3]}..."
    return shown.replace("$", r"\$")


def _legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """One row where it fits, and otherwise columns of the width of the longest name."""
    widths = [HANDLE_INCHES + LETTER_INCHES * len(str(handle.get_label())) for handle in handles]
    fits = sum(widths) <= figure.get_figwidth()
    columns = len(handles) if fits else max(1, int(figure.get_figwidth() / max(widths)))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns)


def _trade_off(board: Board, threat: ThreatModel, prefix: str) -> list[Plot]:
    judged = [
        entry
        for standing in board.standings
        if standing.threat == threat and (entry := strongest(board, standing)).utility and entry.leakage
    ]
    if not judged:
        return []
    models = list(dict.fromkeys(entry.model for entry in judged))
    figure, facets = _facets(judged)
    for setting, axes in facets.items():
        for entry in judged:
            if entry.setting == setting and entry.utility:
                _point(axes, entry.utility.top1, entry, _marker(models.index(entry.model)))
        axes.axhline(board.recognisable_at, **DASHED)
        axes.set_xlabel("top-1 accuracy in %")
        axes.margins(0.12)
    next(iter(facets.values())).set_ylabel(LEAKAGE_LABEL)
    handles = [
        *(Line2D([], [], color=colour, linewidth=4, label=name) for name, colour in _colours(judged).items()),
        *(
            Line2D([], [], color="black", linestyle="", marker=_marker(place), fillstyle="none", label=_plain(model))
            for place, model in enumerate(models)
        ),
    ]
    _legend(figure, handles)
    caption = (
        "Leakage of the strongest attack (mean and 95 % interval) against top-1 accuracy; low and right is best. A "
        "larger marker is a higher mask ratio. The dashed line is where a picture counts as recognisable."
    )
    return [Plot(f"{prefix}-utility", threat, caption, figure)]


def _marker(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def _point(axes: Axes, top1: float, entry: Entry, marker: str) -> None:
    size = 4 + 8 * entry.mask_ratio
    found = entry.metrics[LEAKAGE]
    if found.low is not None and found.high is not None:
        axes.plot([top1, top1], [found.low, found.high], color=_colour(entry), linewidth=1)
    axes.plot(
        [top1], [found.mean], marker, color=_colour(entry), markersize=size, fillstyle="none", markeredgewidth=1.3
    )


def _facets(entries: Sequence[Entry], height: float = 3.1) -> tuple[Figure, dict[str, Axes]]:
    """A row of axes with the same scales, one per setting."""
    settings = sorted({str(entry.setting) for entry in entries})
    figure = Figure(figsize=(2.4 + 1.9 * len(settings), height))
    row = figure.subplots(1, len(settings), sharey=True, sharex=True, squeeze=False)[0]
    facets = dict(zip(settings, row, strict=True))
    for setting, axes in facets.items():
        axes.set_title(f"setting {setting}", fontsize=8)
    return figure, facets


def _ratios(board: Board, threat: ThreatModel, prefix: str) -> list[Plot]:
    """One figure per model, one line per attack and defence with at least two ratios."""
    found: list[Plot] = []
    attacked = [entry for entry in _entries(board, threat) if entry.role == "attack"]
    for place, entries in enumerate(_models(attacked), start=1):
        lines = _lines(entries)
        if lines:
            caption = (
                f"Leakage of {_name(entries[0])} against the share of patches shuffled or masked (mean and 95 % "
                "interval). The dashed line is where a picture counts as recognisable."
            )
            found.append(Plot(f"{prefix}-mask-ratio-{place}", threat, caption, _ratio_figure(board, lines)))
    return found


def _lines(entries: Sequence[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """Entries by attack and defence, where some setting has two ratios; the most revealing lines only."""
    lines: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        lines.setdefault((entry.attack, entry.defence), []).append(entry)
    several = {key: line for key, line in lines.items() if len({entry.mask_ratio for entry in line}) > 1}
    peaks = {key: max(entry.metrics[LEAKAGE].mean for entry in line) for key, line in several.items()}
    return {key: several[key] for key in sorted(several, key=lambda key: -peaks[key])[:SERIES]}


def _ratio_figure(board: Board, lines: dict[tuple[str, str], list[Entry]]) -> Figure:
    figure, facets = _facets([entry for line in lines.values() for entry in line])
    for setting, axes in facets.items():
        for index, line in enumerate(lines.values()):
            _line(axes, index, sorted((e for e in line if e.setting == setting), key=lambda entry: entry.mask_ratio))
        axes.axhline(board.recognisable_at, **DASHED)
        axes.set_xlabel("mask ratio")
    next(iter(facets.values())).set_ylabel(LEAKAGE_LABEL)
    handles = [
        Line2D([], [], **_style(index), label=_plain(f"{attack} | {_defence(defence)}"))
        for index, (attack, defence) in enumerate(lines)
    ]
    _legend(figure, handles)
    return figure


def _style(index: int) -> dict[str, Any]:
    return {
        "color": LINE_COLOURS[index % len(LINE_COLOURS)],
        "linestyle": LINE_STYLES[index // len(LINE_COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
    }


def _line(axes: Axes, index: int, entries: Sequence[Entry]) -> None:
    ratios = [entry.mask_ratio for entry in entries]
    found = [entry.metrics[LEAKAGE] for entry in entries]
    style = _style(index)
    axes.plot(ratios, [one.mean for one in found], markersize=4, linewidth=1.3, **style)
    low = [one.mean if one.low is None else one.low for one in found]
    high = [one.mean if one.high is None else one.high for one in found]
    axes.fill_between(ratios, low, high, color=style["color"], alpha=0.18, linewidth=0)
