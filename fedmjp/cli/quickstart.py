"""`fedmjp quickstart`."""

from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/quickstart"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget former trials and start over.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Run one federated experiment on bundled pictures, attack it, score it, report it."""
    from benchmarks.campaign.prepare import ledger_of
    from benchmarks.campaign.quickstart import quickstart as experiment_of
    from benchmarks.folder.output import OutputFolder
    from benchmarks.folder.store import Store
    from benchmarks.plan.planning import plan
    from benchmarks.report.render import render_experiment
    from benchmarks.running.engine import Engine
    from benchmarks.uploads.source import FederatedUploads
    from fedmjp.cli.device import choose
    from fedmjp.cli.outcome import tell_outcome
    from fedmjp.cli.progress import TerminalProgress, wide_console
    from fedmjp.data.selection import select_for

    console = wide_console()
    experiment = experiment_of(device=choose(device))
    folder, federation = OutputFolder(output), experiment.federation
    planned = plan([experiment], [select_for(federation).batches(federation)], uploads="federated")
    uploads = f"recorded from a federation of {federation.clients} Flower clients"
    ledger = ledger_of(experiment, planned, title="Quickstart", uploads=uploads, command="fedmjp quickstart")
    folder.prepare(fresh=fresh)
    store = Store.at(folder.database)
    finished = len(store.finished([trial.key for trial in planned.trials]))
    console.print(f"{finished} of {len(planned.trials)} trials are finished; device {federation.device}.")
    ledger.save(folder.root)
    with TerminalProgress(console) as progress:
        source = FederatedUploads(experiment, folder.run, progress.round)
        Engine(experiment, folder, store, progress, source).run(planned.trials)
    tell_outcome(render_experiment(planned, ledger, store, folder, console), output, console, figure=True)
