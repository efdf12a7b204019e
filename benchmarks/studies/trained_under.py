"""What uploads give away on the weights that training under the same defence has made.

``python -m benchmarks.studies.trained_under RUNS --data FOLDER --output FOLDER``, where RUNS is what ``training_cost``
left: so leakage and Top-1 are of the same weights. The server sees one gradient of one picture, and tries what the
battery ``standard`` has for that view. Searches have the first pictures, and are run where they know the defence.
Epsilon is of the one upload that is seen.

A row per picture, or per refusal, with its reason.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from benchmarks.campaign.battery import View, read_battery
from benchmarks.folder.study import TRIALS
from benchmarks.plan.experiment import AttackConfig
from benchmarks.scripts import Pictures, keep_table, unseen
from benchmarks.studies.training_cost import Defences, Partitions, Seeds, asked_runs, name_of, scenario_of
from fedmjp import facade
from fedmjp.config import Checkpoint
from fedmjp.data.pictures import LabelledPicture
from fedmjp.defences.pipeline import DefenceConfig, pipeline_of
from fedmjp.errors import AttackFailedError, AttackNotApplicableError, BadInputError
from fedmjp.exchange import Exchange
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
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
    asked = list(asked_runs(seeds, partitions, defences))
    written = rows_by_run(output, about)
    finished = {run: written[key] for run in asked if (key := key_of(run)) in written}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        work = {
            pool.submit(attacked, runs, data, run, pictures, view, battery.searched): run
            for run in asked
            if run not in finished
        }
        for done in as_completed(work):
            finished[work[done]] = done.result()
            keep_table(output, pd.DataFrame([row for run in asked for row in finished.get(run, ())]), about)
            typer.echo(f"{len(finished)} of {len(asked)} runs")


def key_of(run: tuple[int, str, str]) -> tuple[int, str, str]:
    """Seed, partition and the defence's label, as rows have them."""
    seed, scheme, defence = run
    return seed, scheme, pipeline_of(() if defence == "none" else (DefenceConfig.parse(defence),)).label


def rows_by_run(output: Path, about: Mapping[str, Any]) -> dict[tuple[int, str, str], list[dict[str, Any]]]:
    """What an earlier call with the same battery and pictures wrote, by run; BadInputError if it had others."""
    if not (output / TRIALS).exists():
        return {}
    said = json.loads((output / "manifest.json").read_text())
    if others := {name: said.get(name) for name, value in about.items() if said.get(name) != value}:
        raise BadInputError(f"{output} has rows with {others}, not {dict(about)}: give another --output")
    rows: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for row in pd.read_parquet(output / TRIALS).to_dict("records"):
        rows.setdefault((row["seed"], row["partition"], row["defence"]), []).append(
            {str(name): value for name, value in row.items()}
        )
    return rows


def attacked(
    runs: Path, data: str, run: tuple[int, str, str], pictures: int, view: View, searched: int
) -> list[dict[str, Any]]:
    """The rows of one run."""
    torch.set_num_threads(1)
    seed, scheme, defence = run
    asked = scenario_of(data, scheme, defence, seed)
    file = TrainingFolder(runs / name_of(asked, scheme)).weights
    model = asked.model.model_copy(update={"weights": Checkpoint.of(file), "localisation": "none"})
    scenario = Scenario.parse({"model": model, "defences": asked.defences, "seed": seed})
    chosen = unseen(data, pictures, scenario.model, SEED)
    about = {"defence": scenario.pipeline.label, "partition": scheme, "seed": seed}
    return [{**about, **row} for row in rows_of(scenario, chosen, view.attacks, view.searches, searched)]


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
        method = attack.made()
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
