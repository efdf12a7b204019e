"""What `fedmjp campaign run --dry` and `status` print."""

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmjp.cli.console import duration, tell

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.benchmarks.campaign.prepare import Prepared
    from fedmjp.benchmarks.plan.trial_plan import TrialPlan
    from fedmjp.benchmarks.running.status import CampaignStatus


def print_plan(prepared: "Prepared", console: "Console") -> None:
    """Print cells, trials, and what cannot run on this machine and why.

    Args:
        prepared: The campaign.
        console: The terminal.
    """
    cells, trials = prepared.plan.cells, len(prepared.plan.trials)
    data, hours = prepared.campaign.data, prepared.campaign.budget.hours
    refused = sum(cell.refusal is not None for cell in cells)
    tell(
        console,
        f"{prepared.campaign.name}: {len(cells)} cells ({refused} refused), {trials} trials, "
        f"{data.count} pictures from {data.label}.",
        *([f"The budget is {hours:g} h; what is left then waits for the next run."] if hours else []),
        *(f"- {reason}" for reason in _hindrances(prepared)),
    )


def _hindrances(prepared: "Prepared") -> list[str]:
    """List what of a campaign cannot run on this machine, and why."""
    from fedmjp.metrics import metric

    refused = Counter(
        f"{cell.attack} on {cell.model}, {cell.defence}: refused, {cell.refusal}"
        for cell in prepared.plan.cells
        if cell.refusal
    )
    reasons = [f"{refusal} ({count} cells)" for refusal, count in refused.items()]
    left_out = {cell.attack: cell.left_out for cell in prepared.plan.cells if cell.left_out}
    reasons += [
        f"{attack}: {count} pictures are left out, its prior was made of them" for attack, count in left_out.items()
    ]
    for name in prepared.campaign.metrics:
        missing = metric(name).missing()
        reasons += [f"{name} will be empty: {missing}; `fedmjp doctor` says what to do"] if missing else []
    if any(cell.weights == "untrained" for cell in prepared.plan.cells):
        reasons.append("models without --weights are untrained: initial weights drawn from the seed")
    return reasons + [f"skipped: {reason}" for reason in prepared.selection.skipped]


def print_status(plan: "TrialPlan", status: "CampaignStatus", console: "Console", *, in_work: bool) -> None:
    """Print progress in sum and per cell.

    Args:
        plan: Its cells and trials.
        status: How far it is.
        console: The terminal.
        in_work: Whether a run of this machine is at work on it.
    """
    from fedmjp.benchmarks.leaderboard.listing import grouped
    from fedmjp.benchmarks.report.percent import percent

    share = percent(status.ok / status.planned if status.planned else 1.0)
    tell(console, f"{plan.about['name']}: {status.ok} of {status.planned} trials finished ({share}), "
                   f"{status.failed} failed, {status.missing} not tried.")  # fmt: skip
    tell(console, _pace(status, in_work=in_work))
    table = _table(None, "model", "defence", "mask ratio", "attack", "setting", "threat", "ok", "failed", "to do")
    cells = grouped((cell for cell, _ in status.cells), lambda cell: cell.threat.undefended)
    numbers = {server: str(number) for number, server in enumerate(cells, 1)}
    for cell, counts in status.cells:
        todo = "refused" if cell.refusal else str(counts.missing or "")
        style = "dim" if cell.refusal or not counts.failed + counts.missing else ""
        names = (cell.model, cell.defence, f"{cell.mask_ratio:g}", escape(cell.attack), str(cell.setting))
        table.add_row(
            *names, numbers[cell.threat.undefended], str(counts.ok), str(counts.failed or ""), todo, style=style
        )
    console.print(table)
    for number, (server, of_server) in enumerate(cells.items(), 1):
        tell(console, f"Threat model {number}: {server.sentence(cell.pipeline for cell in of_server)}")


def _pace(status: "CampaignStatus", *, in_work: bool) -> str:
    if status.missing == 0:
        return "Nothing is left to do." if not status.failed else "Failed trials are tried again by the next run."
    if not in_work:
        return "No run is at work on it from this machine; `fedmjp campaign run` goes on."
    if status.remaining is None or status.last is None:
        return "A run is at work; there is no rate yet."
    ago = datetime.now(UTC).replace(tzinfo=None) - status.last
    end = datetime.now().astimezone() + status.remaining
    return (
        f"A run is at work: {status.rate:.1f} trials per second, last {duration(ago.total_seconds())} ago, "
        f"done in about {duration(status.remaining.total_seconds())} ({end:%H:%M})."
    )


def _table(title: str | None, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    words = ("what", "model", "defence", "attack", "setting", "threat")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    return table
