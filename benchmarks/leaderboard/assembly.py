"""From what the store says of each planned cell to judged entries."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.folder.ledger import Ledger
from benchmarks.leaderboard.entries import LEAKAGE, Cost, Entry, Provenance, Utility, entry_id
from benchmarks.leaderboard.figures import Figures, judged
from benchmarks.plan.experiment import Cell, PlannedCell
from fedmjp.errors import RecordError
from fedmjp.metrics import metric

COMMONEST = 10  # error messages per cell
TAKEN = (
    "key", "status", "error", "realised_ratio", "weights_sha256", "attack_seconds", "scores", "recorded_at",
    "environment_sha256",
)  # fmt: skip
Environments = Mapping[str, dict[str, Any]]


def entries_of(ledger: Ledger, trials: pd.DataFrame, environments: Environments) -> list[Entry]:
    """One judged entry per cell, in the order of the ledger.

    Raises:
        RecordError: If a finished trial has no leakage, or a score that is no finite number.
    """
    about = ledger.about
    by_cell = {observation.planned.cell: observation for observation in _observe(ledger, trials)}
    provenances = {cell: _provenance(observation, about, environments) for cell, observation in by_cell.items()}
    figures = Figures(
        ids={
            cell: entry_id(cell, about["name"], provenance.pictures_sha256, "reproduced")
            for cell, provenance in provenances.items()
        },
        pictures={cell: observation.pictures for cell, observation in by_cell.items()},
        worst={cell: observation.worst for cell, observation in by_cell.items()},
        recognisable_at=about["recognisable_at"],
    )
    return judged(
        _entry(observation, figures.of(cell), _utility(cell, about["utility"]), provenances[cell])
        for cell, observation in by_cell.items()
    )


@dataclass(frozen=True)
class _Observation:
    """A cell as it was observed.

    ``rows`` are its planned trials, with what the store has of them. ``pictures`` has the value of each metric per
    picture, the mean over its seeds; only pictures with leakage. ``worst`` is the most revealing single value of each
    metric that has any.
    """

    planned: PlannedCell
    rows: pd.DataFrame
    pictures: pd.DataFrame
    worst: Mapping[str, float]


def _observe(ledger: Ledger, trials: pd.DataFrame) -> list[_Observation]:
    """Every cell of the ledger, in its order."""
    metrics = list(ledger.about["metrics"])
    rows = ledger.trials.merge(trials[list(TAKEN)], on="key", how="left", validate="one_to_one")
    scores = _scores(rows, metrics)
    by_picture = scores.groupby([rows["cell"], rows["picture"]], sort=True).mean().dropna(subset=[LEAKAGE])
    by_cell = scores.groupby(rows["cell"])
    most, least = by_cell.max(), by_cell.min()
    groups: dict[Any, pd.DataFrame] = dict(iter(rows.groupby("cell")))
    tables: dict[Any, pd.DataFrame] = {cell: table.droplevel(0) for cell, table in by_picture.groupby(level=0)}
    worst = {name: (most if metric(name).higher_leaks else least)[name].dropna() for name in metrics}
    return [
        _Observation(
            planned=planned,
            rows=groups.get(index, rows.iloc[:0]),
            pictures=tables.get(index, scores.iloc[:0]),
            worst={name: float(found[index]) for name, found in worst.items() if index in found.index},
        )
        for index, planned in enumerate(ledger.cells)
    ]


def _scores(rows: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """One column per metric; missing where it could not be computed, or the trial did not end well."""
    ok = rows["status"].eq("ok")
    records = [found if fine else {} for found, fine in zip(rows["scores"], ok, strict=True)]
    scores = pd.DataFrame(
        {name: np.array([record.get(name) for record in records], dtype=float) for name in metrics}, index=rows.index
    )
    bad = (ok & scores[LEAKAGE].isna()) | np.isinf(scores.to_numpy()).any(axis=1)
    if bad.any():
        key = rows.loc[bad, "key"].iloc[0]
        raise RecordError(f"Trial {key} has finished, but a score is no finite number; run it again with --fresh")
    return scores


def _entry(
    observation: _Observation, figures: Mapping[str, Any], utility: Utility | None, provenance: Provenance
) -> Entry:
    planned, rows = observation.planned, observation.rows
    finished, failed = (rows[rows["status"] == status] for status in ("ok", "failed"))
    errors = failed["error"].fillna("no message").value_counts()
    return Entry(
        **vars(planned.cell),
        **figures,
        defence=planned.cell.defence,
        adapted=planned.adapted,
        verdict="refused" if planned.refusal is not None else "incomplete",
        reason=planned.refusal if planned.refusal is not None else "not judged yet",
        trials=len(finished),
        failures=len(failed),
        missing=int(rows["status"].isna().sum()),
        left_out=planned.left_out,
        errors=tuple(map(str, errors.index[:COMMONEST])),
        realised_ratio=_mean(finished["realised_ratio"]),
        utility=utility,
        cost=Cost(attack_seconds=_mean(finished["attack_seconds"]), upload_bytes=planned.upload_bytes),
        caveat=planned.caveat,
        provenance=provenance,
    )


def _utility(cell: Cell, known: Mapping[str, Mapping[str, Any]]) -> Utility | None:
    labels = cell.pipeline.names_of_weights(cell.model)
    return next((Utility.parse(known[label]) for label in labels if label in known), None)


def _provenance(observation: _Observation, about: Mapping[str, Any], environments: Environments) -> Provenance:
    rows = observation.rows
    pictures = "\n".join(sorted(rows["picture_sha256"].unique()))
    recorded = pd.to_datetime(rows["recorded_at"], utc=True).dropna()
    return Provenance(
        campaign=about["name"],
        config_sha256=about["config_sha256"],
        data=about["data"],
        pictures_sha256=hashlib.sha256(pictures.encode()).hexdigest(),
        weights_sha256=tuple(sorted(rows["weights_sha256"].dropna().unique())),
        seeds=tuple(sorted(map(int, rows["seed"].unique()))),
        environments=tuple(environments[each] for each in sorted(rows["environment_sha256"].dropna().unique())),
        first=None if recorded.empty else recorded.min().isoformat(timespec="seconds"),
        last=None if recorded.empty else recorded.max().isoformat(timespec="seconds"),
    )


def _mean(values: "pd.Series[Any]") -> float | None:
    known = values.dropna().astype(float)
    return float(known.mean()) if len(known) else None
