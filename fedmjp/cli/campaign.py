"""`fedmjp campaign`: run, status, verify, publish."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmjp.cli.campaign_options import Database, File, Folder, Overrides, Weights, prepared_of
from fedmjp.cli.campaign_run import run_prepared
from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import RUN, Arithmetic, Device, Fresh, examples
from fedmjp.cli.options import output as output_option
from fedmjp.cli.runs import require_apart

if TYPE_CHECKING:
    from fedmjp.benchmarks.running.verify import Verification

campaign = typer.Typer(help="Many cells on many pictures, from one file.", no_args_is_help=True)
FAILED = 1


@campaign.command(
    epilog=examples(
        "fedmjp campaign run campaign.yaml --output results/mine",
        "fedmjp campaign run campaign.yaml --dry",
        "fedmjp campaign run campaign.yaml data.pictures=20 grids.0.settings=[a,c]",
    )
)
def run(
    file: File,
    overrides: Overrides = [],
    weights: Weights = [],
    output: Annotated[Path | None, output_option("Folder for results; results/campaign-NAME if not given.")] = None,
    database: Database = "",
    workers: Annotated[
        int, typer.Option(help="Processes; 0 means one per GPU, or one on CPU.", min=0, rich_help_panel=RUN)
    ] = 0,
    ray: Annotated[
        str, typer.Option(help="Address of a running Ray cluster that does the work.", rich_help_panel=RUN)
    ] = "",
    device: Device = "auto",
    arithmetic: Arithmetic = "float32",
    fresh: Fresh = False,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry", help="Say what it consists of and what cannot run here; run nothing.", rich_help_panel=RUN
        ),
    ] = False,
) -> None:
    """Run what is missing of a campaign, and report."""
    prepared = prepared_of(file, overrides, weights, device, arithmetic)
    if dry:
        from fedmjp.cli.campaign_tables import print_plan

        print_plan(prepared, wide_console())
        return
    root = output or Path("results") / f"campaign-{prepared.campaign.name}"
    require_apart(root, prepared.campaign.data.source)
    run_prepared(prepared, root, database=database, workers=workers, ray=ray, fresh=fresh)


@campaign.command(epilog=examples("fedmjp campaign status results/mine"))
def status(folder: Folder, database: Database = "") -> None:
    """Say how far a campaign is, while it runs or after."""
    from fedmjp.benchmarks.folder.output import OutputFolder
    from fedmjp.benchmarks.folder.study import open_results
    from fedmjp.benchmarks.running.status import status as status_of
    from fedmjp.claims import is_claimed_elsewhere
    from fedmjp.cli.campaign_tables import print_status

    output = OutputFolder(folder)
    plan, store = open_results(output, database)
    print_status(plan, status_of(plan, store), wide_console(), in_work=is_claimed_elsewhere(folder))


@campaign.command(
    epilog=examples(
        "fedmjp campaign verify results/mine", "fedmjp campaign verify results/mine --rerun 3 --file campaign.yaml"
    )
)
def verify(
    folder: Folder,
    rerun: Annotated[
        int, typer.Option(help="Run so many trials again and compare every score.", min=0, rich_help_panel=RUN)
    ] = 0,
    file: Annotated[Path | None, typer.Option(help="The campaign's file, for --rerun.", rich_help_panel=RUN)] = None,
    overrides: Overrides = [],
    weights: Weights = [],
    device: Device = "auto",
    arithmetic: Arithmetic = "float32",
    database: Database = "",
) -> None:
    """Check that rows, pictures, scores and table agree; with --rerun, that trials repeat."""
    from fedmjp.benchmarks.folder.output import OutputFolder
    from fedmjp.benchmarks.folder.study import holds_plan, holds_study, open_results, problems_of_rows
    from fedmjp.benchmarks.report.render import board_in
    from fedmjp.benchmarks.running import verify as checks
    from fedmjp.errors import BadInputError

    if rerun and file is None:
        raise BadInputError("--rerun needs the pictures: name the campaign's file with --file, and its overrides")
    output = OutputFolder(folder)
    if holds_study(folder) and not holds_plan(folder):
        _tell_verification(checks.Verification(problems_of_rows(folder), [], ["rows against the manifest"]))
        return
    plan, store = open_results(output, database)
    verification = checks.verify(output, plan, store)
    board = board_in(plan, store, folder).model_dump(mode="json")
    verification.problems += checks.compare_with_published(folder, board, rendered=not holds_study(folder))
    if rerun and file is not None:
        repetition = checks.repeat(prepared_of(file, overrides, weights, device, arithmetic), plan, store, rerun)
        verification.problems += repetition.problems
        verification.checked += repetition.checked
    _tell_verification(verification)


@campaign.command(epilog=examples("fedmjp campaign publish results/mine studies/mine"))
def publish(
    folder: Folder,
    study: Annotated[Path, typer.Argument(help="Folder that the study goes to.", show_default=False)],
    database: Database = "",
) -> None:
    """Keep of a run what others need: its trials in one file, and the manifest. All else can be made of them."""
    from fedmjp.benchmarks.folder.output import OutputFolder, write_json
    from fedmjp.benchmarks.folder.study import TRIALS, open_results, read_study, require_study, write_study
    from fedmjp.benchmarks.report.render import board_in

    plan, store = open_results(OutputFolder(folder), database)
    require_study(study, plan.about["name"])
    study.mkdir(parents=True, exist_ok=True)
    write_study(study / TRIALS, plan, store)
    write_json(study / "manifest.json", board_in(*read_study(study), study).about)
    written = f"Written to {study}: {TRIALS}, manifest.json. `fedmjp leaderboard {study}` makes the tables."
    tell(wide_console(), written)


def _tell_verification(verification: "Verification") -> None:

    console = wide_console()
    tell(console, *(f"Checked: {line}" for line in verification.checked))
    tell(console, *(f"Not as when it ran: {line}" for line in verification.differences), style="yellow")
    tell(console, *(f"Wrong: {line}" for line in verification.problems), style="bold red")
    if verification.problems:
        raise typer.Exit(FAILED)
    console.print("Nothing contradicts the results.", style="bold green")
