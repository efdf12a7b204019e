"""A battery's results as tables: a row per defence, a column per view, what the strongest attack recovers there.

``python results/defences/by_view.py RESULTS``, of a campaign as a run left it or as it was published. Columns
are the
views of its battery, or of ``standard`` if it had none.

A cell has the number of pictures recovered exactly and the median PSNR; of features, the share of pictures found first
and that of labels right. "withstood" means that an attack that knows the defence recovered no more than a guess, a
question mark that nothing follows: no such attack was run, too few pictures, or no leak without the defence either. A
dash says that no attack of ours applies. Where clients draw nothing, several uploads of a picture say what one does.
Sums are a view, so that a pipeline that ends in one has no row of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from fedmjp.benchmarks.campaign.battery import View, read_battery
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.study import open_results
from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, Board, BoardEntry, Standing
from fedmjp.benchmarks.leaderboard.headline import exactly, headline
from fedmjp.benchmarks.leaderboard.listing import grouped
from fedmjp.benchmarks.leaderboard.standings import strongest
from fedmjp.benchmarks.leaderboard.verdicts import LEAKING
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.percent import percent
from fedmjp.benchmarks.report.render import board_in
from fedmjp.defences.pipeline import NONE, Defences, pipeline_of
from fedmjp.running import run_function
from fedmjp.settings import Reveals
from fedmjp.threat import ThreatModel
from fedmjp.zoo import ZOO

SUM = "secure_sum"
STANDARD = "standard"
NOTHING = "—"
CELL = ("model", "weights", "defences", "setting", "threat")
Judged = tuple[Standing, BoardEntry]  # a defended model before one server, and the strongest attack on it


def main(results: Annotated[Path, typer.Argument(help="Folder of the campaign.", metavar="RESULTS")]) -> None:
    """Print a table of pictures and one of features and labels, per model."""
    output = OutputFolder(results)
    ledger, store = open_results(output)
    board = board_in(ledger, store, results)
    for title, shown in tables(board).items():
        typer.echo(f"\n{title}\n\n{shown.to_markdown(index=False, disable_numparse=True)}")


def tables(board: Board) -> dict[str, pd.DataFrame]:
    """Of pictures and of features, by model."""
    label = str(board.about.get("battery", "")) or STANDARD
    views = read_battery(label.split(" ", maxsplit=1)[0]).views
    made, order = {}, dict.fromkeys(map(defence_of, board.entries))
    for reveals, said in TOLD.items():
        shown = board.revealing(reveals)
        judged = [(standing, most_telling(shown, standing)) for standing in shown.standings]
        for model, members in grouped(judged, lambda pair: model_of(pair[1])).items():
            rows = grouped(members, lambda pair: defence_of(pair[1]))
            if set(rows) == {NONE}:  # twins of another model's rows
                continue
            cells = [{"defence": name, **by_view(rows[name], views, said)} for name in order if name in rows]
            made[f"{model}, {reveals}"] = pd.DataFrame(cells)
    return made


def model_of(entry: BoardEntry) -> str:
    """Return the model by the name of its weights."""
    return next((name for name, zoo in ZOO.items() if zoo.sha256 == entry.weights), f"{entry.model}, untrained")


def defence_of(entry: BoardEntry) -> str:
    """Return what clients do, a sum aside."""
    return pipeline_of(tuple(config for config in entry.defences if config.name != SUM)).label


def most_telling(board: Board, standing: Standing) -> BoardEntry:
    """Return the strongest attack; of several that recover all pictures exactly, that which was run on most of them."""
    first = strongest(board, standing)
    alike = [
        entry
        for entry in board.entries
        if entry.role == "attack" and all(getattr(entry, name) == getattr(first, name) for name in CELL)
    ]
    exact = [entry for entry in alike if entry.exact and entry.exact.share == 1]
    return max(exact, key=lambda entry: (entry.n, headline(entry)), default=first)


def by_view(judged: Sequence[Judged], views: Sequence[View], said: Callable[[BoardEntry], str]) -> Mapping[str, str]:
    """Return what the strongest attack of each view recovers, and what follows of it."""
    seen = grouped(judged, lambda pair: next((view.name for view in views if is_of(pair[1], view)), ""))
    defences = judged[0][1].defences
    return {view.name: cell(seen.get(view.name) or seen.get(once(view, views, defences), []), said) for view in views}


def once(view: View, views: Sequence[View], defences: Defences) -> str:
    """Return the view of one of several uploads that would all be the same, by name; empty if they would not."""
    threat = {name: value for name, value in view.threat.items() if name != "uploads_per_picture"}
    alike = (
        other.name
        for other in views
        if (other.threat, other.server, other.sum_of) == (threat, view.server, view.sum_of)
    )
    return next(alike, "") if view.repeats(defences) else ""


def cell(judged: Iterable[Judged], said: Callable[[BoardEntry], str]) -> str:
    """Of several settings, that which leaks most."""
    measured = [(standing, entry) for standing, entry in judged if entry.exact]
    if not measured:
        return NOTHING
    standing, entry = max(measured, key=lambda pair: headline(pair[1]))
    if standing.verdict == "withstood":
        return standing.verdict
    return said(entry) if standing.verdict in LEAKING else f"{said(entry)} ?"


def is_of(entry: BoardEntry, view: View) -> bool:
    """Whether a cell is of what a view's server may see or send."""
    asked = ThreatModel.parse({**view.threat, "server": view.server})
    return entry.server == asked and (entry.pipeline.clients > 1) is (view.sum_of > 1)


def pictures_said(entry: BoardEntry) -> str:
    """``8 of 8, 137 dB``."""
    return f"{exactly(entry)}, {numbers.score(headline(entry)[1], LEAKAGE)} dB"


def features_said(entry: BoardEntry) -> str:
    """``100 % found, 98 % labels of 64``."""
    found, right = (entry.metrics[name].mean for name in ("rank1", "label_accuracy"))
    return f"{percent(found)} found, {percent(right)} labels of {entry.n}"


TOLD: Mapping[Reveals, Callable[[BoardEntry], str]] = {"pictures": pictures_said, "features": features_said}

if __name__ == "__main__":
    run_function(main)
