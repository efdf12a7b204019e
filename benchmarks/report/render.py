"""Everything that is made of the trials: tables, figure, page, manifest."""

from collections.abc import Sequence

import pandas as pd
from rich.console import Console

from attacks import ATTACKS
from benchmarks.experiment import Experiment, PlannedTrial
from benchmarks.leaderboard.summary import leaderboard
from benchmarks.manifest import manifest
from benchmarks.output import OutputFolder, write_json
from benchmarks.report import tables
from benchmarks.report.figure import write_figure
from benchmarks.report.page import write_page
from fedmjp.models.build import build
from fedmjp.store import Store, Trial

SETTINGS_NOTE = (
    "Settings: (a) gradient of x, compared with x; (b) gradient of x~, compared with x~; (c) gradient of x~, compared "
    "with x. A defended model in (a) masks the position embeddings of x without shuffling it."
)
APRIL_NOTE = "Models named _april have a first block without first norm and residuals, which APRIL's closed form needs."
BOUND_NOTE = (
    "Rows marked bound were given more than any server sees. They limit what attacks can reach and are not ranked."
)
STATISTICS_NOTE = (
    "95 % percentile bootstrap interval of the mean over pictures, too narrow where they are few or alike (the "
    "bundled ones are two crops each of four photographs); worst is the most revealing picture."
)
NAIVE_NOTE = (
    "No attack here is adapted to MJP. A low score against MJP is their failure, not yet its protection; nothing "
    "below the grey row says anything about privacy."
)


def render(
    experiment: Experiment,
    planned: Sequence[PlannedTrial],
    store: Store,
    output: OutputFolder,
    console: Console,
    *,
    uploads: str,
) -> Sequence[Trial]:
    """Write leaderboard, figure, page and manifest into the output folder and print the table.

    Args:
        experiment: What was run.
        planned: Its trials.
        store: What came of them.
        output: Where everything goes.
        console: Where the table goes.
        uploads: How the uploads came about, in words.

    Returns:
        The failed trials.
    """
    trials = store.trials([plan.key for plan in planned])
    board = leaderboard(planned, trials, experiment.metrics)
    about = manifest(experiment, planned, trials, uploads=uploads)
    threat = experiment.threat.sentence()
    comments = notes(experiment, board)
    with_threat = [f"Threat model: {threat}", *comments]
    figure = output.root / "reconstructions.png"
    tables.write_csv(board, output.root / "leaderboard.csv")
    tables.write_markdown(board, experiment.metrics, with_threat, output.root / "leaderboard.md")
    write_figure(planned, trials, output.pictures, figure)
    write_json(output.root / "manifest.json", about)
    write_page(board, experiment.metrics, comments, figure, about, threat, output.root / "report.html")
    tables.print_table(board, experiment.metrics, console)
    for comment in with_threat:
        console.print(f"- {comment}", highlight=False, markup=False, soft_wrap=True)
    return [trial for trial in trials if trial.status == "failed"]


def caveats(experiment: Experiment) -> list[str]:
    """What attacks say of their own scores under this threat model."""
    found: dict[str, None] = {}
    for arm in experiment.federation.arms:
        model = build(arm)
        for attack in experiment.attacks[arm.name]:
            caveat = ATTACKS.get(attack.name)(attack.options).caveat(model, experiment.threat)
            if caveat:
                found[f"{caveat[0].upper()}{caveat[1:]}."] = None
    return list(found)


def notes(experiment: Experiment, board: pd.DataFrame) -> list[str]:
    """What the table must not be read without."""
    found = [
        SETTINGS_NOTE,
        *([NAIVE_NOTE] if "mjp" in experiment.federation.defences else []),
        *([APRIL_NOTE] if any(name.endswith("_april") for name in experiment.federation.models) else []),
        *([BOUND_NOTE] if (board["role"] == "bound").any() else []),
        *caveats(experiment),
        "All weights are initial ones drawn from the seed (untrained).",
        f"Protocol: {experiment.protocol}, pictures in [0, 1]. {STATISTICS_NOTE}",
    ]
    found += [
        f"{name} is empty: {reason}; `fedmjp doctor` says what to do."
        for name, reason in tables.missing_metrics(experiment.metrics).items()
    ]
    failures = int(board["failures"].sum())
    if failures:
        found.append(f"{failures} trials failed; their errors are in trials.sqlite, and no mean includes them.")
    return found
