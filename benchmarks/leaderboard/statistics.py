"""Figures over pictures: means with bootstrap intervals, paired differences, shares."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.leaderboard.entries import Difference, Share, Statistics
from fedmjp.seeds import numpy_generator

CONFIDENCE = 0.95
RESAMPLES = 9_999
ENUMERATED = 13  # values up to which scipy tries all signs where some are equal
CHUNK = 16_000_000  # weights at a time
Floats = npt.NDArray[np.float64]
Interval = tuple[float, float] | None


def intervals(samples: Sequence[Floats]) -> list[Interval]:
    """95 % percentile bootstrap interval of each sample's mean; none below two values.

    Samples of one length share their resamples: drawn once, from a seed, and multiplied with all of them together.
    """
    ranges: list[Interval] = [None] * len(samples)
    for n in sorted({len(sample) for sample in samples if len(sample) > 1}):
        places = [index for index, sample in enumerate(samples) if len(sample) == n]
        bounds = _percentiles(np.stack([samples[index] for index in places]))
        for index, (low, high) in zip(places, bounds, strict=True):
            ranges[index] = (float(low), float(high))
    return ranges


def _percentiles(samples: Floats) -> Floats:
    """Bounds per row. Rows are centred first: single precision is then exact enough, and constants stay exact."""
    count, n = samples.shape
    centres = samples.mean(axis=1, keepdims=True)
    centred = (samples - centres).astype(np.float32)
    generator = numpy_generator(0, "bootstrap", n)
    means = np.empty((count, RESAMPLES), dtype=np.float32)
    step = max(1, CHUNK // n)
    for start in range(0, RESAMPLES, step):
        rows = min(step, RESAMPLES - start)
        drawn = generator.integers(0, n, size=(rows, n)) + n * np.arange(rows)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float32)
        means[:, start : start + rows] = centred @ weights.T / n
    tail = (1 - CONFIDENCE) / 2
    bounds: Floats = centres + np.quantile(means, [tail, 1 - tail], axis=1).T.astype(np.float64)
    return bounds


def statistics(values: Floats, interval: Interval, *, worst: float, higher_leaks: bool) -> Statistics:
    """One metric over pictures; ``worst`` is the most revealing single trial."""
    low, high = interval or (None, None)
    return Statistics(
        mean=float(values.mean()),
        low=low,
        high=high,
        median=float(np.median(values)),
        p95=float(np.percentile(values, 95 if higher_leaks else 5)),
        worst=worst,
    )


def difference(values: Floats, interval: Interval) -> Difference:
    """Paired differences, one per picture."""
    low, high = interval or (None, None)
    return Difference(mean=float(values.mean()), low=low, high=high, p_value=_p_value(values), n=len(values))


def _p_value(values: Floats) -> float | None:
    if len(values) < 2:
        return None
    if not values.any():
        return 1.0
    return signed_rank(values)


def signed_rank(values: Floats, alternative: Literal["two-sided", "less"] = "two-sided") -> float:
    """P-value of Wilcoxon's signed-rank test with Pratt's zeros, exact up to 13 values.

    It is that of scipy, which tries the signs of few values with ties one by one: here it is all at once.
    """
    n = len(values)
    if n > ENUMERATED:
        return float(stats.wilcoxon(values, alternative=alternative, zero_method="pratt").pvalue)
    ranks = stats.rankdata(np.abs(values)) * (values != 0)
    positive = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    sums, observed = positive @ ranks, ranks[values > 0].sum()
    less, greater = float(np.mean(sums <= observed)), float(np.mean(sums >= observed))
    return less if alternative == "less" else min(1.0, 2 * less, 2 * greater)


def gain_below(leakage: Mapping[str, float], guess: Mapping[str, float], margin: float) -> float:
    """P-value of the signed-rank test that pictures leak ``margin`` more than the guess, or more than that."""
    beyond = [value - guess[name] - margin for name, value in leakage.items() if name in guess]
    return signed_rank(np.array(beyond), "less")


def share_below(leakage: Mapping[str, float], guess: Mapping[str, float], margin: float) -> float:
    """P-value of the exact binomial test that a share ``margin`` of the pictures leak or more, guesses among them."""
    del guess  # what it has right as well counts as leaked: the test excludes less
    hits = sum(value > 0 for value in leakage.values())
    return float(stats.binomtest(hits, len(leakage), margin, alternative="less").pvalue)


@cache
def share(hits: int, n: int) -> Share:
    """Share of pictures with its Wilson interval."""
    interval = stats.binomtest(hits, n).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return Share(share=hits / n, low=float(interval.low), high=float(interval.high))
