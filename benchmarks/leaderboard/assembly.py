"""From observations to judged entries."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.leaderboard.entries import (
    EXPOSED,
    RECOGNISABLE,
    Cost,
    Difference,
    Entry,
    Marginal,
    Provenance,
    Share,
    Statistics,
    Utility,
    entry_id,
)
from benchmarks.leaderboard.observations import Observation, used
from benchmarks.leaderboard.pairing import Pairs
from benchmarks.leaderboard.statistics import Floats, Interval, difference, intervals, share, statistics
from benchmarks.leaderboard.verdicts import judge
from benchmarks.plan.experiment import Cell
from fedmjp.metrics import metric

Environments = Mapping[str, dict[str, Any]]


class _Cells:
    """Observations by cell, the pairs among them, and every interval: all are computed in one go."""

    def __init__(self, observations: Sequence[Observation], about: Mapping[str, Any]) -> None:
        self.about = about
        self.by_cell = {observation.planned.cell: observation for observation in observations}
        cells = list(self.by_cell)
        self.ids: dict[Cell | None, str] = {
            cell: entry_id(cell, about["name"], observation.pictures_sha256, "reproduced")
            for cell, observation in self.by_cell.items()
        }
        pairs = Pairs(cells)
        self.floors = {cell: pairs.floor(cell) for cell in cells}
        self.twins = {cell: pairs.twin(cell) for cell in cells}
        self.without = {cell: pairs.without_each(cell) for cell in cells}
        self.samples = {
            (cell, name): values
            for cell, observation in self.by_cell.items()
            for name, values in self._samples(observation).items()
            if len(values)
        }
        self.intervals: dict[tuple[Cell, str], Interval] = dict(
            zip(self.samples, intervals(list(self.samples.values())), strict=True)
        )

    def _samples(self, observation: Observation) -> dict[str, Floats]:
        cell = observation.planned.cell
        samples = {name: column.dropna().to_numpy() for name, column in observation.pictures.items()}
        samples["over_floor"] = self.differences(cell, self.floors[cell]).to_numpy()
        samples["over_twin"] = self.differences(cell, self.twins[cell]).to_numpy()
        for label, twin in self.without[cell].items():
            samples[_without(label)] = self.differences(cell, twin).to_numpy()
        return {str(name): values for name, values in samples.items()}

    def differences(self, cell: Cell, other: Cell | None) -> "pd.Series[float]":
        """Leakage less that of another cell, over the pictures that both have."""
        leakage = self.by_cell[cell].leakage
        if other is None:
            return leakage.iloc[:0]
        return (leakage - self.by_cell[other].leakage).dropna()

    def statistics(self, cell: Cell, name: str) -> Statistics | None:
        """Of one metric; none where it could not be computed."""
        if (cell, name) not in self.samples:
            return None
        return statistics(
            self.samples[cell, name],
            self.intervals[cell, name],
            worst=self.by_cell[cell].worst[name],
            higher_leaks=metric(name).higher_leaks,
        )

    def difference(self, cell: Cell, name: str) -> Difference | None:
        """``over_floor``, ``over_twin``, or what a defence adds; none without pictures that both have."""
        if (cell, name) not in self.samples:
            return None
        return difference(self.samples[cell, name], self.intervals[cell, name])

    def marginal(self, cell: Cell) -> tuple[Marginal, ...]:
        """What each of several defences adds."""
        return tuple(
            Marginal(defence=label, twin=self.ids[twin], difference=self.difference(cell, _without(label)))
            for label, twin in self.without[cell].items()
        )


def _without(label: str) -> str:
    """How samples name the difference from the twin without a defence."""
    return f"without {label}"


def entries_of(
    observations: Sequence[Observation], about: Mapping[str, Any], environments: Environments
) -> list[Entry]:
    """One judged entry per cell, in the same order."""
    cells = _Cells(observations, about)
    found = [_entry(observation, cells, environments) for observation in observations]
    by_id = {entry.id: entry for entry in found}
    return [_judged(entry, observation, by_id) for entry, observation in zip(found, observations, strict=True)]


def _judged(entry: Entry, observation: Observation, by_id: Mapping[str, Entry]) -> Entry:
    if observation.planned.refusal is not None:
        return entry.model_copy(update={"verdict": "refused", "reason": observation.planned.refusal})
    return entry.model_copy(update=judge(entry, by_id.get(entry.floor or ""), by_id.get(entry.twin or ""))._asdict())


def _entry(observation: Observation, cells: _Cells, environments: Environments) -> Entry:
    planned, about = observation.planned, cells.about
    cell = planned.cell
    metrics = {name: found for name in about["metrics"] if (found := cells.statistics(cell, name))}
    finished = observation.finished
    return Entry(
        **{name: getattr(cell, name) for name in Cell.__dataclass_fields__},
        id=cells.ids[cell],
        defence=cell.defence,
        adapted=planned.adapted,
        verdict="incomplete",
        reason="not judged yet",
        n=len(observation.leakage),
        trials=len(finished),
        failures=len(observation.failed),
        missing=int(observation.rows["status"].isna().sum()),
        left_out=planned.left_out,
        errors=observation.errors,
        metrics=metrics,
        leakage={str(name): float(value) for name, value in observation.leakage.items()},
        recognisable=recognisable(observation.leakage, about["recognisable_at"]),
        exposed=exposed(observation.leakage, cells.differences(cell, cells.floors[cell]), RECOGNISABLE),
        realised_ratio=_mean(finished["realised_ratio"]),
        over_floor=cells.difference(cell, "over_floor"),
        over_twin=cells.difference(cell, "over_twin"),
        floor=cells.ids.get(cells.floors[cell]),
        twin=cells.ids.get(cells.twins[cell]),
        marginal=cells.marginal(cell),
        utility=_utility(cell, about["utility"]),
        cost=Cost(attack_seconds=_mean(finished["attack_seconds"]), upload_bytes=planned.upload_bytes),
        caveat=planned.caveat,
        provenance=_provenance(observation, about, environments),
    )


def recognisable(leakage: "pd.Series[float]", threshold: float) -> Share | None:
    """Share of pictures at or above a leakage; none without pictures."""
    return share(int((leakage >= threshold).sum()), len(leakage)) if len(leakage) else None


def exposed(leakage: "pd.Series[float]", over_floor: "pd.Series[float]", threshold: float) -> int:
    """Pictures that are recognisable, and were not so by a guess."""
    better = over_floor.index[over_floor >= EXPOSED]
    return int((leakage.loc[better] >= threshold).sum())


def _utility(cell: Cell, known: Mapping[str, Mapping[str, Any]]) -> Utility | None:
    labels = cell.pipeline.names_of_weights(cell.model)
    return next((Utility.parse(known[label]) for label in labels if label in known), None)


def _provenance(observation: Observation, about: Mapping[str, Any], environments: Environments) -> Provenance:
    rows = observation.rows
    first, last = observation.times
    return Provenance(
        campaign=about["name"],
        config_sha256=about["config_sha256"],
        data=about["data"],
        pictures_sha256=observation.pictures_sha256,
        weights_sha256=tuple(sorted(rows["weights_sha256"].dropna().unique())),
        seeds=tuple(sorted(map(int, rows["seed"].unique()))),
        environments=tuple(used(rows, environments)),
        first=first,
        last=last,
    )


def _mean(values: "pd.Series[Any]") -> float | None:
    known = values.dropna().astype(float)
    return float(known.mean()) if len(known) else None
