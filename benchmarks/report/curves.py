"""Plots of leakage against something: the mask ratio, the model's accuracy, the number of uploads per picture."""

from collections.abc import Sequence
from itertools import cycle

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedmjp.benchmarks.leaderboard.entries import Board, BoardEntry
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.report.drawing import (
    CEILING_NOTE,
    DOTTED,
    LEAKAGE_LABEL,
    NARROW_INCHES,
    Plot,
    Scale,
    compute_quartiles,
    draw_panels,
    group_by_model,
    legend,
    make_handles,
    measure_floors,
    name_system,
    plain,
    select_strongest,
    select_styles,
)
from fedmjp.benchmarks.report.findings import is_deployed
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel

DODGE = 0.012  # between defences at one ratio, of the axis
WIDEST = 0.06  # between the first and the last of many
MODEL_MARKERS = "osD^vPX*"
RATIO_MARKERS = "oDs^vP*X"
SHADES = (0.1, 0.85)  # of the colour map, dark and light enough to be told apart on white
FEWEST = 3  # numbers of uploads that make a line


def plot_mask_ratios(board: Board, server: ThreatModel, prefix: str) -> list[Plot]:
    """Plot the strongest attack on each defence against the mask ratio.

    Args:
        board: The board.
        server: The server's view of undefended clients.
        prefix: Beginning of the plots' names.

    Returns:
        A plot for each model with two ratios or more in some setting.
    """
    caption = (
        "against the share of patches that are shuffled or masked: the strongest attack on each defence, median and "
        f"middle half of the pictures. The dotted line is the grey guess. {CEILING_NOTE}"
    )
    return [
        Plot(
            f"{prefix}-mask-ratio-{place}",
            server,
            f"Leakage against mask ratio, {name_system(entries[0])}",
            f"Leakage of {name_system(entries[0])} {caption}",
            _mask_ratio_figure(board, server, entries),
        )
        for place, entries in enumerate(group_by_model(select_strongest(board, server)), start=1)
        if any(len({entry.mask_ratio for entry in line}) > 1 for line in _lines(entries).values())
    ]


def _lines(entries: Sequence[BoardEntry]) -> dict[tuple[str, str], list[BoardEntry]]:
    """Group entries by defence and setting, along the mask ratio."""
    ordered = sorted(entries, key=lambda entry: entry.mask_ratio)
    return grouped(ordered, lambda entry: (entry.defence, str(entry.setting)))


def _mask_ratio_figure(board: Board, server: ThreatModel, entries: Sequence[BoardEntry]) -> Figure:
    system = (server, entries[0].model, entries[0].protocol)
    guesses = measure_floors(entry for entry in board.entries if (entry.server, entry.model, entry.protocol) == system)
    scale = Scale("y", board.recognisable_at, [end for entry in entries for end in compute_quartiles(entry)], guesses)
    lines = _lines(entries)
    drawn = select_styles(board, entries)

    def draw(axes: Axes, setting: str) -> None:
        for place, (defence, style) in enumerate(drawn.items()):
            line = lines.get((defence, setting))
            if line:
                shift = min(DODGE, WIDEST / len(drawn)) * (place - (len(drawn) - 1) / 2)
                low, middle, high = np.array([compute_quartiles(entry) for entry in line]).T
                axes.errorbar(
                    [entry.mask_ratio + shift for entry in line],
                    middle,
                    [middle - low, high - middle],
                    color=style.colour,
                    linestyle=style.line,
                    marker=style.marker,
                    markersize=4.5,
                    linewidth=1.4,
                    elinewidth=1.2,
                    capsize=2.5,
                )

    figure = draw_panels([str(entry.setting) for entry in entries], scale, draw, height=3.2, against="mask ratio")
    legend(figure, scale, make_handles(drawn))
    return figure


