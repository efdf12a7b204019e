"""Columns of every table: how a row of a board's frame is written, and which columns each table has."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import pandas as pd

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.benchmarks.report import numbers
from fedmjp.benchmarks.report.legend import (
    ADDED_HEADING,
    AGAINST_CHANCE,
    AGAINST_HEADING,
    AGAINST_NONE,
    EXACT_FEATURES,
    EXACT_HEADING,
    EXACT_SHARE,
    FEATURE_ERROR,
    HEADINGS,
    LEAKAGE_HEADING,
    MEAN_HEADING,
    MEDIAN_HEADING,
    SHARES,
    name_defence,
)
from fedmjp.benchmarks.report.numbers import CellText, empty, number
from fedmjp.benchmarks.report.percent import percent

Figures = Mapping[Hashable, Any]  # a row of the frame
NOT_RECORDED = "these trials do not say which pictures are flat"
NO_SCORE = "not computed"
NO_TWIN = "nothing to compare with: no scored undefended twin"
NO_MARGINAL = "nothing to compare with: no scored twin without one of them"
NO_FLOOR = "nothing to compare with: no scored grey guess"

# What stands left in its column; the other columns hold numbers.
TEXT = (
    "model", "weights", "defence", "attack", "strongest attack", "setting", "verdict", "protocol", ADDED_HEADING,
    "origin", "source", "row", "differs", "nearest of ours", "server sees", "reason", "submitted by", "claimed",
    "status", "why",
)  # fmt: skip
# Heading by column, where one heading means a column of another name in that table.
_BOTH = {"defended": "defence", "judged": "verdict", "judged reason": "reason"}
_FIGURES = (
    EXACT_HEADING, MEDIAN_HEADING, LEAKAGE_HEADING, "worst", "p95", "recognisable", AGAINST_HEADING, ADDED_HEADING,
)  # fmt: skip
_COSTS = ("top-1 %", "weights", "protocol", "attack s", "upload", "n", "flat", "failed")
RANKED = (
    "rank", "model", "origin", "defence", "mask ratio", "setting", "judged", *_FIGURES, "strongest attack", *_COSTS,
    "judged reason",
)  # fmt: skip
CELLS = (
    "model", "origin", "attack", "defence", "mask ratio", "setting", "verdict", *_FIGURES, "over grey, dB", *_COSTS,
)  # fmt: skip
DISCLOSED = (
    "rank", "model", "origin", "attack", "defended", "server sees", "setting", "judged", EXACT_FEATURES, *SHARES,
    FEATURE_ERROR, AGAINST_CHANCE, AGAINST_NONE, "n", "failed", "attack s", "weights", "judged reason",
)  # fmt: skip
RESULTS = (
    "rank", "server sees", "model", "origin", "defended", "setting", "attack", "judged", EXACT_SHARE, MEDIAN_HEADING,
    MEAN_HEADING, "against no defence, mean dB", "n",
)  # fmt: skip
KEY_FIGURES = (
    "server sees", "model", "defended", "strongest attack", EXACT_SHARE, MEDIAN_HEADING, "grey guess, dB",
    "without defence, dB", "attack s", "n",
)  # fmt: skip
_HEADINGS = {  # by table
    RESULTS: {"n": "pictures", "against no defence, mean dB": AGAINST_HEADING},
    KEY_FIGURES: {"n": "pictures", "attack s": "attack, s per picture"},
}


def write(frame: pd.DataFrame, columns: tuple[str, ...], metrics: Sequence[str] = ()) -> pd.DataFrame:
    """Write rows of a board's frame as a table of ``CellText``.

    Args:
        frame: Rows of ``board_frame``.
        columns: One of the tables above.
        metrics: Metrics that get a column each, with mean and interval, before the reason at the end.

    Returns:
        A column per heading; the index is the frame's, the ids of entries.
    """
    rows = frame.to_dict("records")
    table = {name: [_COLUMNS[name](row) for row in rows] for name in columns}
    table |= {HEADINGS.get(name, name): [metric(row, name) for row in rows] for name in metrics}
    if metrics:
        table["reason"] = [CellText(row["reason"]) for row in rows]
    names = _BOTH | _HEADINGS.get(columns, {})
    return pd.DataFrame(table, index=frame.index, dtype=object).rename(columns=names)


def filled(table: pd.DataFrame) -> pd.DataFrame:
    """Drop the columns that are empty throughout.

    Args:
        table: A table as ``write`` makes it.
    """
    return table.loc[:, (table != "").any()]


def metric(row: Figures, name: str) -> CellText:
    """Write a metric's mean with its interval, or why there is none.

    Args:
        row: A row of the frame.
        name: The metric.
    """
    if row.get(f"{name}_mean") is None:
        return empty(_missing(row))
    return numbers.mean(row[f"{name}_mean"], row[f"{name}_low"], row[f"{name}_high"], name)


def _missing(row: Figures) -> str:
    return NO_SCORE if row["n"] else row["reason"]


def _text(name: str) -> Callable[[Figures], CellText]:
    return lambda row: CellText(str(row[name]))


def _statistic(name: str) -> Callable[[Figures], CellText]:
    def write_statistic(row: Figures) -> CellText:
        value = row.get(f"{LEAKAGE}_{name}")
        return empty(_missing(row)) if value is None else CellText(numbers.score(value, LEAKAGE), value)

    return write_statistic


def _decibels(name: str) -> Callable[[Figures], CellText]:
    return lambda row: empty() if row[name] is None else CellText(numbers.score(row[name], LEAKAGE), row[name])


def _difference(name: str, why: str) -> Callable[[Figures], CellText]:
    def write_difference(row: Figures) -> CellText:
        if row[f"{name}_mean"] is None:
            return empty(why)
        mean, low, high, p = (row[f"{name}_{field}"] for field in ("mean", "low", "high", "p_value"))
        return numbers.difference(mean, low, high, p, MEASURES[row["reveals"]].scale)

    return write_difference


def _against_twin(row: Figures) -> CellText:
    return _difference("over_twin", NO_TWIN)(row) if row["stages"] else empty("not defended")


def _mean_against_twin(row: Figures) -> CellText:
    mean = row["over_twin_mean"]
    return empty() if mean is None else CellText(f"{mean:+.1f}", mean)


def _added(row: Figures) -> CellText:
    if row["stages"] < 2:
        return empty("there are not several defences")
    additions = [f"{gain.defence} {gain.difference.mean:+.1f}" for gain in row["marginal"] if gain.difference]
    return CellText("; ".join(additions)) if additions else empty(NO_MARGINAL)


def _share_of(name: str) -> Callable[[Figures], CellText]:
    def write_share(row: Figures) -> CellText:
        value = row.get(f"{name}_mean")
        return empty(NO_SCORE) if value is None else CellText(percent(value), value)

    return write_share


def _exact(row: Figures) -> CellText:
    if row["exact"] is None:
        return empty(_missing(row))
    return numbers.exact(row["exact"], row["exact_low"], row["exact_high"], row["n"])


def _exact_features(row: Figures) -> CellText:
    return _exact(row) if row.get("feature_error_mean") is not None else empty(NO_SCORE)


def _feature_error(row: Figures) -> CellText:
    median = row.get("feature_error_median")
    return empty(NO_SCORE) if median is None else CellText(numbers.score(median, "feature_error"), median)


def _recognisable(row: Figures) -> CellText:
    shares = [row[f"recognisable_{field}"] for field in ("share", "low", "high")]
    return empty(_missing(row)) if shares[0] is None else numbers.share(*shares)


def _share_exact(row: Figures) -> CellText:
    return empty() if row["exact"] is None else numbers.share(row["exact"], row["exact_low"], row["exact_high"])


def _mean_leakage(row: Figures) -> CellText:
    return metric(row, LEAKAGE) if row.get(f"{LEAKAGE}_mean") is not None else empty()


def _attack(row: Figures) -> CellText:
    return CellText(row["attack"] if row["role"] == "attack" else f"{row['attack']} ({row['role']})")


def _accuracy(row: Figures) -> CellText:
    top1 = row["utility_top1"]
    return number(top1, "" if top1 is None else f"{top1:.1f}", "no accuracy is known for these weights")


def _flat(row: Figures) -> CellText:
    return number(row["flat"], str(row["flat"]), NOT_RECORDED)


_COLUMNS: dict[str, Callable[[Figures], CellText]] = {
    **{name: _text(name) for name in ("model", "defence", "setting", "verdict", "judged", "protocol")},
    "judged reason": _text("judged_reason"),
    "strongest attack": _text("attack"),
    "server sees": _text("view"),
    "attack": _attack,
    "defended": lambda row: CellText(name_defence(row["defence"], row["mask_ratio"])),
    "rank": lambda row: number(row["rank"], str(row["rank"]), "this verdict has no rank"),
    "origin": lambda row: CellText(row["provided"]),
    "mask ratio": lambda row: CellText(f"{row['mask_ratio']:g}", row["mask_ratio"]),
    "weights": lambda row: CellText(numbers.weights(row["weights"])),
    EXACT_HEADING: _exact,
    EXACT_SHARE: _share_exact,
    EXACT_FEATURES: _exact_features,
    MEDIAN_HEADING: _statistic("median"),
    "worst": _statistic("worst"),
    "p95": _statistic("p95"),
    LEAKAGE_HEADING: lambda row: metric(row, LEAKAGE),
    MEAN_HEADING: _mean_leakage,
    "recognisable": _recognisable,
    AGAINST_HEADING: _against_twin,
    "against no defence, mean dB": _mean_against_twin,
    ADDED_HEADING: _added,
    "over grey, dB": _difference("over_floor", NO_FLOOR),
    AGAINST_CHANCE: _difference("over_floor", "nothing to compare with"),
    AGAINST_NONE: _difference("over_twin", "nothing to compare with"),
    "grey guess, dB": _decibels("floor_median"),
    "without defence, dB": _decibels("twin_median"),
    **{heading: _share_of(name) for heading, name in SHARES.items()},
    FEATURE_ERROR: _feature_error,
    "top-1 %": _accuracy,
    "attack s": lambda row: number(row["attack_seconds"], numbers.seconds(row["attack_seconds"]), "not timed"),
    "upload": lambda row: number(row["upload_bytes"], numbers.size(row["upload_bytes"]), "not known"),
    "n": lambda row: numbers.pictures(row["n"], row["uploads"]),
    "flat": _flat,
    "failed": lambda row: CellText(str(row["failures"]), row["failures"]),
}
