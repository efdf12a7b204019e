"""Leakage against accuracy: what the strongest attack recovers under each defence, and what training under it costs.

``python -m benchmarks.studies.trade_off RESULTS COST --figure FILE``, with a battery's results and the rows of
``training_cost``. Leakage is of the trained model of the same architecture, before servers that send honest weights: of
all that they may see, what leaks most. It is the median gain over the grey guess of the same pictures, with PSNR capped
where a picture is exact to the eye; its interval resamples photographs. That of Top-1 is Wilson's over validation
pictures, from the lowest of the seeds to the highest. A defence is on the front where no other leaks less and is right
more often.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.folder.output import OutputFolder
from benchmarks.folder.study import TRIALS, open_results
from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry
from benchmarks.leaderboard.statistics import RESAMPLES, share
from benchmarks.report.drawing import COLOURS, DOTTED, MARKERS, STYLE, UNDEFENDED_COLOUR, capped
from benchmarks.report.render import board_in
from benchmarks.studies.by_view import defence_of, markdown, model_of
from fedmjp.defences.pipeline import NONE
from fedmjp.errors import BadInputError
from fedmjp.running import run_function
from fedmjp.seeds import numpy_generator

MODELS = ("coarse-none-0", "coarse-mjp-0")  # the architecture that training_cost trains


Spread = tuple[float, float, float]  # a middle, and the ends of its interval


class Point(NamedTuple):
    """A defence: its leakage in dB and Top-1 in percent, each with the ends of its interval."""

    defence: str
    leakage: Spread
    top1: Spread


def main(
    results: Annotated[Path, typer.Argument(help="Folder of the campaign.", metavar="RESULTS")],
    cost: Annotated[Path, typer.Argument(help="Folder of training_cost.", metavar="COST")],
    figure: Annotated[Path, typer.Option(help="Where the figure goes.", metavar="FILE")],
) -> None:
    """Draw the figure, and print its points."""
    ledger, store = open_results(OutputFolder(results))
    board, trained = board_in(ledger, store, results), pd.read_parquet(cost / TRIALS)
    leakage = leakages(board)
    if missing := sorted(set(trained["defence"]) - set(leakage)):
        raise BadInputError(f"no attack was run on {', '.join(missing)}: take the campaign defences.yaml")
    points = {
        str(partition): [
            Point(str(name), leakage[str(name)], accuracy(runs)) for name, runs in rows.groupby("defence", sort=False)
        ]
        for partition, rows in trained.groupby("partition", sort=False)
    }
    with mpl.rc_context(STYLE):
        drawn(points).savefig(figure, dpi=160)
    typer.echo(markdown(table(points, trained)))


def leakages(board: Board) -> dict[str, Spread]:
    """By defence, the largest gain over a guess that a server which sends honest weights has of single clients."""
    best: dict[str, Spread] = {}
    for entry in board.revealing("pictures").entries:
        honest = entry.threat.server is None and entry.pipeline.clients == 1
        if entry.role != "attack" or not entry.exact or not honest or model_of(entry) not in MODELS:
            continue
        name = defence_of(entry)
        if name == NONE and model_of(entry) != MODELS[0]:
            continue
        best[name] = max(best.get(name, (-np.inf,) * 3), gain(entry, board.by_id[str(entry.floor)]))
    return best


def gain(entry: Entry, guess: Entry) -> Spread:
    """The median gain over the guess in dB, and its 95 % interval over photographs."""
    guessed = guess.scores[LEAKAGE]
    values = np.array([capped(value) - guessed[name] for name, value in entry.scores[LEAKAGE].items()])
    resampled = numpy_generator(0, "medians", len(values)).choice(values, (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(resampled, axis=1), (0.025, 0.975))
    return float(np.median(values)), float(low), float(high)


def accuracy(runs: pd.DataFrame) -> Spread:
    """The mean over seeds in percent; the lowest and the highest end of their intervals."""
    shares = [
        share(round(run["top1"] * run["validation_pictures"]), int(run["validation_pictures"]))
        for run in runs.to_dict("records")
    ]
    low, high = min(one.low for one in shares), max(one.high for one in shares)
    return 100 * float(runs["top1"].mean()), 100 * low, 100 * high


def on_front(point: Point, others: Sequence[Point]) -> bool:
    """Whether none leaks as little and is right as often, and one of both more."""
    mine = (-point.leakage[0], point.top1[0])
    theirs = [(-other.leakage[0], other.top1[0]) for other in others]
    return not any(other[0] >= mine[0] and other[1] >= mine[1] and other != mine for other in theirs)


def drawn(points: dict[str, list[Point]]) -> Figure:
    """A panel per partition, with the front."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(points), sharey=True, squeeze=False)[0])
    for axes, (partition, members) in zip(panels, points.items(), strict=True):
        for place, point in enumerate(members):
            (leak, *leak_ends), (right, *right_ends) = point.leakage, point.top1
            axes.errorbar(
                right,
                leak,
                xerr=[[right - right_ends[0]], [right_ends[1] - right]],
                yerr=[[leak - leak_ends[0]], [leak_ends[1] - leak]],
                marker=MARKERS[place % len(MARKERS)],
                color=UNDEFENDED_COLOUR if point.defence == NONE else COLOURS[place % len(COLOURS)],
                linewidth=0.9,
                markersize=6,
                label="no defence" if point.defence == NONE else point.defence,
            )
        front = sorted((point.top1[0], point.leakage[0]) for point in members if on_front(point, members))
        axes.step(*zip(*front, strict=True), where="pre", color="black", linewidth=0.8, label="front")
        axes.axhline(0, **DOTTED)
        axes.set(title=partition, xlabel="Top-1 in %")
    panels[0].set_ylabel("leakage: median gain over the grey guess, dB")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def table(points: dict[str, list[Point]], trained: pd.DataFrame) -> pd.DataFrame:
    """A line per defence, the least leaking first."""
    by_name = {partition: {point.defence: point for point in members} for partition, members in points.items()}
    first = next(iter(by_name.values()))
    lines = []
    for name in sorted(first, key=lambda name: first[name].leakage[0]):
        runs = trained[trained["defence"] == name]
        epsilon = runs["epsilon"].max()
        lines.append(
            {
                "defence": name,
                "over the guess, dB": _ranged(first[name].leakage),
                **{f"Top-1 %, {partition}": _ranged(by_name[partition][name].top1) for partition in by_name},
                "epsilon": "none" if pd.isna(epsilon) else f"{epsilon:.3g}",
                "bytes per upload": f"{runs['upload_bytes'].mean():,.0f}",
                "ms per upload": f"{1000 * runs['upload_seconds'].mean():.0f}",
                "front": ", ".join(
                    partition for partition, members in points.items() if on_front(by_name[partition][name], members)
                ),
            }
        )
    return pd.DataFrame(lines)


def _ranged(values: Spread) -> str:
    middle, low, high = values
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    run_function(main)
