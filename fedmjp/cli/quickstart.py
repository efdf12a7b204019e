"""`fedmjp quickstart`."""

from pathlib import Path
from typing import Annotated

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import Device, Fresh
from fedmjp.cli.options import output as output_option
from fedmjp.cli.outcome import tell_outcome
from fedmjp.cli.runs import choose


def quickstart(
    output: Annotated[Path, output_option("Folder for results.")] = Path("results/quickstart"),
    fresh: Fresh = False,
    device: Device = "auto",
) -> None:
    """Run one federated experiment on bundled pictures, attack it, score it, report it."""
    console = wide_console()
    console.print("Preparing pictures and networks.")  # what follows takes seconds to import
    from fedmjp.benchmarks.campaign.prepare import describe
    from fedmjp.benchmarks.campaign.quickstart import quickstart as experiments_of
    from fedmjp.benchmarks.folder.output import OutputFolder
    from fedmjp.benchmarks.plan.planning import plan
    from fedmjp.benchmarks.report.render import render
    from fedmjp.benchmarks.running.engine import Engine
    from fedmjp.benchmarks.running.outdated import describe_outdated
    from fedmjp.benchmarks.running.rescue import rescuing
    from fedmjp.benchmarks.running.runner import Recorder, run_experiment
    from fedmjp.benchmarks.uploads.source import FederatedRun, RecordedUploads
    from fedmjp.cli.progress import TerminalProgress
    from fedmjp.data.selection import select_for

    experiments = experiments_of(device=choose(device))
    folder, scenario = OutputFolder(output), experiments[0].scenario
    selection = select_for(scenario)
    batches = [selection.batches(experiment.scenario) for experiment in experiments]
    planned = plan(experiments, batches, uploads="federated")
    uploads = f"recorded from a federation of {scenario.clients} Flower clients"
    planned = describe(planned, title="Quickstart", uploads=uploads, command="fedmjp quickstart")
    folder.prepare(fresh=fresh)
    store = folder.store()
    keys = [trial.key for trial in planned.tasks]
    missing = len(keys) - len(store.finished(keys))
    console.print(f"{len(keys) - missing} of {len(keys)} trials are finished; device {scenario.device}.")
    if missing and (outdated := describe_outdated(planned, store)):
        tell(console, outdated, style="yellow")
    planned.save(folder.root)
    with rescuing(folder, planned, store):
        with TerminalProgress(console) as progress:
            run = FederatedRun(planned, folder.run, progress)
            error = run.prepare() if missing else None
            progress.attacks(missing)
            for part in planned.parts:
                source = RecordedUploads(part.experiment, folder.run)
                engine = Engine(part.experiment, source, progress)
                run_experiment(engine, part.trials, Recorder(folder, store, progress), error)
            if len(store.finished(keys)) == len(keys):
                run.finish()
        console.print("Making tables and figures.")
        failed = render(planned, store, folder, console, figure=True, short=True)
    tell_outcome(failed, output, console, figure=True)
