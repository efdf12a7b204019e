"""What the store says of each planned cell: values per picture, failures, where they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.folder.ledger import Ledger
from benchmarks.leaderboard.entries import LEAKAGE
from benchmarks.plan.experiment import PlannedCell
from fedmjp.errors import RecordError
from fedmjp.metrics import metric

TAKEN = (
    "key", "status", "error", "realised_ratio", "weights_sha256", "attack_seconds", "scores", "recorded_at",
    "environment_sha256",
)  # fmt: skip


@dataclass(frozen=True)
class Observation:
    """A cell as it was observed.

    ``rows`` are its planned trials, with what the store has of them. ``pictures`` has the value of each metric per
    picture, the mean over its seeds; only pictures with leakage. ``worst`` is the most revealing single value of each
    metric that has any.
    """

    planned: PlannedCell
    rows: pd.DataFrame
    pictures: pd.DataFrame
    worst: Mapping[str, float]


def observe(ledger: Ledger, trials: pd.DataFrame) -> list[Observation]:
    """Every cell of the ledger, in its order.

    Raises:
        RecordError: If a finished trial has no leakage, or a score that is no finite number.
    """
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
        Observation(
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
