"""`fedmjp audit`."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import RUN
from fedmjp.cli.options import output as output_option
from fedmjp.cli.runs import require_apart
from fedmjp.errors import AppError, BadInputError, FedmjpError

CRASH = "audit-failed.log"


def audit(
    app_dir: Annotated[Path, typer.Argument(metavar="APP_DIR", help="A Flower app: the folder of its pyproject.toml.")],
    output: Annotated[Path, output_option("Folder for the report.")] = Path("results/audit"),
    stand_in: Annotated[
        bool,
        typer.Option(
            "--stand-in",
            help="Bundled pictures and drawn weights stand in for data sets and weights that are not on this machine.",
            rich_help_panel=RUN,
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(help="Rounds that are watched.", min=1, max=100, rich_help_panel=RUN)] = 2,
    clients: Annotated[
        int | None,
        typer.Option(
            help="Number of clients; without it two, or as many as the app waits for.",
            min=1,
            max=1000,
            rich_help_panel=RUN,
        ),
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
    sandbox: Annotated[
        bool | None,
        typer.Option(
            "--sandbox/--no-sandbox",
            help="Run it in bubblewrap: no network, your files read-only. Without either, where bwrap works.",
            show_default=False,
            rich_help_panel=RUN,
        ),
    ] = None,
) -> None:
    """Run a Flower app as it stands, attack what it sends, and say what it gives away.

    The app's code runs on this machine: in a sandbox where bubblewrap works; elsewhere, and with --no-sandbox, it runs
    unsandboxed, with your rights: it can read, change and send whatever you can.

    Exit code 0: the policy holds against an honest server. 1: something leaks against it. 2: nobody can tell, since the
    app or the audit failed, or attacks cannot read its updates or its network. The last lines say it of both servers.
    """
    from fedmjp.benchmarks.audit.audit import audit as audit_outside
    from fedmjp.benchmarks.audit.report import write_report
    from fedmjp.benchmarks.audit.running import RunOptions
    from fedmjp.benchmarks.audit.sandbox import audit_inside, describe
    from fedmjp.benchmarks.audit.verdict import answers, exit_code, first_line, verdict
    from fedmjp.benchmarks.audit.walls import find_obstacle
    from fedmjp.claims import claim_folder
    from fedmjp.cli.runs import published_command

    console = wide_console()
    require_apart(output, str(app_dir))
    claim_folder(output)
    obstacle = "--no-sandbox" if sandbox is False else find_obstacle()
    if sandbox and obstacle is not None:
        raise AppError(f"--sandbox: {obstacle}; install it, or let the app run with your rights by --no-sandbox")
    with _failing_in_one_line(output / CRASH):
        description = describe(obstacle)
        tell(console, description["said"])
        findings = (audit_inside if obstacle is None else audit_outside)(
            app_dir,
            stand_in=stand_in,
            rounds=rounds,
            options=RunOptions(time_limit, clients, run_config or (), node_config or ()),
            on_stage=lambda sentence: tell(console, f"{sentence} ..."),
        )
        findings.report |= {"sandbox": description, "run_config": list(run_config or ())}
        findings.report["not_tested"].append(description["limit"])
        write_report(findings, output, command=published_command())
        tell(console, first_line(findings.report))
        tell(console, *(f"{question} {answer}. {sentence}" for question, answer, sentence in answers(findings.report)))
        honest, cheating, *further = verdict(findings.report)
        tell(console, *further)
        tell(console, f"Written to {output}: report.html (open it in a browser), summary.html, report.json.")
        tell(console, honest, cheating)
    raise typer.Exit(exit_code(findings.report))


@contextmanager
def _failing_in_one_line(file: Path) -> Iterator[None]:
    """End with exit code 2 and one line, whatever fails: 1 is the code of an app that leaks.

    Raises:
        AppError: With what failed; the traceback of a failure of the audit itself is in the file.
    """
    file.unlink(missing_ok=True)
    try:
        yield
    except (BadInputError, OSError):
        raise
    except FedmjpError as error:
        raise AppError(str(error)) from error
    except Exception as error:
        file.write_text(traceback.format_exc(), encoding="utf-8")
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise AppError(
            f"the audit itself failed, which says nothing of the app ({type(error).__name__}: {first}): "
            f"please report {file}"
        ) from error
