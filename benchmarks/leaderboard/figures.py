"""What follows from scores per picture: the same for our own cells and for those that third parties submit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.leaderboard.entries import LEAKAGE, Difference, Entry, Marginal, Share
from benchmarks.leaderboard.measures import MEASURES, Threshold
from benchmarks.leaderboard.pairing import Pairs
from benchmarks.leaderboard.statistics import Floats, Interval, difference, intervals, share, statistics
from benchmarks.leaderboard.verdicts import judge
from benchmarks.plan.experiment import Cell
from fedmjp.metrics import metric


def marginal_name(label: str) -> str:
    """How samples and messages name what one of several defences adds."""
    return f"marginal of {label}"


@dataclass(frozen=True)
class Figures:
    """Figures of the cells of a board or a submission.

    ``ids`` are those of entries. ``pictures`` have a column per metric and a row per picture that has a leakage and
    is not flat; ``worst`` is the most revealing single value of each metric on them.
    """

    ids: Mapping[Cell, str]
    pictures: Mapping[Cell, pd.DataFrame]
    worst: Mapping[Cell, Mapping[str, float]]
    recognisable_at: float

    @cached_property
    def pairs(self) -> Pairs:
        """What each cell is held against."""
        return Pairs(list(self.pictures))

    @cached_property
    def samples(self) -> dict[Cell, dict[str, Floats]]:
        """Everything that has a mean with an interval, by name: metrics, and differences of leakage."""
        return {cell: {name: values for name, values in self._samples(cell) if len(values)} for cell in self.pictures}

    def _samples(self, cell: Cell) -> Iterable[tuple[str, Floats]]:
        for name, column in self.pictures[cell].items():
            values = column.to_numpy(dtype=np.float64)
            yield str(name), values[~np.isnan(values)]
        others = {"over_floor": self.pairs.floor(cell), "over_twin": self.pairs.twin(cell)}
        others |= {marginal_name(label): twin for label, twin in self.pairs.without_each(cell).items()}
        for name, other in others.items():
            yield name, np.asarray(self._over(cell, other), dtype=np.float64)

    def _over(self, cell: Cell, other: Cell | None) -> "pd.Series[float]":
        """Leakage less that of another cell, over the pictures that both have."""
        name = MEASURES[cell.reveals].leakage
        leakage = self.pictures[cell][name]
        return leakage.iloc[:0] if other is None else (leakage - self.pictures[other][name]).dropna()

    @cached_property
    def _intervals(self) -> dict[tuple[Cell, str], Interval]:
        """All are computed in one go."""
        flat = {(cell, name): values for cell, by_name in self.samples.items() for name, values in by_name.items()}
        return dict(zip(flat, intervals(list(flat.values())), strict=True))

    def of(self, cell: Cell) -> dict[str, Any]:
        """The fields of the cell's entry that follow; a figure without pictures is none."""
        measure = MEASURES[cell.reveals]
        leakage = self.pictures[cell][measure.leakage]
        floor, twin = self.pairs.floor(cell), self.pairs.twin(cell)
        over_floor = self._over(cell, floor)
        better = self.pictures[cell].loc[over_floor.index[over_floor >= measure.exposed]]
        seen = Threshold(LEAKAGE, self.recognisable_at) if cell.reveals == "pictures" else None
        return {
            "id": self.ids[cell],
            "n": len(leakage),
            "metrics": {
                name: statistics(
                    self.samples[cell][name],
                    self._intervals[cell, name],
                    worst=self.worst[cell][name],
                    higher_leaks=metric(name).higher_leaks,
                )
                for name in map(str, self.pictures[cell])
                if name in self.samples[cell]
            },
            "scores": {
                str(name): {str(picture): float(value) for picture, value in column.dropna().items()}
                for name, column in self.pictures[cell].items()
                if name in self.samples[cell]
            },
            "exact": self._share(cell, measure.exact),
            "recognisable": seen and self._share(cell, seen),
            "exposed": int(measure.exposing.passed(better).sum()) if measure.exposing else 0,
            "over_floor": self._difference(cell, "over_floor"),
            "over_twin": self._difference(cell, "over_twin"),
            "floor": self.ids[floor] if floor else None,
            "twin": self.ids[twin] if twin else None,
            "marginal": tuple(
                Marginal(defence=label, twin=self.ids[without], difference=self._difference(cell, marginal_name(label)))
                for label, without in self.pairs.without_each(cell).items()
            ),
        }

    def _share(self, cell: Cell, threshold: Threshold) -> Share | None:
        """Share of pictures that pass."""
        pictures = self.pictures[cell]
        return share(int(threshold.passed(pictures).sum()), len(pictures)) if len(pictures) else None

    def _difference(self, cell: Cell, name: str) -> Difference | None:
        values = self.samples[cell].get(name)
        return None if values is None else difference(values, self._intervals[cell, name])


def judged(entries: Iterable[Entry]) -> list[Entry]:
    """Entries with what the rules say of them; what was refused stays so."""
    by_id = {entry.id: entry for entry in entries}
    return [
        entry
        if entry.verdict == "refused"
        else entry.model_copy(update=judge(entry, by_id.get(entry.floor or ""), by_id.get(entry.twin or ""))._asdict())
        for entry in by_id.values()
    ]
