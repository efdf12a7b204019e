"""What `fedmjp campaign estimate` and `status` print."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmjp.cli.console import tell

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.benchmarks.campaign.prepare import Prepared
    from fedmjp.benchmarks.folder.ledger import Ledger
    from fedmjp.benchmarks.running.estimate import Estimate
    from fedmjp.benchmarks.running.status import CampaignStatus

SHOWN_KINDS = 12


def print_estimate(prepared: "Prepared", estimate: "Estimate", console: "Console") -> None:
    """Cells, trials, times, disk, and what cannot run here."""
    cells = prepared.plan.cells
    tell(console, f"{prepared.campaign.name}: {len(cells)} cells, {len(prepared.plan.trials)} trials, "
                   f"{prepared.campaign.data.count} pictures from {prepared.campaign.data.label}.")  # fmt: skip
    table = _table("Most of the time goes into", "what", "times", "seconds each", "in all")
    for probe in sorted(estimate.probes, key=lambda probe: -probe.total)[:SHOWN_KINDS]:
        table.add_row(escape(probe.what), str(probe.count), f"{probe.seconds:.3f}", _span(probe.total))
    console.print(table)
    hours = prepared.campaign.budget.hours
    budget = f" The budget is {hours:g} h; what is left then waits for the next run." if hours else ""
    tell(console, f"Time: about {_span(estimate.seconds)} on one worker with all cores of this machine.{budget}")
    if estimate.untried:
        said = "kinds of work were not tried for want of time; they are taken to cost what similar ones do"
        tell(console, f"{estimate.untried} of {len(estimate.probes) - 1} {said}.")
    end, peak = _size(estimate.picture_bytes), _size(estimate.peak_picture_bytes)
    tell(
        console,
        f"Disk: {_size(estimate.database_bytes)} of trials, {end} of pictures in the end, at most {peak} on the way "
        f"(keep: {prepared.campaign.keep}).",
    )
    tell(console, *(f"- {reason}" for reason in _hindrances(prepared, estimate)))


def _hindrances(prepared: "Prepared", estimate: "Estimate") -> list[str]:
    """What of a campaign cannot run on this machine, and why."""
    from fedmjp.metrics import metric

    reasons = [f"{probe.what} failed when it was tried: {probe.failure}" for probe in estimate.probes if probe.failure]
    refused = Counter(
        f"{planned.cell.attack} on {planned.cell.model}, {planned.cell.defence}: refused, {planned.refusal}"
        for planned in prepared.plan.cells
        if planned.refusal
    )
    reasons += [f"{what} ({count} cells)" for what, count in refused.items()]
    left_out = {planned.cell.attack: planned.left_out for planned in prepared.plan.cells if planned.left_out}
    reasons += [
        f"{attack}: {count} pictures are left out, its prior was made of them" for attack, count in left_out.items()
    ]
    for name in prepared.campaign.metrics:
        missing = metric(name).missing()
        reasons += [f"{name} will be empty: {missing}; `fedmjp doctor` says what to do"] if missing else []
    if any(planned.cell.weights == "untrained" for planned in prepared.plan.cells):
        reasons.append("models without --weights are untrained: initial weights drawn from the seed")
    return reasons + [f"skipped: {reason}" for reason in prepared.selection.skipped]


def print_status(ledger: "Ledger", status: "CampaignStatus", console: "Console", *, at_work: str, idle: str) -> None:
    """Progress in sum and per cell; who is ``at_work``, in words, or if that is empty, the sentence ``idle``."""
    from fedmjp.benchmarks.leaderboard.listing import grouped
    from fedmjp.benchmarks.report.percent import percent

    share = percent(status.ok / status.planned if status.planned else 1.0)
    tell(console, f"{ledger.about['name']}: {status.ok} of {status.planned} trials finished ({share}), "
                   f"{status.failed} failed, {status.missing} not tried.")  # fmt: skip
    tell(console, _pace(status, at_work, idle))
    table = _table(None, "model", "defence", "mask ratio", "attack", "setting", "threat", "ok", "failed", "to do")
    cells = grouped((planned.cell for planned, _ in status.cells), lambda cell: cell.threat.undefended)
    numbers = {server: str(number) for number, server in enumerate(cells, 1)}
    for planned, counts in status.cells:
        cell = planned.cell
        todo = "refused" if planned.refusal else str(counts.missing or "")
        style = "dim" if planned.refusal or not counts.failed + counts.missing else ""
        names = (cell.model, cell.defence, f"{cell.mask_ratio:g}", escape(cell.attack), str(cell.setting))
        table.add_row(
            *names, numbers[cell.threat.undefended], str(counts.ok), str(counts.failed or ""), todo, style=style
        )
    console.print(table)
    for number, (server, shown) in enumerate(cells.items(), 1):
        tell(console, f"Threat model {number}: {server.sentence(cell.pipeline for cell in shown)}")


def _pace(status: "CampaignStatus", at_work: str, idle: str) -> str:
    if status.missing == 0:
        return "Nothing is left to do." if not status.failed else "Failed trials are tried again by the next run."
    if not at_work:
        return idle
    if status.remaining is None or status.last is None:
        return f"{at_work}; there is no rate yet."
    ago = datetime.now(UTC).replace(tzinfo=None) - status.last
    end = datetime.now().astimezone() + status.remaining
    return (
        f"{at_work}: {status.rate:.1f} trials per second, last {_span(ago.total_seconds())} ago, "
        f"done in about {_span(status.remaining.total_seconds())} ({end:%H:%M})."
    )


def _table(title: str | None, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    words = ("what", "model", "defence", "attack", "setting", "threat")
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    return table


def _span(seconds: float) -> str:
    """Time in words: 12 s, 3 min, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = timedelta(seconds=seconds) // timedelta(minutes=1)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _size(count: int) -> str:
    """Bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
