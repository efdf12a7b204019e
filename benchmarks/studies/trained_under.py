"""What uploads give away on the weights that training under the same defence has made.

``python -m fedmjp.benchmarks.studies.trained_under RUNS --data FOLDER --output FOLDER``, where RUNS is what
``training_cost``
left: so leakage and Top-1 are of the same weights. The server sees one gradient of one picture, and tries what the
battery ``standard`` has for that view. Searches have the first pictures, and are run where they know the defence.
Epsilon is of the one upload that is seen.

A row per picture, or per refusal, with its reason.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from fedmjp import facade, provenance
from fedmjp.benchmarks.campaign.battery import View, read_battery
from fedmjp.benchmarks.folder.study import TRIALS
from fedmjp.benchmarks.plan.experiment import AttackConfig
from fedmjp.benchmarks.scripts import Pictures, keep_table, unseen
from fedmjp.benchmarks.studies.training_cost import Defences, Partitions, Seeds, asked_runs, name_of, scenario_of
from fedmjp.config import Checkpoint
from fedmjp.data.pictures import LabelledPicture
from fedmjp.errors import AttackFailedError, AttackNotApplicableError, BadInputError
from fedmjp.exchange import Exchange
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.processes import workers
from fedmjp.running import run_function
from fedmjp.scenario import Scenario
from fedmjp.settings import Setting
from fedmjp.training.run_folder import TrainingFolder

BATTERY = "standard"
SEED = 0  # of the choice of pictures


def main(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs.", metavar="RUNS")],
    data: Pictures,
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")],
    pictures: Annotated[int, typer.Option(help="Pictures at each run's weights.", min=1)] = 64,
    seeds: Seeds = 3,
    defences: Defences = None,
    partitions: Partitions = None,
    processes: Annotated[int, typer.Option(help="Runs that are attacked at a time.", min=1)] = 1,
) -> None:
    """Attack the same pictures at the weights of every run, and write the rows after each; what is written is kept."""
    battery = read_battery(BATTERY)
    (view,) = (view for view in battery.views if not view.threat and not view.server and view.sum_of == 1)
    about = {"battery": battery.label, "view": view.name, "pictures": pictures}
    weights = {run: weights_of(runs, data, run) for run in asked_runs(seeds, partitions, defences)}
    written = rows_by_weights(output, about)
    finished = {run: written[trained.sha256] for run, trained in weights.items() if trained.sha256 in written}
    with workers(processes) as pool:
        work = {
            pool.submit(attacked, data, run, trained, pictures, view, battery.searched): run
            for run, trained in weights.items()
            if run not in finished
        }
        for done in as_completed(work):
            finished[work[done]] = done.result()
            keep_table(output, pd.DataFrame([row for run in weights for row in finished.get(run, ())]), about)
            typer.echo(f"{len(finished)} of {len(weights)} runs")


def weights_of(runs: Path, data: str, run: tuple[int, str, str]) -> Checkpoint:
    """What a run left; ConfigError if nothing."""
    seed, scheme, defence = run
    return Checkpoint.of(TrainingFolder(runs / name_of(scenario_of(data, scheme, defence, seed), scheme)).weights)


def rows_by_weights(output: Path, about: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What an earlier call wrote with the same battery and pictures; BadInputError if it had others or does not say."""
    if not (output / TRIALS).exists():
        return {}
    said = json.loads((output / "manifest.json").read_text())
    if others := {name: said.get(name) for name, value in about.items() if said.get(name) != value}:
        raise BadInputError(f"{output} has rows with {others}, not {dict(about)}: give another --output")
    table = pd.read_parquet(output / TRIALS)
    if "weights_sha256" not in table:
        raise BadInputError(f"{output} does not say which weights its rows are of: give another --output")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_dict("records"):
        rows.setdefault(row["weights_sha256"], []).append({str(name): value for name, value in row.items()})
    return rows


def attacked(
    data: str, run: tuple[int, str, str], trained: Checkpoint, pictures: int, view: View, searched: int
) -> list[dict[str, Any]]:
    """The rows of one run, with the commit that made them: a study that was interrupted may have several."""
    torch.set_num_threads(1)
    seed, scheme, defence = run
    asked = scenario_of(data, scheme, defence, seed)
    model = asked.model.model_copy(update={"weights": trained, "localisation": "none"})
    scenario = Scenario.parse({"model": model, "defences": asked.defences, "seed": seed})
    chosen = unseen(data, pictures, scenario.model, SEED)
    about = {"defence": scenario.pipeline.label, "partition": scheme, "seed": seed}
    origin = {"weights_sha256": trained.sha256, "commit": provenance.revision()["commit"]}
    tried = rows_of(scenario, chosen, view.attacks, view.searches, searched)
    return [{**about, **origin, **row} for row in tried]


def rows_of(
    scenario: Scenario,
    pictures: Sequence[LabelledPicture],
    attacks: Sequence[AttackConfig],
    searches: Sequence[AttackConfig],
    searched: int,
) -> Iterator[dict[str, Any]]:
    """What every attack makes of the upload of each picture; searches of the first, if they know the defence."""
    network = build_vit(scenario.network)
    setting = Setting.C if scenario.pipeline.shuffles else Setting.A
    applied: dict[str, AttackConfig] = {}
    for attack in (*attacks, *searches):
        method = attack.build()
        adapted = method.adapted(scenario.pipeline, network, scenario.threat)
        if reason := method.refusal(network, scenario.threat):
            yield {"attack": attack.label, "refusal": reason}
        elif method.reveals == "pictures" and (attack in attacks or adapted):
            applied[attack.label] = attack
    for place, picture in enumerate(pictures):
        exchange = scenario.exchange([picture], model=network, number=place)
        for label, attack in applied.items():
            if place < searched or attack in attacks:
                yield {"attack": label, **scored(scenario, attack, exchange, network, setting)}


def scored(
    scenario: Scenario, attack: AttackConfig, exchange: Exchange, network: VitClassifier, setting: Setting
) -> dict[str, Any]:
    """The score of one picture, or why the attack on it broke off."""
    about = {"picture": exchange.private.pictures[0], "picture_sha256": exchange.private.sha256(0)}
    try:
        disclosed = facade.attack(attack.name, exchange.upload, scenario, options=attack.options, model=network)
    except (AttackFailedError, AttackNotApplicableError) as error:
        return {**about, "error": str(error)}
    values = facade.score(disclosed, exchange.private, setting=setting, metrics=("psnr",), model=network)
    return {**about, "psnr": float(values["psnr"][0])}


if __name__ == "__main__":
    run_function(main)
