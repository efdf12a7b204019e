"""What defences cost in training: the same federation under each of them, IID and not, over seeds.

``python results/training_cost/study.py --data FOLDER --runs FOLDER --output FOLDER``. Each run has a
folder there: a finished run is left as it is, and a stopped one goes on.

A row per run: Top-1 of the validation split after the last round, bytes of an upload, seconds that the defence took of
each upload, seconds of a round, and epsilon at the end. Of a secure sum the model is the same as without, and it has no
run; nor has Soteria, which takes the derivative of every feature of each of a client's pictures. MJP regresses
positions besides, as its paper says.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

import fedmjp
from fedmjp.benchmarks.federation.resources import resources_for
from fedmjp.benchmarks.federation.training import deal, plan_for, rounds_done, train_federated
from fedmjp.benchmarks.scripts import Pictures, keep_table
from fedmjp.config import Checkpoint
from fedmjp.defences.pipeline import DefenceConfig, pipeline_of
from fedmjp.learning import Training
from fedmjp.running import run_function
from fedmjp.scenario import TrainingScenario
from fedmjp.training.history import History
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.yaml_files import read_yaml

CONFIG = Path(fedmjp.__file__).parent / "benchmarks" / "training" / "coarse_federated.yaml"
PARTITIONS = ("iid", "dirichlet")
DEFENCES = (
    "none",
    "mjp",
    "clip:norm=1",
    "gaussian:noise=0.01",
    "prune:kept=0.1",
    "prune:kept=0.01",
    "quantise:bits=4",
    "sign",
    "withhold",
    "local_dp:epsilon=50",
    "local_dp:epsilon=8",
    "dp_sgd:epsilon=8",
)


def main(
    data: Pictures,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.", metavar="RUNS")],
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")],
    seeds: Annotated[int, typer.Option(help="Seeds of each, from 0.", min=1)] = 3,
    defences: Annotated[list[str] | None, typer.Option("--defence", help="May be repeated. Without it, all.")] = None,
    partitions: Annotated[
        list[str] | None, typer.Option("--partition", help="May be repeated. Without it, all.")
    ] = None,
) -> None:
    """Train under every defence, and keep a row per run."""
    table = pd.DataFrame(
        rows(data, runs, itertools.product(range(seeds), partitions or PARTITIONS, defences or DEFENCES))
    )
    keep_table(output, table, {"config": CONFIG.name, "seeds": list(range(seeds))})
    typer.echo(table.groupby(["partition", "defence"], sort=False)["top1"].agg(["mean", "std", "count"]).to_string())


def rows(data: str, runs: Path, asked_for: Iterable[tuple[int, str, str]]) -> Iterator[dict[str, Any]]:
    """Build a row per run: of a seed, a partition and a defence."""
    for seed, scheme, defence in asked_for:
        asked = scenario_of(data, scheme, defence, seed)
        name = name_of(asked, scheme)
        folder = TrainingFolder(runs / name)
        trained(asked, folder)
        last = History(folder.history, folder.tensorboard).rows().iloc[-1]
        about = ("top1", "validation_pictures", "upload_bytes", "upload_seconds", "seconds", "epsilon", "refused")
        yield {
            "defence": pipeline_of(asked.defences).label,
            "partition": scheme,
            "seed": seed,
            "rounds": int(last["round"]),
            **{column: last[column] for column in about},
            "weights_sha256": Checkpoint.of(folder.weights).sha256,
        }
        typer.echo(f"{name}: Top-1 {last['top1']:.1%}, {last['seconds']:.0f} s in its last round")


def name_of(asked: TrainingScenario, scheme: str) -> str:
    """Return the folder of a run."""
    label = pipeline_of(asked.defences).label.replace(":", "-").replace("=", "-")
    return f"{scheme}-{label}-{asked.seed}"


def scenario_of(data: str, scheme: str, defence: str, seed: int) -> TrainingScenario:
    """Return the federation of the configuration, under one defence or none."""
    values = dict(read_yaml(CONFIG)[1])
    training = {name: values.pop(name) for name in list(values) if name in Training.model_fields}
    training["partition"] = {**training["partition"], "scheme": scheme}
    defences = () if defence == "none" else (DefenceConfig.parse(defence),)
    regressed = "nonlinear" if pipeline_of(defences).shuffles else "none"
    model = {**values.pop("model"), "seed": seed, "localisation": regressed}
    return TrainingScenario.parse(
        {**values, "model": model, "data": data, "defences": defences, "seed": seed, "training": training}
    )


def trained(asked: TrainingScenario, folder: TrainingFolder) -> None:
    """Train, or go on, or do nothing where all rounds are done."""
    folder.root.mkdir(parents=True, exist_ok=True)
    _, dealt = deal(asked)
    scenario = plan_for(asked, dealt)
    done = rounds_done(scenario, folder)
    if done == scenario.training.rounds:
        return
    if done:
        _, dealt = deal(scenario, folder.partition)
    dealt.save(folder.partition)
    train_federated(scenario, dealt, folder, resources_for(scenario, gpus_per_client=None))


if __name__ == "__main__":
    run_function(main)
