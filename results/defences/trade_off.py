"""Leakage against accuracy: what the strongest attack recovers under each defence, and what training under it costs.

``python results/defences/trade_off.py --cost FOLDER --leakage FOLDER --board FOLDER --figure FILE``, with the
rows of
``training_cost`` and of ``trained_under``, which are of the same weights, and the board of defences. The first two may
be given several times: the last folder that has a defence in a partition counts.

Leakage is that of the strongest attack: the median gain over the grey guess of the same pictures, with PSNR capped
where a picture is exact to the eye. Its interval resamples seeds and photographs. That of Top-1 is Wilson's over
validation pictures, from the lowest of the seeds to the highest.

After a few rounds attacks fail that succeed at weights of a longer training. That protects nobody, so each defence
has a second point, at the board's weights, and the worse of both counts: a defence is on the front where no other leaks
less and is right more often.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedmjp.benchmarks.folder.study import TRIALS, read_plan
from fedmjp.benchmarks.leaderboard.statistics import RESAMPLES, share
from fedmjp.benchmarks.plan.trial_plan import Cell
from fedmjp.benchmarks.report.drawing import CEILING, COLOURS, DOTTED, MARKERS, STYLE, UNDEFENDED_COLOUR
from fedmjp.defences.pipeline import NONE
from fedmjp.errors import BadInputError
from fedmjp.running import run_function
from fedmjp.seeds import numpy_generator
from fedmjp.settings import Setting
from fedmjp.threat import ThreatModel
from fedmjp.zoo import ZOO

GUESS = "grey"
CENTRAL = [ZOO[name].sha256 for name in ("coarse-none-0", "coarse-mjp-0")]  # the board's, of the federation's model
Spread = tuple[float, float, float]  # a middle, and the ends of its interval


class Point(NamedTuple):
    """A defence: its leakage in dB and Top-1 in percent, each with the ends of its interval."""

    defence: str
    leakage: Spread
    top1: Spread
    attack: str  # the strongest
    central: Spread  # leakage at the board's weights

    @property
    def worst(self) -> float:
        """In dB, what leaks where more does."""
        return max(self.leakage[0], self.central[0])


def main(
    cost: Annotated[list[Path], typer.Option(help="Folder of training_cost; may be repeated.", metavar="FOLDER")],
    leakage: Annotated[list[Path], typer.Option(help="Folder of trained_under; may be repeated.", metavar="FOLDER")],
    board: Annotated[Path, typer.Option(help="Folder of the campaign defences.", metavar="FOLDER")],
    figure: Annotated[Path, typer.Option(help="Where the figure goes.", metavar="FILE")],
) -> None:
    """Draw the figure, and print its points."""
    trained, attacked, central = joined(cost), joined(leakage), of_one_gradient(board)
    drawable = set(trained["partition"]) & set(attacked["partition"])
    trained = trained[trained["partition"].isin(drawable)]
    points = {
        str(partition): [
            point(
                str(name), runs, attacked[(attacked["partition"] == partition) & (attacked["defence"] == name)], central
            )
            for name, runs in rows.groupby("defence", sort=False)
        ]
        for partition, rows in trained.groupby("partition", sort=False)
    }
    with mpl.rc_context(STYLE):
        drawn(points).savefig(figure, dpi=160)
    typer.echo(table(points, trained).to_markdown(index=False, disable_numparse=True))


def joined(folders: Sequence[Path]) -> pd.DataFrame:
    """Return the rows of studies: of each defence and partition those of the last folder that has both."""
    tables = [pd.read_parquet(folder / TRIALS).assign(folder=place) for place, folder in enumerate(folders)]
    rows = pd.concat(tables, ignore_index=True)
    last = rows.groupby(["defence", "partition"])["folder"].transform("max")
    return rows[rows["folder"] == last].drop(columns="folder")


def of_one_gradient(board: Path) -> pd.DataFrame:
    """Scores of pictures from one gradient, by defence, at the weights of ``CENTRAL``."""
    shown = [place for place, cell in enumerate(read_plan(board).cells) if _is_shown(cell)]
    rows = pd.read_parquet(board / TRIALS, columns=["cell", "defence", "seed", "picture", "attack", "psnr"])
    return rows[rows["cell"].isin(shown)]


def _is_shown(cell: Cell) -> bool:
    asked = (cell.weights in CENTRAL, cell.reveals == "pictures", cell.pipeline.clients == 1)
    compared = Setting.C if cell.pipeline.shuffles else Setting.A
    return all(asked) and cell.setting == compared and cell.threat.undefended == ThreatModel()


def point(defence: str, runs: pd.DataFrame, attacked: pd.DataFrame, central: pd.DataFrame) -> Point:
    """Of one defence and partition; BadInputError if no attack was run at some run's weights."""
    if missing := sorted(set(runs["seed"]) - set(attacked["seed"])):
        raise BadInputError(f"no attack was run on {defence}, seeds {missing}: run trained_under on all of the runs")
    of_it = central[central["defence"] == defence]
    if of_it.empty:
        raise BadInputError(f"the board has no row of {defence}: give --board the folder of a campaign that has one")
    leakage, attack = strongest(defence, attacked)
    return Point(defence, leakage, accuracy(runs), attack, strongest(defence, of_it)[0])


