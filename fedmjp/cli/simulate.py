"""`fedmjp simulate`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.federated import DEFAULTS, read_scenario, tell_results, with_defaults
from fedmjp.cli.options import (
    PICTURES,
    RUN,
    TRAINING,
    UPLOADS,
    ArithmeticIfAny,
    ConfigFile,
    DefencesIfAny,
    DeviceIfAny,
    Fresh,
    Pictures,
    SeedIfAny,
    ServerIfAny,
    Settings,
    StrategyIfAny,
)
from fedmjp.cli.options import output as output_option
from fedmjp.cli.overrides import read_values
from fedmjp.cli.runs import given, require_apart, tell_held_out, values_of, with_files, write_manifest

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
    strategy: StrategyIfAny = None,
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
    arithmetic: ArithmeticIfAny = None,
    gpus_per_client: Annotated[
        float | None, typer.Option(help="Such as 0.25; by default what fits.", rich_help_panel=RUN)
    ] = None,
    output: Annotated[Path, output_option("Folder for weights, history and state.")] = Path("results/simulate"),
    fresh: Fresh = False,
) -> None:
    """Train over clients of a federation on this machine; goes on where it was stopped."""
    from fedmjp.benchmarks.federation.resources import resources_for
    from fedmjp.benchmarks.federation.training import (
        check_recordable,
        deal,
        plan_for,
        require_public,
        rounds_done,
        train_federated,
    )
    from fedmjp.claims import claim_folder, watched_folder
    from fedmjp.cli.progress import FederatedProgress
    from fedmjp.data.partition_figure import draw_partition
    from fedmjp.extras import require
    from fedmjp.models.build import build
    from fedmjp.threat import SCOPE
    from fedmjp.training.run_folder import TrainingFolder

    require("training", "fedmjp simulate")
    rounds_of = {"strategy": strategy, "rounds": rounds, "local_epochs": local_epochs, "participation": participation}
    whole = {"data": data, "seed": seed, "device": device, "clients": clients, "defences": defences, "server": server}
    dealing = {"records": uploads, "partition": given({"scheme": scheme, "alpha": alpha})}
    values_by_option = given(whole | rounds_of | dealing) | {"model": given({"seed": seed})}
    values_by_option |= given({"recipe": given({"precision": arithmetic})})
    defaults = {**DEFAULTS, "clients": CLIENTS}
    values = values_of(defaults, read_values(config_file), row, values_by_option, settings)
    requested = read_scenario(with_files(with_defaults(values)))
    require_apart(output, requested.data)
    require_public(requested)
    model = build(requested.network)  # whatever is wrong with it is told now, not by the server
    if requested.server is not None:
        requested.require_server(model)
        tell(wide_console(), SCOPE)
    resources = resources_for(requested, gpus_per_client=gpus_per_client)
    claim_folder(output)
    folder = TrainingFolder(output)
    folder.check_own()
    pictures, dealt = deal(requested)
    scenario = plan_for(requested, dealt)
    console = wide_console()
    rounds_before = 0 if fresh else rounds_done(scenario, folder)
    if rounds_before:
        folder.check_classes(pictures.train.class_names)
        folder.check_pictures(pictures.digest())
    if rounds_before == scenario.rounds:
        console.print(f"All {scenario.rounds} rounds are done; --fresh starts over.")
        return
    if rounds_before:
        pictures, dealt = deal(scenario, folder.partition)
    check_recordable(scenario, dealt)
    if fresh:
        folder.clear()  # only now: what is refused before leaves the former run as it is
    write_manifest(folder.manifest, "federated", config=scenario.published(), pictures=pictures.digest())
    folder.keep_classes(pictures.train.class_names)
    dealt.save(folder.partition)
    draw_partition(dealt, pictures.train.labels, folder.partition_figure)
    if len(dealt.dropped):
        console.print(f"{len(dealt.dropped)} of {len(pictures.train)} pictures are with no client.")
    tell_held_out(pictures, "the clients train on", console)
    tell(console, f"{resources.sentence()}.")
    if requested.training.records and requested.training.update != "gradient":
        caveat = "holds changes of weights, which no attack here reads: record with --strategy fedsgd to attack them"
        tell(console, f"What is recorded of {requested.training.strategy} {caveat}.")
    if rounds_before:
        console.print(f"Going on after round {rounds_before} of {scenario.rounds}.")
    gone = watched_folder(output, "the rounds since are lost: run the same command again")
    with gone, FederatedProgress(console, rounds_before, scenario.rounds) as progress:
        train_federated(scenario, dealt, folder, resources, progress.round, progress.skip, progress.again)
    tell_results(scenario, folder, console)
