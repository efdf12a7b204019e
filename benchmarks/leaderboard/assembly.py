"""Judged entries from the stored trials of each planned cell."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from fedmjp.benchmarks.folder.trials import START_OVER
from fedmjp.benchmarks.leaderboard.entries import (
    FLAT,
    BoardEntry,
    Cost,
    Provenance,
    Submitter,
    Utility,
    entry_id_of,
)
from fedmjp.benchmarks.leaderboard.figures import BoardFigures, judge_entries
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.benchmarks.plan.trial_plan import Cell, TrialPlan
from fedmjp.errors import RecordError
from fedmjp.metrics import COLOUR, metric

COMMONEST = 10  # error messages per cell
TAKEN = (
    "key", "status", "error", "realised_ratio", "weights_sha256", "attack_seconds", "scores", "recorded_at",
    "environment_sha256",
)  # fmt: skip
Environments = Mapping[str, dict[str, Any]]


def build_entries(
    plan: TrialPlan, trials: pd.DataFrame, environments: Environments, submitter: Submitter | None = None
) -> list[BoardEntry]:
    """Build one judged entry per cell, in the order of the plan.

    Args:
        plan: The plan of the cells.
        trials: The store's trials, as ``Store.frame`` gives them.
        environments: Environments of the trials, by digest.
        submitter: Who submitted the cells; None for those of the board itself.
    """
    about, planned = plan.about, {cell: cell for cell in plan.cells}
    places = {cell: place for place, cell in enumerate(planned)}
    rows = plan.trials.merge(trials[list(TAKEN)], on="key", how="left", validate="one_to_one")
    rows["upload"] = plan.uploads
    scores = _scores(rows, [*about["metrics"], COLOUR])
    colour = scores.pop(COLOUR)
    cell_rows = _by_place(rows, rows["cell"], places)
    leakage = [MEASURES[cell.reveals].leakage for cell in places]
    rows["leakage"] = _leakage(scores, rows["cell"], leakage)
    _require_scores(rows, scores)
    colourless = {place for cell, place in places.items() if not MEASURES[cell.reveals].colour_tells}
    colour[rows["cell"].isin(colourless)] = -np.inf
    flat = _flat(rows, colour)
    scores = scores.mask(colour >= FLAT, axis=0)
    # Each picture with the mean over its seeds.
    means = scores.groupby([rows["cell"], rows["picture"]], sort=True).mean()
    means = means[_leakage(means, means.index.get_level_values(0), leakage).notna()]  # only those that count
    most_revealing = {name: "max" if metric(name).higher_leaks else "min" for name in about["metrics"]}
    extremes = scores.groupby(rows["cell"]).agg(most_revealing).reindex(range(len(places)))
    worst: dict[Any, dict[Any, float]] = extremes.to_dict("index")
    pictures = _by_place(means.droplevel(0), means.index.get_level_values(0), places)
    origin = {"origin": "submitted" if submitter else "reproduced", "submitter": submitter}
    provenances = {cell: _provenance(cell_rows[cell], about, environments) for cell in places}
    figures = BoardFigures(
        ids={cell: entry_id_of(cell, provenance, submitter) for cell, provenance in provenances.items()},
        pictures=pictures,
        worst={cell: worst[place] for cell, place in places.items()},
        together={cell: _together(cell_rows[cell], counted.index) for cell, counted in pictures.items()},
        recognisable_at=about["recognisable_at"],
    )
    return judge_entries(
        _entry(
            planned[cell],
            cell_rows[cell],
            figures.of(cell) | {"flat": flat.get(places[cell], {})} | origin,
            _utility(cell, about["utility"]),
            provenances[cell],
        )
        for cell in places
    )


def _by_place(table: pd.DataFrame, numbers: Any, places: Mapping[Cell, int]) -> dict[Cell, pd.DataFrame]:
    """Map each cell to its rows, by the number of its place; in one pass, however many cells there are."""
    parts = dict(iter(table.groupby(numbers, sort=False)))
    return {cell: parts.get(place, table.iloc[:0]) for cell, place in places.items()}


def _together(rows: pd.DataFrame, counted: "pd.Index[str]") -> dict[str, int]:
    """Map counted pictures to the number of the upload that each was behind; empty where no two shared one.

    Uploads that share a picture, at several seeds or in several experiments, count as one.
    """
    if not rows.duplicated(["seed", "upload"]).any():
        return {}
    picture, names = pd.factorize(rows["picture"])
    upload = len(names) + rows.groupby(["seed", "upload"], sort=False).ngroup().to_numpy()
    nodes = upload.max() + 1
    edges = coo_array((np.ones(len(rows)), (picture, upload)), shape=(nodes, nodes))
    numbers = dict(zip(names, connected_components(edges, directed=False)[1].tolist(), strict=False))
    upload_numbers = {str(name): numbers[name] for name in counted}
    return upload_numbers if len(set(upload_numbers.values())) < len(upload_numbers) else {}


def _leakage(scores: pd.DataFrame, numbers: Any, metrics: Sequence[str]) -> "pd.Series[float]":
    """Return the leakage of each row: the metric that judges its cell, found by the cell's number."""
    leakage, judged_by = pd.Series(np.nan, index=scores.index), np.array(metrics, dtype=object)[numbers]
    for name in dict.fromkeys(metrics):
        leakage = leakage.mask(judged_by == name, scores[name])
    return leakage


