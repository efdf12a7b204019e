"""`fedmjp simulate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import (
    PICTURES,
    RUN,
    TRAINING,
    UPLOADS,
    ConfigFile,
    DefencesIfAny,
    DeviceIfAny,
    Fresh,
    Pictures,
    SeedIfAny,
    ServerIfAny,
    Settings,
)
from fedmjp.cli.options import output as output_option
from fedmjp.cli.overrides import merged, read_values
from fedmjp.cli.runs import given, require_apart, tell_held_out, values_of, with_files, with_warm_up, write_manifest

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.scenario import Scenario
    from fedmjp.training.run_folder import TrainingFolder

TOLD = 10  # refusals that are listed on the terminal
CLIENTS = 8


def simulate(
    settings: Settings = None,
    data: Pictures = None,
    config_file: ConfigFile = None,
    row: Annotated[
        str | None, typer.Option(help="A row of the paper, such as table4-J.", rich_help_panel=TRAINING)
    ] = None,
    defences: DefencesIfAny = None,
    clients: Annotated[
        int | None, typer.Option(help="Number of clients; 8 by default.", min=1, rich_help_panel=TRAINING)
    ] = None,
    scheme: Annotated[
        Literal["iid", "dirichlet", "pathological"] | None,
        typer.Option("--partition", help="How pictures are dealt.", rich_help_panel=PICTURES),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Of dirichlet; the smaller, the more unequal.", rich_help_panel=PICTURES),
    ] = None,
    strategy: Annotated[
        Literal["fedavg", "fedprox", "fedavgm", "fedadam", "fedsgd"] | None,
        typer.Option(help="fedavg by default.", rich_help_panel=TRAINING),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="10 by default.", min=1, rich_help_panel=TRAINING)] = None,
    local_epochs: Annotated[
        int | None, typer.Option(help="Of a client in a round; 1 by default.", min=1, rich_help_panel=TRAINING)
    ] = None,
    participation: Annotated[
        float | None, typer.Option(help="Share of the clients in a round.", max=1, rich_help_panel=TRAINING)
    ] = None,
    uploads: Annotated[
        list[int] | None,
        typer.Option(
            help="Record the uploads of this round; repeat it for several. `fedmjp attack` reads those of "
            "--strategy fedsgd, whose batches are then of one picture, whole and unmixed, unless you say otherwise.",
            min=1,
            metavar="ROUND",
            rich_help_panel=UPLOADS,
        ),
    ] = None,
    server: ServerIfAny = None,
    seed: SeedIfAny = None,
    device: DeviceIfAny = None,
    gpus_per_client: Annotated[
        float | None, typer.Option(help="Such as 0.25; by default what fits.", rich_help_panel=RUN)
    ] = None,
    output: Annotated[Path, output_option("Folder for weights, history and state.")] = Path("results/simulate"),
    fresh: Fresh = False,
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
    from fedmjp.cli.progress import FederatedProgress
    from fedmjp.data.partition_figure import draw_partition
    from fedmjp.extras import require
    from fedmjp.models.build import build
    from fedmjp.servers import SCOPE
    from fedmjp.training.run_folder import TrainingFolder, published

    require("training", "fedmjp simulate")
    rounds_of = {"strategy": strategy, "rounds": rounds, "local_epochs": local_epochs, "participation": participation}
    whole = {"data": data, "seed": seed, "device": device, "clients": clients, "defences": defences, "server": server}
    dealing = {"records": uploads, "partition": given({"scheme": scheme, "alpha": alpha})}
    named = given(whole | rounds_of | dealing) | {"model": given({"seed": seed})}
    defaults = {"model": {"name": "deit_small"}, "clients": CLIENTS}
    values = values_of(defaults, read_values(config_file), row, named, settings)
    asked = _read(with_files(_with_defaults(values)))
    require_apart(output, asked.data)
    model = build(asked.network)  # whatever is wrong with it is told now, not by the server
    if asked.server is not None:
        asked.require_server(model)
        tell(wide_console(), SCOPE)
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
    if asked.training and asked.training.records and asked.training.update != "gradient":
        caveat = "holds changes of weights, which no attack here reads: record with --strategy fedsgd to attack them"
        tell(console, f"What is recorded of {asked.training.strategy} {caveat}.")
    if done:
        console.print(f"Going on after round {done} of {scenario.rounds}.")
    with FederatedProgress(console, done, scenario.rounds) as progress:
        train_federated(scenario, dealt, folder, resources, progress.round, progress.skip)
    _tell_results(scenario, folder, console)


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """What follows from values where they do not say it: the warm-up, and a recipe that can be recorded."""
    from benchmarks.federation.training import AS_SHOWN
    from fedmjp.learning import Training

    rounds, local = (values.get(name, Training.model_fields[name].default) for name in ("rounds", "local_epochs"))
    if values.get("strategy") == "fedsgd" and values.get("records"):
        values = merged({"recipe": {**AS_SHOWN, "batch_size": 1}}, values)
    return with_warm_up(values, rounds * local if isinstance(rounds, int) and isinstance(local, int) else None)


def _read(values: dict[str, Any]) -> "Scenario":
    """The scenario of values, among which those of the training stand beside the others, as in `fedmjp train`."""
    from fedmjp.errors import ConfigError, suggestion
    from fedmjp.learning import Training
    from fedmjp.scenario import OF_BATCHES, Scenario

    ours = {name: value for name, value in values.items() if name not in Training.model_fields}
    known = [key for key in (*Training.keys(), *Scenario.keys()) if key not in ("training", *OF_BATCHES)]
    recipe = values.get("recipe")
    if isinstance(recipe, dict) and "epochs" in recipe:
        raise ConfigError("recipe.epochs is not of a federation: set rounds and local_epochs")
    for key in ours:
        if key not in known:
            raise ConfigError(f"unknown key {key!r}, {suggestion(key, known)}")
    training = {name: value for name, value in values.items() if name in Training.model_fields}
    return Scenario.parse({**ours, "training": Training.parse(training)})


def _tell_results(scenario: "Scenario", folder: "TrainingFolder", console: "Console") -> None:
    from fedmjp.wire import of_round
    from server.refusals import RefusalFile

    refused = RefusalFile(folder.refused).read()
    tell(console, *(f"Refused: {refusal}" for refusal in refused[:TOLD]))
    if len(refused) > TOLD:
        tell(console, f"{len(refused)} replies were refused in all; see {folder.refused}.")
    tell(console, f"Written to {folder.root}: weights.safetensors, history.csv, history.png.")
    for server_round in sorted(scenario.training.records if scenario.training else ()):
        tell(console, f"Uploads of round {server_round}: {of_round(folder.records, server_round)}")
