"""Figures that follow from scores per picture: the same for our cells and for those that third parties submit."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, BoardEntry, Difference, Marginal, Share
from fedmjp.benchmarks.leaderboard.measures import MEASURES, Measure, Threshold
from fedmjp.benchmarks.leaderboard.pairing import Pairs
from fedmjp.benchmarks.leaderboard.statistics import Interval, UploadSample, difference, intervals, share, statistics
from fedmjp.benchmarks.leaderboard.verdicts import judge
from fedmjp.benchmarks.plan.trial_plan import Cell
from fedmjp.metrics import metric

_Values = dict[str, float]  # by picture


def marginal_name(label: str) -> str:
    """Name the difference that one of several defences makes, for samples and messages.

    Args:
        label: Label of the defence.
    """
    return f"marginal of {label}"


@dataclass(frozen=True)
class BoardFigures:
    """Figures of the cells of a board or a submission.

    ``ids`` are those of entries. ``pictures`` have a column per metric and a row per picture that has a leakage and
    is not flat; ``worst`` is the most revealing single value of each metric on them; ``together`` is that of entries.
    """

    ids: Mapping[Cell, str]
    pictures: Mapping[Cell, pd.DataFrame]
    worst: Mapping[Cell, Mapping[str, float]]
    together: Mapping[Cell, Mapping[str, int]]
    recognisable_at: float

    @cached_property
    def pairs(self) -> Pairs:
        """Return the references of each cell."""
        return Pairs(list(self.pictures))

    @cached_property
    def samples(self) -> dict[Cell, dict[str, UploadSample]]:
        """Map each cell to the samples of its metrics and of its differences of leakage, by name."""
        return {
            cell: {
                name: UploadSample.of(values, self.together[cell])
                for name, values in (scores | self._over(cell)).items()
                if values
            }
            for cell, scores in self._scores.items()
        }

    @cached_property
    def _scores(self) -> dict[Cell, dict[str, _Values]]:
        """Map each cell to its scores by metric, of the pictures that have a value."""
        return {cell: _by_metric(pictures) for cell, pictures in self.pictures.items()}

    @cached_property
    def _reference_cells(self) -> dict[Cell, dict[str, Cell]]:
        """Map each cell to its reference cells, keyed by the name of the difference."""
        candidates: dict[Cell, dict[str, Cell | None]] = {
            cell: {
                "over_floor": self.pairs.floor(cell),
                "over_twin": self.pairs.twin(cell),
                **{marginal_name(label): reference for label, reference in self.pairs.without_each(cell).items()},
            }
            for cell in self.pictures
        }
        return {
            cell: {name: reference for name, reference in by_name.items() if reference is not None}
            for cell, by_name in candidates.items()
        }

    def _over(self, cell: Cell) -> dict[str, _Values]:
        """Subtract each reference's leakage from the cell's, over the pictures that both have."""
        measure = MEASURES[cell.reveals].leakage
        leakage = self._scores[cell][measure]
        reference_leakage = {
            name: self._scores[reference][measure] for name, reference in self._reference_cells[cell].items()
        }
        return {
            name: {picture: value - values[picture] for picture, value in leakage.items() if picture in values}
            for name, values in reference_leakage.items()
        }

    @cached_property
    def _intervals(self) -> dict[tuple[Cell, str], Interval]:
        """Compute the intervals of all samples in one go."""
        flat = {(cell, name): values for cell, by_name in self.samples.items() for name, values in by_name.items()}
        return dict(zip(flat, intervals(list(flat.values())), strict=True))

    def of(self, cell: Cell) -> dict[str, Any]:
        """Compute the fields of a cell's entry that follow from its scores.

        Args:
            cell: A cell of these.

        Returns:
            Values by name of the field; a figure without pictures is None.
        """
        measure = MEASURES[cell.reveals]
        scores = {name: values for name, values in self._scores[cell].items() if values}
        floor, twin = (self._reference_cells[cell].get(name) for name in ("over_floor", "over_twin"))
        recognition = Threshold(LEAKAGE, self.recognisable_at) if cell.reveals == "pictures" else None
        return {
            "id": self.ids[cell],
            "n": len(self.pictures[cell]),
            "metrics": {
                name: statistics(
                    self.samples[cell][name].values,
                    self._intervals[cell, name],
                    worst=self.worst[cell][name],
                    higher_leaks=metric(name).higher_leaks,
                )
                for name in scores
            },
            "scores": scores,
            "together": dict(self.together[cell]),
            "exact": self._share(cell, measure.exact),
            "recognisable": recognition and self._share(cell, recognition),
            "exposed": self._exposed(cell, measure),
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
        """Compute the share of the cell's pictures that pass a threshold."""
        n, uploads = len(self.pictures[cell]), len(set(self.together[cell].values())) or None
        return share(threshold.passed(self._scores[cell][threshold.metric].values()), n, uploads) if n else None

    def _exposed(self, cell: Cell, measure: Measure) -> int:
        """Count the pictures that are exposed and leak enough more than the guess."""
        if measure.exposing is None:
            return 0
        values, over_floor = self._scores[cell][measure.exposing.metric], self._over(cell).get("over_floor", {})
        better = [picture for picture, gain in over_floor.items() if gain >= measure.exposed]
        return measure.exposing.passed(values[picture] for picture in better if picture in values)

    def _difference(self, cell: Cell, name: str) -> Difference | None:
        gains = self.samples[cell].get(name)
        return None if gains is None else difference(gains, self._intervals[cell, name])


def _by_metric(pictures: pd.DataFrame) -> dict[str, _Values]:
    names, columns = pictures.index.astype(str).tolist(), pictures.to_numpy(dtype=np.float64).T.tolist()
    return {
        str(metric_name): {name: value for name, value in zip(names, values, strict=True) if not math.isnan(value)}
        for metric_name, values in zip(pictures.columns, columns, strict=True)
    }


def judge_entries(entries: Iterable[BoardEntry]) -> list[BoardEntry]:
    """Apply the rules to entries: each gets its verdict and reason; a refused one keeps its own.

    Args:
        entries: Entries with figures, and with the ids of their floors and twins.
    """
    by_id = {entry.id: entry for entry in entries}
    return [
        entry
        if entry.verdict == "refused"
        else entry.model_copy(update=judge(entry, by_id.get(entry.floor or ""), by_id.get(entry.twin or ""))._asdict())
        for entry in by_id.values()
    ]
