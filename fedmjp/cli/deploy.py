"""`fedmjp deploy`: init, superlink, superexec, node, deal, run, stop, check."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.federated import DEFAULTS, read_scenario, tell_results, with_defaults
from fedmjp.cli.keys import DEPLOYED
from fedmjp.cli.options import (
    PICTURES,
    TRAINING,
    ArithmeticIfAny,
    ConfigFile,
    DefencesIfAny,
    DeviceIfAny,
    Fresh,
    SeedIfAny,
    Settings,
    StrategyIfAny,
    examples,
)
from fedmjp.cli.options import output as output_option
from fedmjp.cli.overrides import read_values
from fedmjp.cli.runs import given, require_apart, values_of, with_files, write_manifest

deploy = typer.Typer(
    no_args_is_help=True, help="A federation of real sites: TLS, node keys, gates, and what must fail."
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="What `fedmjp deploy init` made.", show_default=False)]
NOT_REFUSED = 1


@deploy.command(epilog=examples("fedmjp deploy init hospital --sites north,south --host fl.example.org"))
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    sites: Annotated[str, typer.Option(help="Names of the sites, such as north,south.", metavar="NAMES")],
    host: Annotated[str, typer.Option(help="Name or address by which sites reach the server.")] = "localhost",
    port: Annotated[int, typer.Option(help="That sites reach.")] = 8443,
    inside: Annotated[int, typer.Option(help="Of the SuperLink, on the server's loopback alone.")] = 8000,
) -> None:
    """Make authority, server certificate, node keys and policies; nothing secret is readable by others."""
    from fedmjp.benchmarks.deployment.creating import create, state_folder
    from fedmjp.benchmarks.deployment.layout import DeploymentConfig

    names = [name.strip() for name in sites.split(",")]
    values = {"sites": names, "host": host, "port": port, "inside": inside, "state": state_folder()}
    config = DeploymentConfig.parse(values)
    deployment = create(folder, config)
    console = wide_console()
    tell(console, f"Made {folder}. Carry each of these folders to its site, and take it away from here:")
    tell(console, *(f"  {deployment.site(name).root}" for name in config.sites))
    tell(
        console,
        f"Take {deployment.authority_key} offline. Start the server by either of these:",
        f"  systemctl enable --now {deployment.units}/*.service",
        f"  docker compose up --detach, in {deployment.containers}, or kubectl apply -f kubernetes.yaml",
        f"From outside {config.address} answers nodes with a registered key ({', '.join(config.sites)}) alone.",
        f"On the server 127.0.0.1:{config.inside} lets every account start runs: Flower has no login there.",
        f"Uploads pass in clear through {config.state} until a run ends.",
    )


@deploy.command(epilog=examples("fedmjp deploy superlink hospital"))
def superlink(folder: Folder) -> None:
    """Run the server's SuperLink on its loopback, as the units and containers do that `init` wrote."""
    from fedmjp.benchmarks.deployment.layout import Deployment
    from fedmjp.benchmarks.deployment.server import run_superlink

    run_superlink(Deployment(folder))


@deploy.command(epilog=examples("fedmjp deploy superexec hospital"))
def superexec(folder: Folder) -> None:
    """Run what starts the server's part of runs, as the units and containers do that `init` wrote."""
    from fedmjp.benchmarks.deployment.layout import Deployment
    from fedmjp.benchmarks.deployment.server import run_superexec

    run_superexec(Deployment(folder))


@deploy.command(epilog=examples("fedmjp deploy node hospital/sites/north --data pictures"))
def node(
    folder: Annotated[
        Path, typer.Argument(metavar="SITE_FOLDER", help="What was carried to this site.", show_default=False)
    ],
    data: Annotated[
        str | None, typer.Option(help="Folder of CLASS/picture files; by default as site.yaml says.", metavar="DIR")
    ] = None,
) -> None:
    """Run a site's SuperNode behind its upload gate, with pictures that stay here."""
    from fedmjp.benchmarks.deployment.layout import SiteFolder
    from fedmjp.benchmarks.deployment.node import run_node

    run_node(SiteFolder(folder), data)


@deploy.command(epilog=examples("fedmjp deploy deal hospital --data FOLDER --output pictures --partition dirichlet"))
def deal(
    folder: Folder,
    data: Annotated[
        str, typer.Option(help="Pictures with a validation split: a folder or hub:OWNER/NAME.", metavar="DIR")
    ],
    output: Annotated[Path, typer.Option(help="A new folder, in which each site gets one.", metavar="DIR")],
    scheme: Annotated[
        Literal["iid", "dirichlet", "pathological"], typer.Option("--partition", help="How pictures are dealt.")
    ] = "iid",
    alpha: Annotated[float, typer.Option(help="Of dirichlet; the smaller, the more unequal.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Of the draw.", min=0)] = 0,
) -> None:
    """Deal a data set to the sites, for trials: `deploy node --data` and `deploy run --classes` take the folders."""
    from fedmjp.benchmarks.deployment.dealing import deal_to_sites
    from fedmjp.benchmarks.deployment.layout import Deployment
    from fedmjp.learning import PartitionConfig

    sites = Deployment(folder).config().sites
    config = PartitionConfig.parse({"scheme": scheme, "alpha": alpha})
    for dealt in deal_to_sites(data, output, sites, config, seed):
        counted = f"{dealt.training} pictures of {dealt.classes} classes, {dealt.validation} for validation"
        tell(wide_console(), f"{output / dealt.site}: {counted}")


