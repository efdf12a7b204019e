"""From observations to judged entries."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from benchmarks.leaderboard.entries import Cost, Entry, Provenance, Utility, entry_id
from benchmarks.leaderboard.figures import Figures, judged
from benchmarks.leaderboard.observations import Observation
from benchmarks.plan.experiment import Cell

COMMONEST = 10  # error messages per cell
Environments = Mapping[str, dict[str, Any]]


def entries_of(
    observations: Sequence[Observation], about: Mapping[str, Any], environments: Environments
) -> list[Entry]:
    """One judged entry per cell, in the same order."""
    by_cell = {observation.planned.cell: observation for observation in observations}
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


def _entry(
    observation: Observation, figures: Mapping[str, Any], utility: Utility | None, provenance: Provenance
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


def _provenance(observation: Observation, about: Mapping[str, Any], environments: Environments) -> Provenance:
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
