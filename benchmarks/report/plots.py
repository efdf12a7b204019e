"""Plots of a leaderboard: leakage per picture, privacy against utility, leakage against mask ratio."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry
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
    """A figure, its file name, and what it shows in words."""

    name: str
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


def _distributions(board: Board, threat: ThreatModel, prefix: str) -> list[Plot]:
    entries = _entries(board, threat)
    return [
        Plot(
            f"{prefix}-leakage-{setting}",
            f"Leakage per picture in setting {setting}. Boxes hold the middle half of the pictures, "
            f"whiskers 5 to 95 %, the bar is the median; grey rows are references. The dashed line is "
            f"where a picture counts as recognisable. {threat.sentence()}",
            _boxes(board, [entry for entry in entries if entry.setting == setting]),
        )
        for setting in sorted({entry.setting for entry in entries})
    ]


def _boxes(board: Board, entries: Sequence[Entry]) -> Figure:
    figure = Figure(figsize=(7.5, 0.9 + ROW_INCHES * len(entries)))
    axes = figure.subplots()
    for place, entry in enumerate(entries):
        _box(axes, place, list(entry.leakage.values()), _colour(entry))
    axes.axvline(board.recognisable_at, color="black", linewidth=0.8, linestyle="--")
    for floor in sorted({round(e.metrics[LEAKAGE].mean, 1) for e in entries if e.role == "floor"})[:1]:
        axes.axvline(floor, color=REFERENCE, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(entries)), [_label(entry) for entry in entries])
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("leakage per picture: PSNR in dB, higher reveals more")
    present = [name for name in DEFENCE_COLOURS if any(e.defence == name and e.role == "attack" for e in entries)]
    handles = [Line2D([], [], color=DEFENCE_COLOURS[name], linewidth=4, label=_defence(name)) for name in present]
    handles += [
        Line2D([], [], color=REFERENCE, linewidth=4, label="floor, bound"),
        Line2D(
            [], [], color="black", linewidth=0.8, linestyle="--", label=f"recognisable, {board.recognisable_at:g} dB"
        ),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), handlelength=1.4, columnspacing=1.2)
    return figure


def _dashed(label: str) -> Line2D:
    return Line2D([], [], color="black", linewidth=0.8, linestyle="--", label=label)


def _box(axes: Axes, place: int, values: list[float], colour: str) -> None:
    parts = axes.boxplot(
        [values],
        positions=[place],
        orientation="horizontal",
        widths=0.62,
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        manage_ticks=False,
    )
    for line in (*parts["whiskers"], *parts["caps"], *parts["medians"], *parts["boxes"]):
        line.set_color(colour)
    for patch in parts["boxes"]:
        patch.set(facecolor=(*mpl.colors.to_rgb(colour), 0.22), edgecolor=colour)
    for median in parts["medians"]:
        median.set_linewidth(2)
    if len(values) <= POINTS:
        axes.plot(values, [place] * len(values), "|", color=colour, markersize=5, alpha=0.8, markeredgewidth=0.8)


def _label(entry: Entry) -> str:
    role = "" if entry.role == "attack" else f" ({entry.role})"
    ratio = "" if entry.defence == "none" else f" {entry.mask_ratio:g}"
    return _plain(f"{entry.attack}{role} | {entry.model} | {entry.defence}{ratio}")


def _colour(entry: Entry) -> str:
    return DEFENCE_COLOURS[entry.defence] if entry.role == "attack" else REFERENCE


def _defence(name: str) -> str:
    return "no defence" if name == "none" else name


def _plain(text: str, letters: int = 70) -> str:
    """Text without mathematics, which matplotlib would read between dollars, and not too long."""
    shown = text if len(text) <= letters else f"{text[: letters - 3]}..."
    return shown.replace("$", r"\$")


def _trade_off(board: Board, threat: ThreatModel, prefix: str) -> list[Plot]:
    judged = [
        entry
        for standing in board.standings
        if standing.threat == threat and (entry := strongest(board, standing)) and entry.utility and entry.leakage
    ]
    if not judged:
        return []
    models = list(dict.fromkeys(entry.model for entry in judged))
    figure, facets = _facets(judged)
    for setting, axes in facets.items():
        for entry in judged:
            if entry.setting == setting and entry.utility:
                _point(axes, entry.utility.top1, entry, MARKERS[models.index(entry.model) % len(MARKERS)])
        axes.axhline(board.recognisable_at, color="black", linewidth=0.8, linestyle="--")
        axes.set_xlabel("top-1 accuracy in %")
        axes.margins(0.12)
    present = [name for name in DEFENCE_COLOURS if any(entry.defence == name for entry in judged)]
    handles = [
        Line2D([], [], color=DEFENCE_COLOURS[name], linestyle="", marker="s", label=_defence(name)) for name in present
    ]
    handles += [
        Line2D([], [], color="black", linestyle="", marker=MARKERS[i % len(MARKERS)], fillstyle="none", label=_plain(m))
        for i, m in enumerate(models)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    caption = (
        "Leakage of the strongest attack (mean and 95 % interval) against top-1 accuracy; low and right is best. The "
        f"dashed line is where a picture counts as recognisable. {threat.sentence()}"
    )
    return [Plot(f"{prefix}-utility", caption, figure)]


def _point(axes: Axes, top1: float, entry: Entry, marker: str) -> None:
    found = entry.metrics[LEAKAGE]
    if found.low is not None and found.high is not None:
        axes.plot([top1, top1], [found.low, found.high], color=_colour(entry), linewidth=1)
    axes.plot([top1], [found.mean], marker, color=_colour(entry), markersize=5, fillstyle="none", markeredgewidth=1.3)


def _facets(entries: Sequence[Entry]) -> tuple[Figure, dict[str, Axes]]:
    """A row of axes, one per setting, with one scale of leakage."""
    settings = sorted({str(entry.setting) for entry in entries})
    figure = Figure(figsize=(2.2 + 1.9 * len(settings), 3.1))
    row = figure.subplots(1, len(settings), sharey=True, sharex=True, squeeze=False)[0]
    facets = dict(zip(settings, row, strict=True))
    for setting, axes in facets.items():
        axes.set_title(f"setting {setting}", fontsize=8)
    row[0].set_ylabel("leakage, PSNR in dB")
    return figure, facets


def _ratios(board: Board, threat: ThreatModel, prefix: str) -> list[Plot]:
    """One figure per model, one line per attack and defence with at least two ratios."""
    found: list[Plot] = []
    entries = [entry for entry in _entries(board, threat) if entry.role == "attack"]
    for index, model in enumerate(dict.fromkeys((e.model, e.weights) for e in entries), start=1):
        lines = _lines([entry for entry in entries if (entry.model, entry.weights) == model])
        if lines:
            caption = (
                f"Leakage against the share of patches shuffled or masked, {model[0]} (mean and 95 % interval). "
                f"{threat.sentence()}"
            )
            found.append(Plot(f"{prefix}-mask-ratio-{index}", caption, _ratio_figure(board, lines)))
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
        axes.axhline(board.recognisable_at, color="black", linewidth=0.8, linestyle="--")
        axes.set_xlabel("mask ratio")
    handles = [
        Line2D([], [], **_style(index), label=_plain(f"{attack} | {_defence(defence)}"))
        for index, (attack, defence) in enumerate(lines)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
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
