"""`fedmjp audit`."""

from pathlib import Path
from typing import Annotated

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import RUN
from fedmjp.cli.options import output as output_option
from fedmjp.cli.runs import require_apart


def audit(
    app_dir: Annotated[Path, typer.Argument(metavar="APP_DIR", help="A Flower app: the folder of its pyproject.toml.")],
    output: Annotated[Path, output_option("Folder for the report.")] = Path("results/audit"),
    stand_in: Annotated[
        bool,
        typer.Option(
            "--stand-in",
            help="Bundled pictures and drawn weights stand in for data sets and weights that are not on this machine.",
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(help="Rounds that are watched.", min=1, max=100)] = 2,
    clients: Annotated[
        int | None,
        typer.Option(help="Number of clients; without it two, or as many as the app waits for.", min=1, max=1000),
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Of the app's run config, or a TOML file of it, as of `flwr run`; repeat it.",
            rich_help_panel=RUN,
        ),
    ] = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Of every client's node config, as of a SuperNode; repeat it.",
            rich_help_panel=RUN,
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(help="Seconds, after which the app is stopped.", min=1, rich_help_panel=RUN)
    ] = 900.0,
) -> None:
    """Run a Flower app as it stands, attack what it sends, and say what it gives away.

    Exit code 0: the policy holds. 1: something leaks against it. 2: the app could not be run, or attacks on pictures do
    not work on its network, so that nobody can tell.
    """
    from fedmjp.benchmarks.audit.audit import audit as audited
    from fedmjp.benchmarks.audit.report import write_report
    from fedmjp.benchmarks.audit.running import RunOptions
    from fedmjp.benchmarks.audit.verdict import exit_code, first_line, verdict
    from fedmjp.benchmarks.folder.output import claim_folder
    from fedmjp.cli.runs import published_command

    console = wide_console()
    require_apart(output, str(app_dir))
    claim_folder(output)
    findings = audited(
        app_dir,
        stand_in=stand_in,
        rounds=rounds,
        options=RunOptions(time_limit, clients, run_config or (), node_config or ()),
        on_stage=lambda said: tell(console, f"{said} ..."),
    )
    write_report(findings, output, command=published_command())
    tell(console, first_line(findings.report), *verdict(findings.report))
    tell(console, f"Written to {output}: report.html (open it in a browser), summary.html, report.json.")
    raise typer.Exit(exit_code(findings.report))
