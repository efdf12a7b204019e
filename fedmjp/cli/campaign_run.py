"""Running a campaign that is prepared, as `fedmjp campaign run` and `fedmjp benchmark` do."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.outcome import tell_outcome

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.benchmarks.campaign.prepare import Prepared
    from fedmjp.benchmarks.folder.output import OutputFolder

MOST_REASONS = 8  # why something of a battery is not run, each with a line


def run_prepared(
    prepared: "Prepared", root: Path, *, database: str = "", workers: int = 0, ray: str = "", fresh: bool
) -> None:
    """Run what a folder lacks of a campaign, and report.

    Args:
        prepared: The campaign.
        root: Folder of the results.
        database: URL of a PostgreSQL server that takes the trials in place of a file.
        workers: Processes; 0 means one per GPU, or one on CPU.
        ray: Address of a running Ray cluster.
        fresh: Forget what a former run left.

    Raises:
        BadInputError: If options contradict each other, or what the folder holds.
        OutputGoneError: If the folder went away during the run.
    """
    from fedmjp.benchmarks.folder.output import OutputFolder
    from fedmjp.benchmarks.report.render import render
    from fedmjp.benchmarks.running.outdated import describe_outdated
    from fedmjp.benchmarks.running.rescue import rescuing
    from fedmjp.benchmarks.running.runner import run_campaign
    from fedmjp.cli.progress import TerminalProgress
    from fedmjp.errors import BadInputError

    console, read = wide_console(), prepared.campaign
    folder = OutputFolder(root)
    if ray and workers:
        raise BadInputError("--workers are of this machine, and --ray brings its own: leave one of them out")
    if fresh and database:
        raise BadInputError("--fresh forgets the trials of a folder, not those of a --database; empty that yourself")
    if not fresh:
        require_campaign(folder, read.name)
    store = folder.store(database) if database else None  # a wrong one is told before the folder is made
    folder.prepare(fresh=fresh)
    store = store or folder.store()
    finished = len(store.finished([trial.key for trial in prepared.plan.tasks]))
    _tell_beginning(prepared, finished, folder.root, console)
    if finished < len(prepared.plan.trials) and (outdated := describe_outdated(prepared.plan, store)):
        tell(console, outdated, style="yellow")
    prepared.plan.save(folder.root)
    with rescuing(folder, prepared.plan, store):
        with TerminalProgress(console) as progress:
            waiting = run_campaign(prepared, folder, progress, database=database, workers=workers, ray=ray)
        failed = render(prepared.plan, store, folder, console)
    if waiting:
        console.print(f"The budget of {read.budget.hours:g} h is spent; {waiting} trials wait for the next run.")
    tell_outcome(failed, folder.root, console)


def require_campaign(output: "OutputFolder", name: str) -> None:
    """Require that a folder holds no other campaign.

    Args:
        output: The folder.
        name: Of the campaign.
    """
    from fedmjp.benchmarks.plan.trial_plan import ABOUT, TrialPlan
    from fedmjp.errors import OutputError

    if not (output.root / ABOUT).exists():
        return
    former = TrialPlan.load(output.root).about["name"]
    if former != name:
        raise OutputError(
            f"{output.root} holds the campaign {former!r}, this one is {name!r}; name another --output, or --fresh"
        )


def _tell_beginning(prepared: "Prepared", finished: int, folder: Path, console: "Console") -> None:
    cells = prepared.plan.cells
    refused = sum(planned.refusal is not None for planned in cells)
    tell(
        console,
        *(f"Skipped: {reason}" for reason in prepared.selection.skipped),
        *not_run(prepared.campaign.not_run),
        f"{prepared.campaign.name}: {len(cells)} cells ({refused} refused), {prepared.campaign.data.count} pictures, "
        f"{finished} of {len(prepared.plan.trials)} trials are finished; to {folder}.",
    )


def not_run(reasons: Sequence[str]) -> list[str]:
    """Say what of a battery is not run; of many reasons how many there are, and one.

    Args:
        reasons: One per view of a row.
    """
    if len(reasons) <= MOST_REASONS:
        return [f"Not run: {reason}" for reason in reasons]
    return [f"Not run in {len(reasons)} views of rows, of which the board's notes say why. The first: {reasons[0]}"]
