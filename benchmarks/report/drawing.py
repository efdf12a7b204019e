"""What the plots share: colours, scales, legends, and panels with the lines that leakage is read against."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, BoardEntry
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.leaderboard.standings import strongest
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.legend import name_defence
from fedmjp.defences.pipeline import NONE
from fedmjp.threat import ThreatModel

# Okabe and Ito's colours, two of them darkened: all keep a contrast of 3:1 on white and on near black.
UNDEFENDED_COLOUR = "#d55e00"
COLOURS = ("#009e73", "#0072b2", "#cc79a7", "#8c7000", "#3e9bd0")
Line = Literal["-", "--", "-.", ":"]
LINES: tuple[Line, ...] = get_args(Line)  # for the second five defences, and so on
UNDEFENDED_MARKER = "o"
MARKERS = "sD^vPX*"
REFERENCE = "#808080"
CEILING = 60.0  # dB: above it a picture is recovered exactly, whatever the number
SPARSE = 30  # dB from which a narrow axis has a tick every 20
CEILING_TICK = f"{CEILING:g}+"
CEILING_NOTE = f"Values of more than {CEILING:g} dB, which are exact to the eye, are drawn at {CEILING:g}."
WIDTH_INCHES = 7.4
NARROW_INCHES = 4.8  # of a single panel, whose letters can be read where it is as wide as a phone
QUARTILES = (0.25, 0.5, 0.75)
LETTERS = 34  # of a label, before it is cut
HANDLE_INCHES = 0.5
LETTER_INCHES = 0.068
LEAKAGE_LABEL = "leakage, PSNR in dB"
DASHED: Any = {"color": "black", "linewidth": 0.8, "linestyle": "--"}
DOTTED: Any = {"color": REFERENCE, "linewidth": 1.4, "linestyle": ":"}
STYLE: Any = {
    "svg.hashsalt": "fedmjp",
    "svg.fonttype": "none",  # text stays text: searchable, and in the reader's own font
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "path.simplify": False,  # or dots that are short strokes would be merged
}


@dataclass(frozen=True)
class Plot:
    """A figure, its file name, the server's view (None for several), a title, and what it shows in words."""

    name: str
    server: ThreatModel | None
    title: str
    caption: str
    figure: Figure


class Style(NamedTuple):
    """How a defence is drawn throughout a board: in greyscale, too, lines and markers tell them apart."""

    colour: str
    line: Line
    marker: str


def assign_styles(board: Board) -> dict[str, Style]:
    """Assign a style to every defence, in the order in which they first appear; no defence comes first.

    Args:
        board: The board.

    Returns:
        Styles by label of the defence.
    """
    labels = dict.fromkeys(entry.defence for entry in board.entries if entry.defences)
    by_label = {NONE: Style(UNDEFENDED_COLOUR, LINES[0], UNDEFENDED_MARKER)}
    for place, label in enumerate(labels):
        rounds, colour = divmod(place, len(COLOURS))
        by_label[label] = Style(COLOURS[colour], LINES[rounds % len(LINES)], MARKERS[place % len(MARKERS)])
    return by_label


def select_strongest(board: Board, server: ThreatModel) -> list[BoardEntry]:
    """Select the strongest attack on each model with its defences, per setting, where it has a score.

    Args:
        board: The board.
        server: The server's view of undefended clients.
    """
    entries = [strongest(board, standing) for standing in board.standings if standing.server == server]
    return [entry for entry in entries if entry.n]


def group_by_model(entries: Iterable[BoardEntry]) -> list[list[BoardEntry]]:
    """Group entries by model, weights and protocol.

    Args:
        entries: Entries of a board.
    """
    return list(grouped(entries, lambda entry: (entry.model, entry.weights, entry.protocol)).values())


def name_system(entry: BoardEntry) -> str:
    """Name the model, weights and protocol of an entry.

    Args:
        entry: The entry.
    """
    return f"{entry.model} ({numbers.weights(entry.weights)}, scored as {entry.protocol})"


def measure_floors(entries: Iterable[BoardEntry]) -> dict[str, float]:
    """Map each setting to the median leakage of the grey guess.

    Args:
        entries: Entries of one system.
    """
    return {str(entry.setting): entry.metrics[LEAKAGE].median for entry in entries if entry.role == "floor" and entry.n}


def plain(text: str) -> str:
    """Shorten a text and escape dollars, between which matplotlib would read mathematics.

    Args:
        text: A label.
    """
    shortened = text if len(text) <= LETTERS else f"{text[: LETTERS - 3]}..."
    return shortened.replace("$", r"\$")


