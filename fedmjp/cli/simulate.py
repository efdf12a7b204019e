"""`fedmjp simulate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.overrides import DEFENCE_HELP, merged, read_values
from fedmjp.cli.progress import FederatedProgress
from fedmjp.cli.runs import given, tell_held_out, values_of, with_files, write_manifest

if TYPE_CHECKING:
    from rich.console import Console

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
        plan_for,
        resources_for,
        rounds_done,
        train_federated,
    )
    from benchmarks.folder.output import claim_folder
    from fedmjp.data.partition_figure import draw_partition
    from fedmjp.extras import require
    from fedmjp.models.build import build
    from fedmjp.scenario import Scenario
    from fedmjp.training.run_folder import TrainingFolder, published

    require("training", "fedmjp simulate")
    rounds_of = {"strategy": strategy, "rounds": rounds, "local_epochs": local_epochs, "participation": participation}
    training = rounds_of | {"records": uploads, "partition": given({"scheme": scheme, "alpha": alpha})}
    whole = {"data": data, "seed": seed, "device": device, "clients": clients, "defences": defences}
    named = given(whole) | {"model": given({"seed": seed}), "training": given(training)}
    defaults = {"model": {"name": "deit_small"}, "clients": CLIENTS, "training": {}}
    values = values_of(defaults, _file(config_file), row, named, settings)
    asked = Scenario.parse(with_files(_with_warm_up(values)))
    build(asked.network)  # whatever is wrong with it is told now, not by the server
    resources = resources_for(asked, gpus_per_client=gpus_per_client)
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
        pictures, dealt = deal(scenario, folder.partition)
        folder.check_classes(pictures.train.class_names)
    check_recordable(scenario, dealt)
    if fresh:
        folder.clear()  # only now: what is refused before leaves the former run as it is
    write_manifest(folder.manifest, "federated", config=published(scenario))
    folder.keep_classes(pictures.train.class_names)
    dealt.save(folder.partition)
    draw_partition(dealt, pictures.train.labels, folder.partition_figure)
    if len(dealt.dropped):
        console.print(f"{len(dealt.dropped)} of {len(pictures.train)} pictures are with no client.")
    tell_held_out(pictures, "the clients train on", console)
    tell(console, f"{resources.sentence()}.")
    if done:
        console.print(f"Going on after round {done} of {scenario.rounds}.")
    with FederatedProgress(console, done, scenario.rounds) as progress:
        train_federated(scenario, dealt, folder, resources, progress.round, progress.skip)
    _tell_results(scenario, folder, console)


def _file(path: Path | None) -> dict[str, Any]:
    """The values of a YAML file, checked: options would silently take the place of a group that is none."""
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


def _with_warm_up(values: dict[str, Any]) -> dict[str, Any]:
    """The paper's share of warm-up epochs: 20 are more than most federated runs have."""
    from fedmjp.learning import Training

    training = values["training"]
    if not isinstance(training, dict):
        return values  # refused when it is read
    rounds, local = (training.get(name, Training.model_fields[name].default) for name in ("rounds", "local_epochs"))
    if not isinstance(rounds, int) or not isinstance(local, int):
        return values
    return merged({"training": {"recipe": {"warmup_epochs": rounds * local * WARMUP // EPOCHS}}}, values)


def _tell_results(scenario: "Scenario", folder: "TrainingFolder", console: "Console") -> None:
    from fedmjp.wire import of_round
    from server.refusals import RefusalFile

    refused = RefusalFile(folder.refused).read()
    tell(console, *(f"Refused: {each}" for each in refused[:TOLD]))
    if len(refused) > TOLD:
        tell(console, f"{len(refused)} replies were refused in all; see {folder.refused}.")
    tell(console, f"Written to {folder.root}: weights.safetensors, history.csv, history.png.")
    for server_round in sorted(scenario.training.records if scenario.training else ()):
        tell(console, f"Uploads of round {server_round}: {of_round(folder.records, server_round)}")