def _flat(rows: pd.DataFrame, colour: "pd.Series[float]") -> dict[int, dict[str, float] | None]:
    """Map cells, by number, to the leakage of their flat pictures; None if rows do not say which are flat."""
    flat: dict[int, dict[str, float] | None] = {}
    for place, flat_rows in rows[colour >= FLAT].groupby("cell"):
        means = flat_rows["leakage"].groupby(flat_rows["picture"]).mean()
        flat[cast(int, place)] = {str(name): float(value) for name, value in means.items()}
    unknown = rows.loc[rows["status"].eq("ok") & colour.isna(), "cell"]
    return flat | dict.fromkeys(unknown.tolist())


def _scores(rows: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Tabulate scores, a column per metric; missing where not computed, or where the trial failed."""
    ok = rows["status"].eq("ok")
    records = [values if fine else {} for values, fine in zip(rows["scores"], ok, strict=True)]
    return pd.DataFrame(
        {name: np.array([record.get(name) for record in records], dtype=float) for name in metrics}, index=rows.index
    )


def _require_scores(rows: pd.DataFrame, scores: pd.DataFrame) -> None:
    """Raise RecordError if a finished trial has no leakage, or an infinite score."""
    bad = (rows["status"].eq("ok") & rows["leakage"].isna()) | np.isinf(scores.to_numpy()).any(axis=1)
    if bad.any():
        key = rows.loc[bad, "key"].iloc[0]
        raise RecordError(f"Trial {key} has finished, but a score is no finite number; {START_OVER}")


def _entry(
    planned: Cell,
    rows: pd.DataFrame,
    figures: Mapping[str, Any],
    utility: Utility | None,
    provenance: Provenance,
) -> BoardEntry:
    status = rows["status"].to_numpy(dtype=object)
    finished, failed = status == "ok", status == "failed"
    errors = rows.loc[failed, "error"].fillna("no message").value_counts() if failed.any() else pd.Series(dtype=int)
    return BoardEntry(
        **planned.identity,
        **figures,
        defence=planned.defence,
        adapted=planned.adapted,
        verdict="refused" if planned.refusal is not None else "incomplete",
        reason=planned.refusal if planned.refusal is not None else "not judged yet",
        trials=int(finished.sum()),
        failures=int(failed.sum()),
        missing=int((~finished & ~failed).sum()),
        left_out=planned.left_out,
        errors=tuple(map(str, errors.index[:COMMONEST])),
        realised_ratio=_mean(rows["realised_ratio"], finished),
        utility=utility,
        cost=Cost(attack_seconds=_mean(rows["attack_seconds"], finished), upload_bytes=planned.upload_bytes),
        caveat=planned.caveat,
        provenance=provenance,
    )


def _utility(cell: Cell, utilities: Mapping[str, Mapping[str, Any]]) -> Utility | None:
    labels = cell.pipeline.names_of_weights(cell.model)
    return next((Utility.parse(utilities[label]) for label in labels if label in utilities), None)


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
        **summarise_times(rows["recorded_at"]),
    )


def summarise_times(recorded: "pd.Series[Any]") -> dict[str, str | None]:
    """Return the first and the last time of trials, in UTC.

    Args:
        recorded: When each trial was recorded.

    Returns:
        ``first`` and ``last`` as ISO texts; None without trials.
    """
    times = pd.to_datetime(recorded, utc=True).dropna()
    ends = {"first": times.min(), "last": times.max()}
    return {name: None if times.empty else time.isoformat(timespec="seconds") for name, time in ends.items()}


def _mean(values: "pd.Series[Any]", of: npt.NDArray[np.bool_]) -> float | None:
    numbers = values.to_numpy(dtype=np.float64)[of]
    numbers = numbers[~np.isnan(numbers)]
    return float(numbers.mean()) if len(numbers) else None
