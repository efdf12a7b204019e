"""A battery's results as tables: a row per defence, a column per view, what the strongest attack recovers there.

``python -m benchmarks.studies.by_view RESULTS``, of a campaign with a battery, as a run left it or as it was published.

A cell has the share of pictures recovered exactly and their median PSNR; of features, the share of pictures found first
and that of labels right. A star stands where no attack that was measured knows the defence: its failure says little.
Sums are a view here, so that a pipeline that ends in one has no row of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from attacks.base import Reveals
from benchmarks.campaign.battery import View, read_battery
from benchmarks.folder.output import OutputFolder
from benchmarks.folder.study import open_results
from benchmarks.leaderboard.entries import LEAKAGE, Board, Entry
from benchmarks.leaderboard.headline import headline
from benchmarks.leaderboard.listing import grouped
from benchmarks.report import numbers
from benchmarks.report.render import board_in
from fedmjp.defences.pipeline import NONE, pipeline_of
from fedmjp.errors import BadInputError
from fedmjp.running import run_function
from fedmjp.threat import ThreatModel
from fedmjp.zoo import ZOO

SUM = "secure_sum"
NOTHING = "—"
Row = tuple[str, str]  # a model and its weights, a defence


def main(results: Annotated[Path, typer.Argument(help="Folder of the campaign.", metavar="RESULTS")]) -> None:
    """Print a table of pictures and one of features and labels, per model."""
    output = OutputFolder(results)
    ledger, store = open_results(output)
    board = board_in(ledger, store, results)
    for title, shown in tables(board).items():
        typer.echo(f"\n{title}\n\n{markdown(shown)}")


def tables(board: Board) -> dict[str, pd.DataFrame]:
    """Of pictures and of features, by model; BadInputError if the campaign had no battery."""
    label = str(board.about.get("battery", ""))
    if not label:
        raise BadInputError(f"{board.name} was run without a battery, whose views are the columns")
    views = read_battery(label.split(" ", maxsplit=1)[0]).views
    made = {}
    for reveals, said in TOLD.items():
        attacks = [one for one in board.revealing(reveals).entries if one.role == "attack"]
        for model, entries in grouped(attacks, model_of).items():
            rows = grouped(entries, defence_of)
            if set(rows) == {NONE}:  # twins of another model's rows
                continue
            cells = [{"defence": name, **by_view(rows[name], views, said)} for name in rows]
            made[f"{model}, {reveals}"] = pd.DataFrame(cells)
    return made


def markdown(table: pd.DataFrame) -> str:
    """As a README has it."""
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def model_of(entry: Entry) -> str:
    """The model by the name of its weights."""
    return next((name for name, zoo in ZOO.items() if zoo.sha256 == entry.weights), f"{entry.model}, untrained")


def defence_of(entry: Entry) -> str:
    """What clients do, a sum aside."""
    return pipeline_of(tuple(config for config in entry.defences if config.name != SUM)).label


def by_view(entries: Iterable[Entry], views: Sequence[View], said: Callable[[list[Entry]], str]) -> Mapping[str, str]:
    """What the strongest attack of each view recovers."""
    seen = grouped(entries, lambda entry: next((view.name for view in views if is_of(entry, view)), ""))
    return {view.name: said(seen.get(view.name, [])) for view in views}


def is_of(entry: Entry, view: View) -> bool:
    """Whether a cell is of what a view's server may see or send."""
    asked = ThreatModel.parse({**view.threat, "server": view.server})
    return entry.server == asked and (entry.pipeline.clients > 1) is (view.sum_of > 1)


def pictures_said(entries: list[Entry]) -> str:
    """``100 %, 137 dB`` of the strongest attack."""
    measured = [entry for entry in entries if entry.exact]
    if not measured:
        return NOTHING
    share, middle = headline(max(measured, key=headline))
    blind = bool(measured[0].defences) and not any(entry.adapted for entry in measured)
    return f"{numbers.percent(share)}, {numbers.score(middle, LEAKAGE)} dB{' *' if blind else ''}"


def features_said(entries: list[Entry]) -> str:
    """``100 % found, 98 % labels`` of the strongest attack."""
    measured = [entry for entry in entries if entry.exact]
    if not measured:
        return NOTHING
    best = max(measured, key=headline)
    found, right = (best.metrics[name].mean for name in ("rank1", "label_accuracy"))
    blind = bool(best.defences) and not any(entry.adapted for entry in measured)
    return f"{numbers.percent(found)} found, {numbers.percent(right)} labels{' *' if blind else ''}"


TOLD: Mapping[Reveals, Callable[[list[Entry]], str]] = {"pictures": pictures_said, "features": features_said}

if __name__ == "__main__":
    run_function(main)
