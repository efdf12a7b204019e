"""Some of a campaign's trials run again from their pictures, without touching the folder of its results."""

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd

from fedmjp.benchmarks.campaign.prepare import Prepared
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.running.engine import Engine
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.runner import Recorder, run_experiment
from fedmjp.benchmarks.uploads.direct import DirectUploads


def run_again(prepared: Prepared, keys: Collection[str]) -> tuple[pd.DataFrame, dict[str, dict[str, Any]]]:
    """Run trials in this process and return their rows; nothing is kept on disk.

    Args:
        prepared: The campaign.
        keys: Of the trials.

    Returns:
        Rows and environments, as ``Store.frame`` and ``Store.environments`` give them.
    """
    sample = set(keys)
    with tempfile.TemporaryDirectory() as scratch:
        folder = OutputFolder(Path(scratch))
        store = folder.store()
        recorder = Recorder(folder, store, RunProgress())
        for part in prepared.plan.parts:
            # As the store gives them.
            trials = sorted((trial for trial in part.trials if trial.key in sample), key=lambda trial: trial.key)
            if trials:
                source = DirectUploads(part.experiment, prepared.selection)
                run_experiment(Engine(part.experiment, source, shows_pictures=False), trials, recorder)
        rows, environments = store.frame(sorted(sample)), store.environments()
        store.close()
    return rows, environments
