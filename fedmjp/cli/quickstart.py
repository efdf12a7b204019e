"""`fedmjp quickstart`."""

from pathlib import Path
from typing import Annotated

import typer

FAILED = 1


def quickstart(
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/quickstart"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget former trials and start over.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Run one federated experiment on bundled pictures, attack it, score it, report it."""
    from benchmarks.campaign import plan
    from benchmarks.engine import Engine
    from benchmarks.output import OutputFolder
    from benchmarks.quickstart import quickstart as experiment_of
    from benchmarks.report.render import render
    from fedmjp.cli.device import choose
    from fedmjp.cli.progress import TerminalProgress, wide_console
    from fedmjp.data.selection import select_for
    from fedmjp.store import Store

    console = wide_console()
    experiment = experiment_of(device=choose(device))
    folder = OutputFolder(output)
    planned = plan(experiment, select_for(experiment.federation).pictures)
    folder.prepare(fresh=fresh)
    store = Store(folder.database)
    finished = len(store.finished([trial.key for trial in planned]))
    console.print(f"{finished} of {len(planned)} trials are finished; device {experiment.federation.device}.")
    with TerminalProgress(console) as progress:
        Engine(experiment, folder, store, progress).run(planned)
    failed = render(experiment, planned, store, folder, console)
    files = "report.html, leaderboard.csv, leaderboard.md, reconstructions.png, manifest.json, trials.sqlite, pictures/"
    console.print(f"\nWritten to {output}: {files}.", highlight=False, markup=False)
    if failed:
        console.print(f"{len(failed)} trials failed, first: {failed[0].error}", style="bold red", markup=False)
        raise typer.Exit(FAILED)
