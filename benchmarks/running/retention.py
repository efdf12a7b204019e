"""Which pictures of a run stay on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pandas as pd

from fedmjp.benchmarks.folder.pictures import PictureFolder
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.plan.trial_plan import Cell

if TYPE_CHECKING:
    from fedmjp.benchmarks.plan.experiment import Keep
    from fedmjp.benchmarks.plan.trial_plan import PlannedTrial, TrialPlan


def extremes(cell: pd.DataFrame) -> dict[str, str]:
    """Pick the trials that stand for a cell, label to key: the most revealing, the median and the least revealing.

    By PSNR in ``cell``, trials as ``Store.frame`` gives them: the lower median where there are two, equal ones by
    key. Empty without a finished trial; the same trial under several labels where there are few.

    Args:
        cell: Trials as ``Store.frame`` gives them.
    """
    finished = cell[cell["status"] == "ok"]
    ranked = sorted(
        (scores["psnr"], key)
        for scores, key in zip(finished["scores"], finished["key"], strict=True)
        if scores.get("psnr") is not None
    )
    if not ranked:
        return {}
    places = {"most revealing": -1, "median": (len(ranked) - 1) // 2, "least revealing": 0}
    return {label: ranked[place][1] for label, place in places.items()}


class Retention:
    """Deletes the pictures of a cell that need not stay from their folder, once all its trials were tried.

    Cells share pictures: an original belongs to every cell that attacks it, a reconstruction to settings
    b and c. A file goes when no cell in work writes it and no complete one shows it.
    """

    def __init__(self, keep: Keep, plan: TrialPlan, pictures: PictureFolder, store: Store) -> None:
        self._keep, self._pictures, self._store = keep, pictures, store
        self._trials: defaultdict[Cell, dict[str, PlannedTrial]] = defaultdict(dict)
        self._cells_of: defaultdict[str, set[Cell]] = defaultdict(set)
        for trial in plan.tasks:
            self._trials[trial.cell][trial.key] = trial
            for name in trial.files.values():
                self._cells_of[name].add(trial.cell)
        finished = store.finished([trial.key for trial in plan.tasks])
        self._pending = {cell: trials.keys() - finished for cell, trials in self._trials.items()}
        self._in_work = {cell for cell, pending in self._pending.items() if 0 < len(pending) < len(self._trials[cell])}
        self._shown: set[str] = set()
        for cell in self._trials:
            if not self._pending[cell]:
                self._show(cell)
        self.sweep()

    def start(self, trials: Iterable[PlannedTrial]) -> None:
        """Spare the pictures of cells whose trials are about to be run.

        Args:
            trials: Of one job.
        """
        self._in_work |= {trial.cell for trial in trials}

    def mark_finished(self, trials: Iterable[PlannedTrial]) -> None:
        """Record that trials have rows, and delete the pictures that complete cells need not keep.

        Args:
            trials: Of one job.
        """
        touched = dict.fromkeys(trial.cell for trial in trials)
        for trial in trials:
            self._pending[trial.cell].discard(trial.key)
        complete = [cell for cell in touched if not self._pending[cell]]
        self._in_work.difference_update(complete)
        for cell in complete:
            self._show(cell)
        self._delete(
            name for cell in complete for trial in self._trials[cell].values() for name in trial.files.values()
        )

    def sweep(self) -> None:
        """Delete what does not belong of all that runs wrote: also pictures of former plans, and half-written files."""
        self._delete(self._pictures.names())
        self._pictures.tidy()

    def _show(self, cell: Cell) -> None:
        trials = self._trials[cell]
        keys = list(trials)
        if self._keep == "extremes":
            keys = list(extremes(self._store.frame(keys)).values())
        if self._keep != "none":
            self._shown.update(name for key in keys for name in trials[key].files.values())

    def _delete(self, names: Iterable[str]) -> None:
        if self._keep == "all":
            return
        self._pictures.delete(
            name for name in names if name not in self._shown and not self._cells_of.get(name, set()) & self._in_work
        )