def strongest(defence: str, attacked: pd.DataFrame) -> tuple[Spread, str]:
    """Return what the strongest attack gains over the guess, and its name; refuse rows without either."""
    scores = attacked.pivot_table(index=["seed", "picture"], columns="attack", values="psnr").clip(upper=CEILING)
    tried = [str(name) for name in scores]
    if GUESS not in tried or len(tried) == 1:
        raise BadInputError(
            f"of {defence} there are {', '.join(tried) or 'no scores'}: {GUESS} and an attack are needed"
        )
    gains = {name: spread(scores[name] - scores[GUESS]) for name in tried if name != GUESS}
    attack = max(gains, key=lambda name: gains[name][0])
    return gains[attack], attack


def spread(gains: "pd.Series[float]") -> Spread:
    """Return the median in dB of values by seed and picture, and its 95 % interval over both."""
    values = gains.dropna().unstack("picture").to_numpy()
    seeds, pictures = values.shape
    generator = numpy_generator(0, "medians", seeds, pictures)
    drawn_seeds = generator.integers(seeds, size=(RESAMPLES, seeds, 1))
    drawn_pictures = generator.integers(pictures, size=(RESAMPLES, 1, pictures))
    medians = np.nanmedian(values[drawn_seeds, drawn_pictures], axis=(1, 2))
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(np.nanmedian(values)), float(low), float(high)


def accuracy(runs: pd.DataFrame) -> Spread:
    """Return the mean over seeds in percent; the lowest and the highest end of their intervals."""
    shares = [
        share(round(run["top1"] * run["validation_pictures"]), int(run["validation_pictures"]))
        for run in runs.to_dict("records")
    ]
    low, high = min(one.low for one in shares), max(one.high for one in shares)
    return 100 * float(runs["top1"].mean()), 100 * low, 100 * high


def on_front(point: Point, others: Sequence[Point]) -> bool:
    """Whether none leaks as little and is right as often, and one of both more."""
    mine = (-point.worst, point.top1[0])
    theirs = [(-other.worst, other.top1[0]) for other in others]
    return not any(other[0] >= mine[0] and other[1] >= mine[1] and other != mine for other in theirs)


def drawn(points: dict[str, list[Point]]) -> Figure:
    """Draw a panel per partition, with the front."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(points), sharey=True, squeeze=False)[0])
    for axes, (partition, members) in zip(panels, points.items(), strict=True):
        for place, point in enumerate(members):
            colour = UNDEFENDED_COLOUR if point.defence == NONE else COLOURS[place % len(COLOURS)]
            look: Any = {
                "marker": MARKERS[place % len(MARKERS)],
                "color": colour,
                "linewidth": 0.9,
                "markersize": 6,
            }
            right, leak, central = (values[0] for values in (point.top1, point.leakage, point.central))
            axes.plot([right, right], [leak, central], color=colour, linestyle=":", linewidth=0.9)
            axes.errorbar(right, central, yerr=_bars(point.central), markerfacecolor="white", **look)
            name = "no defence" if point.defence == NONE else point.defence
            axes.errorbar(right, leak, xerr=_bars(point.top1), yerr=_bars(point.leakage), label=name, **look)
        front = sorted((point.top1[0], point.worst) for point in members if on_front(point, members))
        axes.step(*zip(*front, strict=True), where="pre", color="black", linewidth=0.8, label="front")
        axes.axhline(0, **DOTTED)
        axes.set(title=partition, xlabel="Top-1 in %")
    panels[0].set_ylabel("leakage: median gain over the grey guess, dB")
    handles, labels = panels[0].get_legend_handles_labels()
    for fill, said in {"black": "weights trained under it", "white": "board's weights"}.items():
        handles.append(Line2D([], [], color="black", marker="o", markerfacecolor=fill, linestyle="none"))
        labels.append(said)
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    return figure


def _bars(values: Spread) -> list[list[float]]:
    """How far the ends of an interval are from its middle, as ``errorbar`` takes it."""
    middle, low, high = values
    return [[middle - low], [high - middle]]


def table(points: dict[str, list[Point]], trained: pd.DataFrame) -> pd.DataFrame:
    """Build a line per defence, the least leaking first."""
    by_name = {partition: {point.defence: point for point in members} for partition, members in points.items()}
    first = next(iter(by_name.values()))
    lines = []
    for name in sorted(first, key=lambda name: first[name].worst):
        runs = trained[trained["defence"] == name]
        epsilon = runs["epsilon"].max()
        lines.append(
            {
                "defence": name,
                **{
                    f"over the guess, dB, {partition}": _ranged(by_name[partition][name].leakage)
                    for partition in by_name
                },
                "board's weights": _ranged(first[name].central),
                "attack": " / ".join(dict.fromkeys(by_name[partition][name].attack for partition in by_name)),
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
