"""From what the store says of each planned cell to judged entries."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.folder.ledger import Ledger
from benchmarks.folder.store import COLOUR, START_OVER
from benchmarks.leaderboard.entries import FLAT, Cost, Entry, Provenance, Utility, entry_id
from benchmarks.leaderboard.figures import Figures, judged
from benchmarks.leaderboard.measures import MEASURES
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
    """One judged entry per cell, in the order of the ledger."""
    about, planned = ledger.about, {planned_cell.cell: planned_cell for planned_cell in ledger.cells}
    places = {cell: place for place, cell in enumerate(planned)}
    rows = ledger.trials.merge(trials[list(TAKEN)], on="key", how="left", validate="one_to_one")
    scores = _scores(rows, [*about["metrics"], COLOUR])
    colour = scores.pop(COLOUR)
    cell_rows = _by_place(rows, rows["cell"], places)
    leakage = {cell: MEASURES[cell.reveals].leakage for cell in places}
    for cell, subset in cell_rows.items():
        _require_scores(subset, scores.loc[subset.index], leakage[cell])
        if not MEASURES[cell.reveals].colour_tells:
            colour[subset.index] = -np.inf
    flat = {cell: _flat(subset, colour[subset.index], scores[leakage[cell]]) for cell, subset in cell_rows.items()}
    scores = scores.mask(colour >= FLAT, axis=0)
    # Each picture with the mean over its seeds.
    pictures = scores.groupby([rows["cell"], rows["picture"]], sort=True).mean()
    most_revealing = {name: "max" if metric(name).higher_leaks else "min" for name in about["metrics"]}
    extremes = scores.groupby(rows["cell"]).agg(most_revealing).reindex(range(len(places)))
    worst: dict[Any, dict[Any, float]] = extremes.to_dict("index")
    provenances = {cell: _provenance(cell_rows[cell], about, environments) for cell in places}
    figures = Figures(
        ids={
            cell: entry_id(cell, about["name"], provenance.pictures_sha256, "reproduced")
            for cell, provenance in provenances.items()
        },
        pictures={  # only those with leakage that count
            cell: subset.droplevel(0).dropna(subset=[leakage[cell]])
            for cell, subset in _by_place(pictures, pictures.index.get_level_values(0), places).items()
        },
        worst={cell: worst[place] for cell, place in places.items()},
        recognisable_at=about["recognisable_at"],
    )
    return judged(
        _entry(
            planned[cell],
            cell_rows[cell],
            figures.of(cell) | {"flat": flat[cell]},
            _utility(cell, about["utility"]),
            provenances[cell],
        )
        for cell in places
    )


def _by_place(table: pd.DataFrame, numbers: Any, places: Mapping[Cell, int]) -> dict[Cell, pd.DataFrame]:
    """The rows of each cell, by the number of its place; one pass, however many cells there are."""
    parts = dict(iter(table.groupby(numbers, sort=False)))
    return {cell: parts.get(place, table.iloc[:0]) for cell, place in places.items()}


def _flat(rows: pd.DataFrame, colour: "pd.Series[float]", leakage: "pd.Series[float]") -> dict[str, float] | None:
    """Leakage of the pictures of a cell that one colour tells already; none if rows lack what says so."""
    if (rows["status"].eq("ok") & colour.isna()).any():
        return None
    flat_rows = rows[colour >= FLAT]
    means = leakage[flat_rows.index].groupby(flat_rows["picture"]).mean()
    return {str(name): float(value) for name, value in means.items()}


def _scores(rows: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """One column per metric; missing where it could not be computed, or the trial did not end well."""
    ok = rows["status"].eq("ok")
    records = [values if fine else {} for values, fine in zip(rows["scores"], ok, strict=True)]
    return pd.DataFrame(
        {name: np.array([record.get(name) for record in records], dtype=float) for name in metrics}, index=rows.index
    )


def _require_scores(rows: pd.DataFrame, scores: pd.DataFrame, leakage: str) -> None:
    """RecordError if a finished trial has no leakage, or an infinite score."""
    bad = (rows["status"].eq("ok") & scores[leakage].isna()) | np.isinf(scores.to_numpy()).any(axis=1)
    if bad.any():
        key = rows.loc[bad, "key"].iloc[0]
        raise RecordError(f"Trial {key} has finished, but a score is no finite number; {START_OVER}")


def _entry(
    planned: PlannedCell,
    rows: pd.DataFrame,
    figures: Mapping[str, Any],
    utility: Utility | None,
    provenance: Provenance,
) -> Entry:
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


def _provenance(rows: pd.DataFrame, about: Mapping[str, Any], environments: Environments) -> Provenance:
    pictures = "\n".join(sorted(rows["picture_sha256"].unique()))
    return Provenance(
        campaign=about["name"],
        battery=about.get("battery", ""),
        config_sha256=about["config_sha256"],
        data=about["data"],
        pictures_sha256=hashlib.sha256(pictures.encode()).hexdigest(),
        weights_sha256=tuple(sorted(rows["weights_sha256"].dropna().unique())),
        seeds=tuple(sorted(map(int, rows["seed"].unique()))),
        environments=tuple(environments[digest] for digest in sorted(rows["environment_sha256"].dropna().unique())),
        **span(rows["recorded_at"]),
    )


def span(recorded: "pd.Series[Any]") -> dict[str, str | None]:
    """First and last time, UTC."""
    times = pd.to_datetime(recorded, utc=True).dropna()
    ends = {"first": times.min(), "last": times.max()}
    return {name: None if times.empty else time.isoformat(timespec="seconds") for name, time in ends.items()}


def _mean(values: "pd.Series[Any]") -> float | None:
    known = values.dropna().astype(float)
    return float(known.mean()) if len(known) else None
