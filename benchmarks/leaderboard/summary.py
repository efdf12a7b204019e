"""From trials to the leaderboard: one row per cell, statistics over pictures."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from benchmarks.experiment import Cell, PlannedTrial
from fedmjp.metrics import metric
from fedmjp.seeds import numpy_generator
from fedmjp.store import Trial

CELL_COLUMNS = ["model", "defence", "mask_ratio", "attack", "role", "setting", "protocol"]
CONFIDENCE = 0.95
RESAMPLES = 9_999


def leaderboard(planned: Sequence[PlannedTrial], trials: Sequence[Trial], metrics: Sequence[str]) -> pd.DataFrame:
    """Summarise trials by cell, in the order of the plan.

    Args:
        planned: All trials of the experiment; a cell without any row still gets its line.
        trials: What the store has of them.
        metrics: Names, in the order of the columns.

    Returns:
        The cell's columns, ``n`` (finished), ``failures``, and for each metric ``_mean``, ``_median``,
        ``_low`` and ``_high`` (95 % bootstrap interval of the mean over pictures) and ``_worst`` (the
        most revealing picture). Missing where there is no value; the interval also below two pictures.
    """
    by_key = {trial.key: trial for trial in trials}
    cells: dict[Cell, list[Trial | None]] = {}
    for plan in planned:
        cells.setdefault(plan.cell, []).append(by_key.get(plan.key))
    return pd.DataFrame([_row(cell, found, metrics) for cell, found in cells.items()])


def _row(cell: Cell, trials: Sequence[Trial | None], metrics: Sequence[str]) -> dict[str, object]:
    finished = [trial for trial in trials if trial is not None and trial.status == "ok"]
    row: dict[str, object] = {column: getattr(cell, column) for column in CELL_COLUMNS}
    row["setting"] = str(cell.setting)
    row |= {"n": len(finished), "failures": sum(trial is not None and trial.status == "failed" for trial in trials)}
    for name in metrics:
        values = np.array([trial.scores[name] for trial in finished if trial.scores.get(name) is not None], dtype=float)
        row |= {f"{name}_{statistic}": value for statistic, value in summary(values, name).items()}
    return row


def summary(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], name: str) -> dict[str, float | None]:
    """Mean, median, 95 % bootstrap interval of the mean, and the most revealing value of one metric.

    The resampling is seeded, so that the same trials give the same table.
    """
    if len(values) == 0:
        return dict.fromkeys(("mean", "median", "low", "high", "worst"))
    low: float | None = None
    high: float | None = None
    if len(values) > 1:
        interval = stats.bootstrap(
            (values,),
            np.mean,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=numpy_generator(0, "bootstrap"),
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    worst = values.max() if metric(name).higher_leaks else values.min()
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "low": low,
        "high": high,
        "worst": float(worst),
    }
