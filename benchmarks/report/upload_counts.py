"""Plot of leakage against the number of uploads per picture: one line per mask ratio, with the spread over pictures."""

from collections.abc import Sequence
from itertools import cycle

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.leaderboard.entries import Board, Entry
from benchmarks.report.drawing import (
    CEILING_NOTE,
    DASHED,
    DOTTED,
    LEAKAGE_LABEL,
    Plot,
    by_model,
    capped,
    floors,
    leakage_scale,
    legend,
    name_of,
    reference_handles,
)
from benchmarks.report.rows import threats
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel

HEIGHT_INCHES = 3.6
WIDTH_INCHES = 6.0
QUARTILES = (0.25, 0.5, 0.75)
SHADES = (0.1, 0.85)  # of the colour map, dark and light enough to be told apart on white
MARKERS = "oDs^vP*X"
FEWEST = 3  # numbers of uploads that make a line


def upload_counts(board: Board) -> list[Plot]:
    """One figure per model with MJP that was attacked with three numbers of uploads or more, in setting c."""
    found: dict[ThreatModel, list[Entry]] = {}
    for threat in threats(board):
        alike = threat.model_copy(update={"uploads_per_picture": 1})
        found.setdefault(alike, []).extend(entry for entry in _on_mjp(board) if entry.threat == threat)
    groups = [(threat, _one_attack(entries)) for threat, several in found.items() for entries in by_model(several)]
    return [
        Plot(
            f"uploads-per-picture-{place}",
            None,
            f"Leakage against uploads per picture, {name_of(entries[0])}",
            f"What {entries[0].attack} recovers of the clean picture (setting c) on {name_of(entries[0])} with MJP, "
            "against the number of uploads of it that the server has seen, each under a mask of its own: median over "
            f"pictures, and the middle half of them as a band. The dotted line is the grey guess. {CEILING_NOTE}",
            _figure(board, entries),
        )
        for place, (_, entries) in enumerate(_varied(groups), start=1)
    ]


def _on_mjp(board: Board) -> list[Entry]:
    """Attacks of ours on MJP in setting c, with a score."""
    return [
        entry
        for entry in board.entries
        if (entry.defence, entry.setting, entry.role, entry.origin) == ("mjp", Setting.C, "attack", "reproduced")
        and entry.leakage
    ]


def _one_attack(entries: Sequence[Entry]) -> list[Entry]:
    """Those of the attack with most numbers of uploads, of these the strongest: a line is of one attack."""
    by_attack: dict[str, list[Entry]] = {}
    for entry in entries:
        by_attack.setdefault(entry.attack, []).append(entry)

    def reach(several: list[Entry]) -> tuple[int, float]:
        medians = [_quartiles(entry)[1] for entry in several]
        return len({_uploads(entry) for entry in several}), sum(medians) / len(medians)

    return max(by_attack.values(), key=reach)


def _varied(groups: Sequence[tuple[ThreatModel, list[Entry]]]) -> list[tuple[ThreatModel, list[Entry]]]:
    return [group for group in groups if len({_uploads(entry) for entry in group[1]}) >= FEWEST]


def _figure(board: Board, entries: Sequence[Entry]) -> Figure:
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
    axes = figure.subplots()
    ratios = sorted({entry.mask_ratio for entry in entries})
    colours = mpl.colormaps["viridis"](np.linspace(*SHADES, len(ratios)))
    lines = []
    for ratio, colour, marker in zip(ratios, colours, cycle(MARKERS), strict=False):
        own = sorted((each for each in entries if each.mask_ratio == ratio), key=_uploads)
        _line(axes, own, colour, marker)
        style = {"color": colour, "marker": marker, "markersize": 4.5}
        lines.append(Line2D([], [], **style, label=f"mask ratio {ratio:g}"))
    same = (entries[0].model, entries[0].weights)
    guesses = floors(
        [e for e in board.entries if (e.model, e.weights) == same and e.setting is Setting.C and e.leakage]
    )
    for guess in guesses.values():
        axes.axhline(guess, **DOTTED)
    axes.axhline(board.recognisable_at, **DASHED)
    values = [value for entry in entries for value in _quartiles(entry)]
    leakage_scale(axes, [*values, *guesses.values(), board.recognisable_at], "y")
    counts = sorted({_uploads(entry) for entry in entries})
    axes.set(xticks=counts, xlabel="uploads of the picture", ylabel=LEAKAGE_LABEL)
    legend(figure, [*lines, *reference_handles(board, with_floor=bool(guesses))])
    return figure


def _line(axes: Axes, entries: Sequence[Entry], colour: object, marker: str) -> None:
    low, middle, high = np.array([_quartiles(entry) for entry in entries]).T
    counts = [_uploads(entry) for entry in entries]
    axes.fill_between(counts, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(counts, middle, color=colour, marker=marker, markersize=4.5, linewidth=1.6)


def _quartiles(entry: Entry) -> list[float]:
    values = [capped(value) for value in entry.leakage.values()]
    return [float(value) for value in np.quantile(values, QUARTILES)]


def _uploads(entry: Entry) -> int:
    return entry.threat.uploads_per_picture
