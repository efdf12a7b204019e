"""`fedmjp simulate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmjp.cli.overrides import DEFENCE_HELP

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.federation.simulation import Resources
    from fedmjp.data.datasets import LabelledDataset
    from fedmjp.data.partitions import Partition
    from fedmjp.scenario import Scenario
    from fedmjp.training.run_folder import TrainingFolder

TOLD = 10  # refusals that are listed on the terminal
# Warm-up of the paper's recipe: 20 of 300 epochs.
WARMUP, EPOCHS = 20, 300
CLIENTS = 8


def simulate(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="KEY=VALUE, such as training.recipe.batch_size=64 or clients=4."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="bundled (the default), a folder of pictures or parquet files, or hub:OWNER/NAME."),
    ] = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="A YAML file of such keys.")] = None,
    row: Annotated[str | None, typer.Option(help="A row of the paper, such as table4-J.")] = None,
    defences: Annotated[list[str] | None, typer.Option("--defence", help=DEFENCE_HELP)] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients; 8 by default.")] = None,
    scheme: Annotated[
        str | None, typer.Option("--partition", help="How pictures are dealt: iid, dirichlet or pathological.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Of dirichlet; the smaller, the more unequal.")] = None,
    strategy: Annotated[str | None, typer.Option(help="fedavg, fedprox, fedavgm, fedadam or fedsgd.")] = None,
    rounds: Annotated[int | None, typer.Option(help="10 by default.")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Of a client in a round; 1 by default.")] = None,
    participation: Annotated[float | None, typer.Option(help="Share of the clients in a round.")] = None,
    uploads: Annotated[
        list[int] | None, typer.Option(help="Record the uploads of this round for `fedmjp attack`; may be repeated.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial weights and of everything else; 0 by default.")] = None,
    device: Annotated[str | None, typer.Option(help="auto (default), cpu or cuda.")] = None,
    gpus_per_client: Annotated[float | None, typer.Option(help="Such as 0.25; by default what fits.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for weights, history and state.")] = Path("results/simulate"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of going on.")] = False,
) -> None:
    """Train over clients of a federation on this machine; goes on where it was stopped."""
    from benchmarks.federation.training import (
        check_recordable,
        deal,
        partition_file,
        plan_for,
        rounds_done,
        train_federated,
    )
    from benchmarks.folder.output import claim_folder
    from fedmjp.cli.federated_progress import FederatedProgress
    from fedmjp.cli.overrides import merged
    from fedmjp.cli.progress import wide_console
    from fedmjp.overrides import overridden
    from fedmjp.scenario import Scenario
    from fedmjp.training.run_folder import TrainingFolder

    rounds_of = {"strategy": strategy, "rounds": rounds, "local_epochs": local_epochs, "participation": participation}
    dealing = _given({"scheme": scheme, "alpha": alpha})
    training = _given(rounds_of | {"records": uploads}) | {"partition": dealing}
    whole = {"data": data, "seed": seed, "device": device, "clients": clients, "defences": defences}
    given = {**_given(whole), "model": _given({"seed": seed}), "training": training}
    values: dict[str, Any] = {"model": {"name": "deit_small"}, "clients": CLIENTS, "training": {}}
    for layer in (_file(config_file), _row(row), given):
        values = merged(values, layer)
    values = overridden(values, settings or [])
    asked = Scenario.parse(_with_files(_with_defaults(values)))
    resources = _resources(asked, gpus_per_client)
    claim_folder(output)
    folder = TrainingFolder(output)
    folder.check_own()
    pictures, dealt = deal(asked)
    scenario = plan_for(asked, dealt)
    console = wide_console()
    done = 0 if fresh else rounds_done(scenario, folder)
    if done == scenario.rounds:
        console.print(f"All {scenario.rounds} rounds are done; --fresh starts over.")
        return
    if done:
        pictures, dealt = deal(scenario, partition_file(folder))
        folder.check_classes(pictures.train.class_names)
    check_recordable(scenario, dealt)
    if fresh:
        _clear(folder)  # only now: what is refused before leaves the former run as it is
    _describe(scenario, folder, pictures.train, dealt)
    if len(dealt.dropped):
        console.print(f"{len(dealt.dropped)} of {len(pictures.train)} pictures are with no client.")
    if not pictures.held_out:
        told = "has no validation split: Top-1 is measured on the pictures that the clients train on"
        console.print(f"{pictures.train.name} {told}.", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{resources.sentence()}.", highlight=False)
    if done:
        console.print(f"Going on after round {done} of {scenario.rounds}.")
    with FederatedProgress(console, done, scenario.rounds) as progress:
        train_federated(scenario, dealt, folder, resources, progress)
    _tell(scenario, folder, console)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, [])}


def _file(path: Path | None) -> dict[str, Any]:
    """The values of a YAML file, checked: options would silently take the place of a group that is none."""
    from fedmjp.cli.overrides import read_values
    from fedmjp.errors import ConfigError

    values = read_values(path)
    training = values.get("training", {})
    groups = {"training": training, "model": values.get("model", {})}
    if isinstance(training, dict):
        groups |= {f"training.{name}": training.get(name, {}) for name in ("partition", "puzzle", "recipe")}
    for name, value in groups.items():
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {name} = {value!r} is no group of keys; write its keys below it, indented")
    return values


def _row(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    from fedmjp.training.rows import row

    return row(name).values


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The paper's share of warm-up epochs: 20 are more than most federated runs have."""
    from fedmjp.cli.overrides import merged
    from fedmjp.learning import Training

    given = values["training"]
    if not isinstance(given, dict):
        return values  # refused when it is read
    epochs = [given.get(name, Training.model_fields[name].default) for name in ("rounds", "local_epochs")]
    if not all(isinstance(count, int) for count in epochs):
        return values
    defaults: dict[str, Any] = {"training": {"recipe": {"warmup_epochs": epochs[0] * epochs[1] * WARMUP // EPOCHS}}}
    return merged(defaults, values)


def _with_files(values: dict[str, Any]) -> dict[str, Any]:
    """Files by names that mean the same in every process, and what is in them; the device that there is."""
    from fedmjp.cli.device import choose
    from fedmjp.cli.overrides import with_checkpoint
    from fedmjp.cli.train import located

    data = values.get("data", "bundled")
    return {
        **values,
        "device": choose(str(values.get("device", "auto"))),
        "data": located(data) if isinstance(data, str) else data,
        "model": with_checkpoint(values["model"]),
    }


def _resources(scenario: "Scenario", gpus_per_client: float | None) -> "Resources":
    from benchmarks.federation.training import resources_for
    from fedmjp.models.build import build

    build(scenario.network)  # whatever is wrong with it is told now, not by the server
    return resources_for(scenario, gpus_per_client=gpus_per_client)


def _clear(folder: "TrainingFolder") -> None:
    import shutil

    from benchmarks.federation.training import partition_file, records_folder
    from server.refusals import RefusalFile

    folder.clear()
    for path in (partition_file(folder), folder.root / "partition.png", RefusalFile.of_run(folder.root).path):
        path.unlink(missing_ok=True)
    shutil.rmtree(records_folder(folder), ignore_errors=True)


def _describe(scenario: "Scenario", folder: "TrainingFolder", pictures: "LabelledDataset", dealt: "Partition") -> None:
    """What is known before training: the manifest, the classes, who has what. Pictures are named without folders."""
    from benchmarks.federation.training import partition_file
    from benchmarks.folder.output import write_json
    from fedmjp import provenance
    from fedmjp.cli.command_line import published_command
    from fedmjp.data.partition_figure import draw_partition
    from fedmjp.training.run_folder import published

    about = {"kind": "federated", "command": published_command(), "config": published(scenario)}
    write_json(folder.manifest, about | provenance.environment())
    folder.keep_classes(pictures.class_names)
    dealt.save(partition_file(folder))
    draw_partition(dealt, pictures.labels, folder.root / "partition.png")


def _tell(scenario: "Scenario", folder: "TrainingFolder", console: "Console") -> None:
    from benchmarks.federation.training import records_folder
    from fedmjp.wire import of_round
    from server.refusals import RefusalFile

    file = RefusalFile.of_run(folder.root)
    refused = file.read()
    for each in refused[:TOLD]:
        console.print(f"Refused: {each}", markup=False, highlight=False, soft_wrap=True)
    if len(refused) > TOLD:
        console.print(f"{len(refused)} replies were refused in all; see {file.path}.", markup=False)
    console.print(f"Written to {folder.root}: weights.safetensors, history.csv, history.png.", markup=False)
    for server_round in sorted(scenario.training.records if scenario.training else ()):
        recorded = of_round(records_folder(folder), server_round)
        console.print(f"Uploads of round {server_round}: {recorded}", markup=False, highlight=False)
