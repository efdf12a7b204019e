"""`fedmjp supernode` and `fedmjp gate show`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedmjp.clients.gate.ledger import Entry

gate = typer.Typer(no_args_is_help=True, help="What a site's upload gate decided.")
LATEST = 20


def supernode(
    policy: Annotated[Path, typer.Option(help="The site's policy, a YAML file.", metavar="FILE")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="Of flower-supernode, behind a --.")
    ] = None,
) -> None:
    """Run flower-supernode behind the upload gate: what the site's policy forbids does not leave, whatever apps do."""
    from fedmjp.clients.gate.site import run_supernode

    run_supernode(policy, arguments or [])


@gate.command(epilog=examples("PATH=$(fedmjp gate programs --policy policy.yaml):$PATH flower-superexec --help"))
def programs(policy: Annotated[Path, typer.Option(help="The site's policy.", metavar="FILE")]) -> None:
    """Make the folder that goes first on the PATH of flower-superexec, under --isolation process, and print it."""
    from fedmjp.clients.gate.policy import Policy
    from fedmjp.clients.gate.site import write_programs

    typer.echo(write_programs(policy, Policy.read(policy)[1]))


@gate.command(epilog=examples("fedmjp gate accept --policy policy.yaml"))
def accept(policy: Annotated[Path, typer.Option(help="The site's policy.", metavar="FILE")]) -> None:
    """Put a policy in force that changed since the ledger's last entry; until then no gate starts with it."""
    from fedmjp.clients.gate.acceptance import accept_policy
    from fedmjp.clients.gate.ledger import GateLedger
    from fedmjp.clients.gate.policy import Policy

    digest = accept_policy(policy, GateLedger(Policy.read(policy)[1]))
    typer.echo(f"Accepted {policy}, SHA-256 {digest}. Nodes read it when they start.")


@gate.command(epilog=examples("fedmjp gate show gate.jsonl"))
def show(
    ledger: Annotated[Path, typer.Argument(help="The file that the policy names.")],
    json: Annotated[bool, typer.Option("--json", help="All entries, for programs.")] = False,
    delta: Annotated[float, typer.Option(help="At which epsilon is stated.", min=0, max=1)] = 1e-5,
) -> None:
    """Show what left, what was defended or refused, and why; and epsilon so far."""
    from fedmjp.clients.gate.ledger import GateLedger, dump_entries

    entries = GateLedger(ledger).entries()
    if json:
        typer.echo(dump_entries(entries))
        return
    tell(wide_console(), *_lines(entries, delta))


def _lines(entries: "Sequence[Entry]", delta: float) -> list[str]:
    from collections import Counter

    from fedmjp.clients.gate.ledger import compose_epsilon

    beside = [entry for entry in entries if entry.place == "app"]
    accepted = [entry for entry in entries if entry.policy]
    counts = Counter(str(entry.verdict) for entry in beside)
    lines = [f"{len(beside)} replies: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}."]
    stopped = [entry for entry in entries if entry.place == "node" and entry.verdict == "refused"]
    lines += [f"The SuperNode refused {len(stopped)}."] if stopped else []
    train = [entry for entry in beside if entry.sha256 and entry.kind.startswith("train")]
    bare = sum(entry.multiplier is None for entry in train)
    if len(train) > bare:
        epsilon = compose_epsilon(beside, delta)
        lines.append(f"Epsilon of the {len(train) - bare} uploads with noise: {epsilon:.3g} at delta {delta:g}.")
    if bare:
        lines.append(f"{bare} uploads left without noise: no epsilon covers them.")
    if accepted:
        lines.append(f"Policy: SHA-256 {accepted[-1].policy}, accepted {accepted[-1].time}.")
    if bits := sum(entry.bits for entry in beside):
        lines.append(f"{bits} bits left in clear beside the arrays.")
    lines.append("")
    for entry in entries[-LATEST:]:
        lines += _of_entry(entry)
    return lines


def _of_entry(entry: "Entry") -> list[str]:
    if entry.policy:
        return [f"{entry.time}  policy accepted: {entry.policy[:16]}"]
    batches = "" if entry.pictures is None else f", {entry.pictures} pictures in {entry.steps} steps"
    where = " in the SuperNode" if entry.place == "node" else ""
    reasons = f": {'; '.join(entry.reasons)}" if entry.reasons else ""
    head = f"{entry.time}  round {entry.round or '-'}, {entry.kind}{batches}: {entry.verdict}{where}{reasons}"
    outcomes = [
        f"    {outcome.attack}: {outcome.came_back} of {outcome.among} {outcome.of}"
        + (f" ({outcome.reason})" if outcome.reason else "")
        for outcome in entry.outcomes
    ]
    checks = [f"    suspicious: {check}" for check in entry.checks]
    return [head, *checks, *outcomes, *(f"    leaves {line}" for line in entry.leaves)]


VERDICTS = ("passed", "defended", "refused")
