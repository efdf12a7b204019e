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
    from benchmarks.engine import Engine
    from benchmarks.experiment import plan
    from benchmarks.output import OutputFolder
    from benchmarks.quickstart import quickstart as experiment_of
    from benchmarks.report.render import render
    from benchmarks.sources import FederatedUploads
    from fedmjp.cli.device import choose
    from fedmjp.cli.outcome import tell_outcome
    from fedmjp.cli.progress import TerminalProgress, wide_console
    from fedmjp.data.selection import select_for
    from fedmjp.store import Store

    console = wide_console()
    experiment = experiment_of(device=choose(device))
    folder = OutputFolder(output)
    federation = experiment.federation
    planned = plan(experiment, select_for(federation).batches(federation), uploads="federated")
    folder.prepare(fresh=fresh)
    store = Store.at(folder.database)
    finished = len(store.finished([trial.key for trial in planned]))
    console.print(f"{finished} of {len(planned)} trials are finished; device {experiment.federation.device}.")
    with TerminalProgress(console) as progress:
        source = FederatedUploads(experiment, folder.run, progress.round)
        Engine(experiment, folder, store, progress, source).run(planned)
    uploads = f"recorded from a federation of {experiment.federation.clients} Flower clients"
    tell_outcome(render(experiment, planned, store, folder, console, uploads=uploads), output, console)
