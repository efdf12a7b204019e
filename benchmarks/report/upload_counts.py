"""Plot of leakage against the number of uploads per picture: one line per mask ratio, with the spread over pictures."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

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
from benchmarks.report.findings import deployed
from fedmjp.settings import Picture

HEIGHT_INCHES = 3.6
WIDTH_INCHES = 6.0
QUARTILES = (0.25, 0.5, 0.75)
SHADES = (0.1, 0.85)  # of the colour map, dark and light enough to be told apart on white
MARKERS = "oDs^vP*X"
FEWEST = 3  # numbers of uploads that make a line


def upload_counts(board: Board) -> list[Plot]:
    """One figure per model with its defences that was attacked with three numbers of uploads or more."""
    found: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in board.entries:
        if deployed(entry) and (entry.role, entry.origin) == ("attack", "reproduced") and entry.leakage:
            once = entry.server.model_copy(update={"uploads_per_picture": 1})
            found.setdefault((once, entry.defence), []).append(entry)
    groups = [_one_attack(entries) for several in found.values() for entries in by_model(several)]
    return [
        Plot(
            f"uploads-per-picture-{place}",
            None,
            f"Leakage against uploads per picture, {name_of(entries[0])}, {entries[0].defence}",
            f"What {entries[0].attack} recovers of the picture itself on {name_of(entries[0])} with "
            f"{entries[0].defence}, against the number of uploads of it that the server has seen, each with masks and "
            "noise of its own: median over pictures, and the middle half of them as a band. The dotted line is the "
            f"grey guess. {CEILING_NOTE}",
            _figure(board, entries),
        )
        for place, entries in enumerate(filter(_varied, groups), start=1)
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


def _varied(entries: Sequence[Entry]) -> bool:
    return len({_uploads(entry) for entry in entries}) >= FEWEST


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
        label = f"mask ratio {ratio:g}" if ratio else entries[0].defence
        lines.append(Line2D([], [], **style, label=label))
    same = (entries[0].model, entries[0].weights)
    guesses = floors(
        [
            each
            for each in board.entries
            if (each.model, each.weights) == same and each.setting.compared_with is Picture.CLEAN and each.leakage
        ]
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
