"""What uploads give away on the weights that training under the same defence has made.

``python results/trained_under/study.py RUNS --data FOLDER --output FOLDER``, where RUNS holds the runs
that ``results/training_cost/study.py`` left: so leakage and Top-1 are of the same weights. The server sees one gradient
of one picture, and tries what the battery ``standard`` has for that view. Searches have the first pictures, and are run
where they know the defence. Epsilon is of the one upload that is seen.

A row per picture, or per refusal, with its reason.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
import typer

from fedmjp import facade, provenance
from fedmjp.benchmarks.campaign.battery import View, read_battery
from fedmjp.benchmarks.folder.study import TRIALS
from fedmjp.benchmarks.plan.experiment import AttackConfig
from fedmjp.benchmarks.scripts import Pictures, keep_table, load_unseen
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.defences.pipeline import Pipeline, read_pipeline
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
# The runs of results/training_cost/study.py.
PARTITIONS = ("iid", "dirichlet")
DEFENCES = (
    "none", "mjp", "clip:norm=1", "gaussian:noise=0.01", "prune:kept=0.1", "prune:kept=0.01", "quantise:bits=4", "sign",
    "withhold", "local_dp:epsilon=50", "local_dp:epsilon=8", "dp_sgd:epsilon=8",
)  # fmt: skip


def main(
    runs: Annotated[Path, typer.Argument(help="Folder of the runs.", metavar="RUNS")],
    data: Pictures,
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")],
    pictures: Annotated[int, typer.Option(help="Pictures at each run's weights.", min=1)] = 64,
    seeds: Annotated[int, typer.Option(help="Seeds of each defence, from 0.", min=1)] = 3,
    defences: Annotated[list[str] | None, typer.Option("--defence", help="May be repeated. Without it, all.")] = None,
    partitions: Annotated[
        list[str] | None, typer.Option("--partition", help="May be repeated. Without it, all.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Runs that are attacked at a time.", min=1)] = 1,
) -> None:
    """Attack the same pictures at the weights of every run, and write the rows after each; what is written is kept."""
    battery = read_battery(BATTERY)
    (view,) = (view for view in battery.views if not view.threat and not view.server and view.sum_of == 1)
    about = {"battery": battery.label, "view": view.name, "pictures": pictures}
    plan = itertools.product(range(seeds), partitions or PARTITIONS, defences or DEFENCES)
    trained = [read_run(runs, *names) for names in plan]
    finished = rows_by_weights(output, about)
    with workers(processes) as pool:
        work = {
            pool.submit(attacked, data, run, pictures, view, battery.searched): run
            for run in trained
            if run.weights.sha256 not in finished
        }
        for attack in as_completed(work):
            finished[work[attack].weights.sha256] = attack.result()
            rows = [row for run in trained for row in finished.get(run.weights.sha256, ())]
            keep_table(output, pd.DataFrame(rows), about)
            typer.echo(f"{sum(run.weights.sha256 in finished for run in trained)} of {len(trained)} runs")


class Run(NamedTuple):
    """A run of ``results/training_cost/study.py`` and its last weights."""

    seed: int
    partition: str
    pipeline: Pipeline
    model: ModelConfig

    @property
    def weights(self) -> Checkpoint:
        """Return the weights after the last round."""
        assert self.model.weights is not None  # noqa: S101 (of a finished run)
        return self.model.weights


def read_run(folder: Path, seed: int, partition: str, defence: str) -> Run:
    """Read what a training run left; ConfigError or BadInputError if there is none."""
    pipeline = read_pipeline([defence])
    label = pipeline.label.replace(":", "-").replace("=", "-")
    place = TrainingFolder(folder / f"{partition}-{label}-{seed}")
    trained = {"weights": Checkpoint.of(place.weights), "localisation": "none"}
    return Run(seed, partition, pipeline, place.config().model.model_copy(update=trained))


def rows_by_weights(output: Path, about: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Read what an earlier call wrote; refuse rows of another battery or of other pictures."""
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


def attacked(data: str, run: Run, pictures: int, view: View, searched: int) -> list[dict[str, Any]]:
    """Attack one run; its rows name the commit that made them, as an interrupted study may have several."""
    torch.set_num_threads(1)
    scenario = Scenario.parse({"model": run.model, "defences": run.pipeline.configs, "seed": run.seed})
    unseen = load_unseen(data, pictures, scenario.model, SEED)
    about = {"defence": scenario.pipeline.label, "partition": run.partition, "seed": run.seed}
    origin = {"weights_sha256": run.weights.sha256, "commit": provenance.revision()["commit"]}
    return [{**about, **origin, **row} for row in rows_of(scenario, unseen, view.attacks, view.searches, searched)]


def rows_of(
    scenario: Scenario,
    pictures: Sequence[LabelledPicture],
    attacks: Sequence[AttackConfig],
    searches: Sequence[AttackConfig],
    searched: int,
) -> Iterator[dict[str, Any]]:
    """Return what every attack makes of the upload of each picture; searches of the first, if they know the defence."""
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
    """Return the score of one picture, or why the attack on it broke off."""
    about = {"picture": exchange.private.pictures[0], "picture_sha256": exchange.private.sha256(0)}
    try:
        disclosed = facade.attack(attack.name, exchange.upload, scenario, options=attack.options, model=network)
    except (AttackFailedError, AttackNotApplicableError) as error:
        return {**about, "error": str(error)}
    values = facade.score(disclosed, exchange.private, setting=setting, metrics=("psnr",), model=network)
    return {**about, "psnr": float(values["psnr"][0])}


if __name__ == "__main__":
    run_function(main)