def plot_trade_off(board: Board, server: ThreatModel, prefix: str) -> list[Plot]:
    """Plot what the strongest attack recovers against the accuracy of the model.

    Args:
        board: The board.
        server: The server's view of undefended clients.
        prefix: Beginning of the plot's name.

    Returns:
        One plot of all models whose accuracy is known; none where there is no such model.
    """
    judged = [(entry, entry.utility.top1) for entry in select_strongest(board, server) if entry.utility]
    if not judged:
        return []
    entries = [entry for entry, _ in judged]
    scale = Scale("y", board.recognisable_at, [end for entry in entries for end in compute_quartiles(entry)], {})
    markers = dict(zip(dict.fromkeys(entry.model for entry in entries), cycle(MODEL_MARKERS), strict=False))
    drawn = select_styles(board, entries)

    def draw(axes: Axes, setting: str) -> None:
        for entry, top1 in judged:
            if entry.setting == setting:
                style = drawn[entry.defence]
                low, middle, high = compute_quartiles(entry)
                axes.plot([top1, top1], [low, high], color=style.colour, linestyle=style.line, linewidth=1)
                axes.plot(
                    [top1],
                    [middle],
                    markers[entry.model],
                    color=style.colour,
                    markersize=4.5 + 8 * entry.mask_ratio,
                    fillstyle="none",
                    markeredgewidth=1.3,
                )
        axes.margins(x=0.12)

    figure = draw_panels(
        [str(entry.setting) for entry in entries], scale, draw, height=3.3, against="top-1 accuracy in %"
    )
    shapes = [
        Line2D([], [], color="black", linestyle="", marker=marker, fillstyle="none", label=plain(model))
        for model, marker in markers.items()
    ]
    legend(figure, scale, make_handles(drawn), shapes)
    caption = (
        "Leakage of the strongest attack (median and middle half of the pictures) against top-1 accuracy; low and "
        f"right is best. A larger marker is a higher mask ratio. {CEILING_NOTE}"
    )
    return [Plot(f"{prefix}-utility", server, "Leakage against accuracy", caption, figure)]


def plot_upload_counts(board: Board) -> list[Plot]:
    """Plot the leakage against the number of uploads per picture.

    Args:
        board: The board.

    Returns:
        A plot for each model with its defences that was attacked with three numbers of uploads or more.
    """
    attacks = [
        entry
        for entry in board.entries
        if is_deployed(entry) and (entry.role, entry.origin) == ("attack", "reproduced") and entry.n
    ]
    once = {"uploads_per_picture": 1}
    systems = grouped(attacks, lambda entry: (entry.server.model_copy(update=once), entry.defence))
    lines = [_one_attack(entries) for members in systems.values() for entries in group_by_model(members)]
    return [
        Plot(
            f"uploads-per-picture-{place}",
            None,
            f"Leakage against uploads per picture, {name_system(entries[0])}, {entries[0].defence}",
            f"What {entries[0].attack} recovers of the picture itself on {name_system(entries[0])} with "
            f"{entries[0].defence}, against the number of uploads of it that the server has seen, each with masks and "
            "noise of its own: median over pictures, and the middle half of them as a band. The dotted line is the "
            f"grey guess. {CEILING_NOTE}",
            _upload_count_figure(board, entries),
        )
        for place, entries in enumerate((line for line in lines if len(_counts(line)) >= FEWEST), start=1)
    ]


def _one_attack(entries: Sequence[BoardEntry]) -> list[BoardEntry]:
    """Select the entries of the attack with most numbers of uploads, of these the strongest."""
    return max(
        grouped(entries, lambda entry: entry.attack).values(),
        key=lambda members: (
            len(_counts(members)),
            sum(compute_quartiles(entry)[1] for entry in members) / len(members),
        ),
    )


def _upload_count_figure(board: Board, entries: Sequence[BoardEntry]) -> Figure:
    figure = Figure(figsize=(NARROW_INCHES, 3.4))
    axes = figure.subplots()
    ordered = sorted(entries, key=lambda entry: (entry.mask_ratio, _uploads(entry)))
    by_ratio = grouped(ordered, lambda entry: entry.mask_ratio)
    colours = mpl.colormaps["viridis"](np.linspace(*SHADES, len(by_ratio)))
    handles = []
    for (ratio, line), colour, marker in zip(by_ratio.items(), colours, cycle(RATIO_MARKERS), strict=False):
        low, middle, high = np.array([compute_quartiles(entry) for entry in line]).T
        counts = [_uploads(entry) for entry in line]
        style = {"color": colour, "marker": marker, "markersize": 4.5}
        axes.fill_between(counts, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(counts, middle, **style, linewidth=1.6)
        label = f"mask ratio {ratio:g}" if ratio else entries[0].defence
        handles.append(Line2D([], [], **style, label=label))
    same = (entries[0].model, entries[0].weights, Picture.CLEAN)
    guesses = measure_floors(
        entry for entry in board.entries if (entry.model, entry.weights, entry.setting.compared_with) == same
    )
    for guess in guesses.values():
        axes.axhline(guess, **DOTTED)
    values = [value for entry in entries for value in compute_quartiles(entry)]
    scale = Scale("y", board.recognisable_at, values, guesses)
    scale.draw(axes, setting="")
    axes.set(xticks=_counts(entries), xlabel="uploads of the picture", ylabel=LEAKAGE_LABEL)
    legend(figure, scale, handles)
    return figure


def _counts(entries: Sequence[BoardEntry]) -> list[int]:
    return sorted({_uploads(entry) for entry in entries})


def _uploads(entry: BoardEntry) -> int:
    return entry.threat.uploads_per_picture