def cap_leakage(value: float) -> float:
    """Cap a leakage at the ceiling of the plots.

    Args:
        value: PSNR in dB.
    """
    return min(value, CEILING)


def compute_quartiles(entry: BoardEntry) -> list[float]:
    """Compute the median and the ends of the middle half of the pictures, as they are drawn.

    Args:
        entry: An entry with scores.

    Returns:
        Lower quartile, median and upper quartile, in dB.
    """
    values = [cap_leakage(value) for value in entry.scores[LEAKAGE].values()]
    return list(map(float, np.quantile(values, QUARTILES)))


@dataclass(frozen=True)
class Scale:
    """A scale of leakage that ``values`` fit in, and what they are read against: guesses by setting, a threshold."""

    axis: Literal["x", "y"]
    recognisable_at: float
    values: Sequence[float]
    guesses: Mapping[str, float]

    def draw(self, axes: Axes, setting: str) -> None:
        """Draw the lines and the ticks at tens or twenties, from the lowest value to the ceiling at most.

        Args:
            axes: The axes.
            setting: The setting, whose guess is drawn.
        """
        across = axes.axvline if self.axis == "x" else axes.axhline
        across(self.recognisable_at, **DASHED)
        if setting in self.guesses:
            across(self.guesses[setting], **DOTTED)
        values = [cap_leakage(value) for value in (*self.values, *self.guesses.values(), self.recognisable_at)]
        low, high = 10 * (min(values) // 10), min(CEILING, 10 * (max(values) // 10 + 1))
        low = min(low, high - 10)
        step = 20 if self.axis == "x" and high - low > SPARSE else 10
        ticks = [high - step * place for place in range(int((high - low) / step) + 1)]
        margin = 0.04 * (high - low)
        properties = {
            "ticks": ticks,
            "ticklabels": [
                CEILING_TICK if tick == CEILING else f"{tick:g}".replace("-", numbers.MINUS) for tick in ticks
            ],
            "lim": (low - margin, high + margin),
        }
        axes.set(**{f"{self.axis}{name}": value for name, value in properties.items()})


def draw_panels(
    settings: Iterable[str], scale: Scale, draw: Callable[[Axes, str], None], *, height: float, against: str
) -> Figure:
    """Draw a row of axes with the same scales, one per setting.

    Args:
        settings: Settings, in any order and repeated.
        scale: The scale of leakage.
        draw: Fills the axes of a setting.
        height: Height in inches.
        against: Label of the axis across that of leakage.
    """
    names = sorted(set(settings))
    figure = Figure(figsize=(WIDTH_INCHES if len(names) > 1 else NARROW_INCHES, height))
    row = figure.subplots(1, len(names), sharey=True, sharex=True, squeeze=False)[0]
    for setting, axes in zip(names, row, strict=True):
        draw(axes, setting)
        scale.draw(axes, setting)
        axes.set(title=f"setting {setting}", xlabel=LEAKAGE_LABEL if scale.axis == "x" else against)
    row[0].set_ylabel(against if scale.axis == "x" else LEAKAGE_LABEL)
    return figure


def select_styles(board: Board, entries: Sequence[BoardEntry]) -> dict[str, Style]:
    """Select the board's styles that the entries need.

    Args:
        board: The board.
        entries: Some of its entries.
    """
    present = {entry.defence for entry in entries}
    return {label: style for label, style in assign_styles(board).items() if label in present}


def make_handles(drawn: Mapping[str, Style]) -> list[Line2D]:
    """Make the legend's handles for the defences.

    Args:
        drawn: Styles by label of the defence.
    """
    return [
        Line2D([], [], color=style.colour, linestyle=style.line, linewidth=2.5, label=plain(name_defence(label, 0)))
        for label, style in drawn.items()
    ]


def legend(figure: Figure, scale: Scale, handles: Sequence[Line2D], extra: Sequence[Line2D] = ()) -> None:
    """Put a legend above the figure, in one row where it fits, and otherwise in columns of equal width.

    Args:
        figure: The figure.
        scale: The scale, whose lines are explained.
        handles: Handles before those of the scale's lines.
        extra: Handles behind them.
    """
    grey = [Line2D([], [], **DOTTED, label="grey guess")] if scale.guesses else []
    recognisable = Line2D([], [], **DASHED, label=f"recognisable, {scale.recognisable_at:g} dB")
    entries = [*handles, *grey, recognisable, *extra]
    widths = [HANDLE_INCHES + LETTER_INCHES * len(str(handle.get_label())) for handle in entries]
    fits = sum(widths) <= figure.get_figwidth()
    columns = len(entries) if fits else max(1, int(figure.get_figwidth() / max(widths)))
    figure.legend(handles=entries, loc="outside upper center", ncols=columns)