@deploy.command(
    epilog=examples(
        "fedmjp deploy run hospital --data validation --defence mjp --rounds 10",
        "fedmjp deploy run hospital --classes benign,malignant",
        keys=DEPLOYED,
    )
)
def run(
    folder: Folder,
    settings: Settings = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Public pictures that the server measures Top-1 on; 'bundled' by default.",
            metavar="DIR",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="In place of --data: the classes in the order of their labels. Sites then measure Top-1 on validation "
            "pictures of their own.",
            metavar="NAMES",
            rich_help_panel=PICTURES,
        ),
    ] = None,
    config_file: ConfigFile = None,
    row: Annotated[
        str | None, typer.Option(help="A row of the paper, such as table4-J.", rich_help_panel=TRAINING)
    ] = None,
    defences: DefencesIfAny = None,
    strategy: StrategyIfAny = None,
    rounds: Annotated[int | None, typer.Option(help="10 by default.", min=1, rich_help_panel=TRAINING)] = None,
    local_epochs: Annotated[
        int | None, typer.Option(help="Of a site in a round; 1 by default.", min=1, rich_help_panel=TRAINING)
    ] = None,
    seed: SeedIfAny = None,
    device: DeviceIfAny = None,
    arithmetic: ArithmeticIfAny = None,
    output: Annotated[Path, output_option("Folder for weights, history and state.")] = Path("results/deployment"),
    fresh: Fresh = False,
) -> None:
    """Train over the sites, on their own pictures; goes on where it was stopped."""
    from fedmjp.benchmarks.deployment.access import require_idle
    from fedmjp.benchmarks.deployment.layout import Deployment
    from fedmjp.benchmarks.deployment.training import at_sites, class_list, train_at_sites
    from fedmjp.benchmarks.federation.training import rounds_done
    from fedmjp.claims import claim_folder, watched_folder
    from fedmjp.cli.progress import FederatedProgress
    from fedmjp.data.datasets import open_dataset
    from fedmjp.extras import require
    from fedmjp.models.build import build
    from fedmjp.training.run_folder import TrainingFolder

    require("training", "fedmjp deploy run")
    deployment = Deployment(folder)
    clients = len(deployment.config().sites)
    rounds_of = {"strategy": strategy, "rounds": rounds, "local_epochs": local_epochs}
    options: dict[str, Any] = given({"data": data, "seed": seed, "device": device, "defences": defences} | rounds_of)
    names = None if classes is None else class_list(classes)
    options |= {"model": given({"seed": seed, "classes": names and len(names)}), "clients": clients}
    options |= given({"validation": names and "sites"})
    options |= given({"recipe": given({"precision": arithmetic})})
    values = values_of(DEFAULTS, read_values(config_file), row, options, settings)
    scenario = at_sites(read_scenario(with_files(with_defaults(values))), clients, names)
    require_apart(output, scenario.data)
    build(scenario.network)  # whatever is wrong with it is told now, not by the server
    require_idle(deployment)
    claim_folder(output)
    results = TrainingFolder(output)
    results.check_own()
    console = wide_console()
    finished_rounds = 0 if fresh else rounds_done(scenario, results)
    digest = None
    if names is None:
        validation = open_dataset(scenario.data, "validation", classes=scenario.model.classes)
        names, digest = list(validation.class_names), validation.digest()
    if finished_rounds:
        results.check_classes(names)
        results.check_pictures(digest)
    if finished_rounds == scenario.rounds:
        console.print(f"All {scenario.rounds} rounds are done; --fresh starts over.")
        return
    if finished_rounds:
        console.print(f"Going on after round {finished_rounds} of {scenario.rounds}.")
    if fresh:
        results.clear()
    write_manifest(results.manifest, "federated", config=scenario.published(), pictures=digest)
    results.keep_classes(names)
    gone = watched_folder(output, "the rounds since are lost: run the same command again")
    with gone, FederatedProgress(console, finished_rounds, scenario.rounds) as progress:
        train_at_sites(scenario, results, deployment, names, progress.round, progress.skip, progress.again)
    tell_results(scenario, results, console)


@deploy.command(epilog=examples("fedmjp deploy stop hospital 1234567890123456789"))
def stop(
    folder: Folder,
    run_id: Annotated[int, typer.Argument(metavar="RUN_ID", help="Of a run in progress.", show_default=False)],
) -> None:
    """Stop one run, whoever started it; `deploy run` goes on with it after its last whole round."""
    from fedmjp.benchmarks.deployment.layout import Deployment
    from fedmjp.benchmarks.deployment.training import stop_run

    stop_run(Deployment(folder), run_id)
    tell(wide_console(), f"Stopped run {run_id}; its messages are wiped from the server.")


@deploy.command(epilog=examples("fedmjp deploy check hospital"))
def check(folder: Folder) -> None:
    """Try what must fail, and tell what became of each; exit code 1 unless everything was tried and refused.

    What open Flower cannot refuse is told as open, and does not count.
    """
    from fedmjp.benchmarks.deployment.checking import check as checked
    from fedmjp.benchmarks.deployment.layout import Deployment

    console = wide_console()
    if not checked(Deployment(folder), lambda intrusion: tell(console, intrusion.line)):
        raise typer.Exit(NOT_REFUSED)
