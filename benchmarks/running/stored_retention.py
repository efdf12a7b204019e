"""Which pictures of a campaign stay in its database, where no process sees the work of all others."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from fedmjp.benchmarks.folder.pictures import files_of
from fedmjp.benchmarks.folder.queue import Queue
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.folder.stored_pictures import StoredPictures
from fedmjp.benchmarks.plan.cells import Cell
from fedmjp.benchmarks.plan.experiment import Keep, PlannedTrial
from fedmjp.benchmarks.running.engine import Job
from fedmjp.benchmarks.running.retention import extremes


class StoredRetention:
    """Deletes the pictures of a cell that need not stay, once no job of its is open.

    Cells share pictures. One goes when no open job writes it and no complete cell shows it.
    """

    def __init__(self, keep: Keep, jobs: Sequence[Job], queue: Queue, store: Store, pictures: StoredPictures) -> None:
        self._keep, self._queue, self._store, self._pictures = keep, queue, store, pictures
        self._cells_in: list[set[Cell]] = [{trial.cell for trial in job.trials} for job in jobs]
        self._trials: defaultdict[Cell, dict[str, PlannedTrial]] = defaultdict(dict)
        self._cells_of: defaultdict[str, set[Cell]] = defaultdict(set)
        self._shown: dict[Cell, set[str]] = {}
        for job in jobs:
            for trial in job.trials:
                self._trials[trial.cell][trial.key] = trial
                for name in files_of(trial).values():
                    self._cells_of[name].add(trial.cell)

    def ends(self, number: int) -> None:
        """A job is done. With the last one, whatever does not belong is deleted, of former plans too."""
        open_cells = {cell for place in self._queue.open() for cell in self._cells_in[place]}
        gone = set[str]()
        if not open_cells:
            gone = self._pictures.names() - self._cells_of.keys()
        if self._keep != "all":
            complete = self._cells_in[number] - open_cells if open_cells else self._trials.keys()
            gone |= {name for cell in complete for name in self._spare(cell, open_cells)}
        self._pictures.delete(gone)

    def _spare(self, cell: Cell, open_cells: Collection[Cell]) -> set[str]:
        """What none of the cells shows that share it, if all of these are complete."""
        names = {name for trial in self._trials[cell].values() for name in files_of(trial).values()}
        sharing = {name: self._cells_of[name] for name in names}
        return {
            name
            for name, cells in sharing.items()
            if cells.isdisjoint(open_cells) and not any(name in self._shows(each) for each in cells)
        }

    def _shows(self, cell: Cell) -> set[str]:
        """What a complete cell shows."""
        if cell not in self._shown:
            trials = self._trials[cell]
            keys = list(extremes(self._store.frame(list(trials))).values()) if self._keep == "extremes" else []
            self._shown[cell] = {name for key in keys for name in files_of(trials[key]).values()}
        return self._shown[cell]
