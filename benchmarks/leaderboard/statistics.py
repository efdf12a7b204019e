"""Figures over pictures: means with bootstrap intervals, paired differences, shares.

Pictures of one upload are not independent, so that intervals resample uploads, and tests take a value per upload.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedmjp.benchmarks.leaderboard.entries import Difference, Share, Statistics
from fedmjp.seeds import numpy_generator

CONFIDENCE = 0.95
RESAMPLES = 9_999
ENUMERATED = 13  # values up to which scipy tries all signs where some are equal
CHUNK = 16_000_000  # weights at a time
Floats = npt.NDArray[np.float64]
Interval = tuple[float, float] | None


class UploadSample(NamedTuple):
    """Values of pictures, and their sums and numbers over each upload; a picture that came alone is its own."""

    values: Floats
    sums: Floats
    sizes: Floats

    @classmethod
    def of(cls, values: Mapping[str, float], together: Mapping[str, int]) -> Self:
        """Of values by picture, and the number of each one's upload; where ``together`` is empty, all came alone."""
        if not together:
            return cls.alone(values.values())
        _, places = np.unique([together[name] for name in values], return_inverse=True)
        pictures = np.fromiter(values.values(), np.float64)
        sums, sizes = np.bincount(places, pictures), np.bincount(places)
        return cls(pictures, sums.astype(np.float64), sizes.astype(np.float64))

    @classmethod
    def alone(cls, values: Iterable[float]) -> Self:
        """Of pictures that each had an upload of its own."""
        pictures = np.fromiter(values, np.float64)
        return cls(pictures, pictures, np.ones(len(pictures)))

    @property
    def means(self) -> Floats:
        """A value per upload."""
        return self.sums / self.sizes


def intervals(samples: Sequence[UploadSample]) -> list[Interval]:
    """95 % percentile bootstrap interval of each sample's mean over pictures, from uploads; none below two uploads.

    Samples of the same uploads share their resamples: drawn once, from a seed, and multiplied with all of them
    together. Of uploads of different sizes, a resample's mean is the sum over its pictures by their number.
    """
    ranges: list[Interval] = [None] * len(samples)
    alike: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        if len(sample.sizes) > 1:
            alike.setdefault(sample.sizes.tobytes(), []).append(index)
    for places in alike.values():
        bounds = _percentiles(np.stack([samples[index].sums for index in places]), samples[places[0]].sizes)
        for index, (low, high) in zip(places, bounds, strict=True):
            ranges[index] = (float(low), float(high))
    return ranges


def _percentiles(sums: Floats, sizes: Floats) -> Floats:
    """Bounds per row. Rows are centred first: single precision is then exact enough, and constants stay exact."""
    count, n = sums.shape
    centres = sums.sum(axis=1, keepdims=True) / sizes.sum()
    centred = (sums - centres * sizes).astype(np.float32)
    generator = numpy_generator(0, "bootstrap", n)
    means = np.empty((count, RESAMPLES), dtype=np.float32)
    step = max(1, CHUNK // n)
    for start in range(0, RESAMPLES, step):
        rows = min(step, RESAMPLES - start)
        drawn = generator.integers(0, n, size=(rows, n)) + n * np.arange(rows)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n).astype(np.float32)
        means[:, start : start + rows] = centred @ weights.T / (weights @ sizes.astype(np.float32))
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


def difference(gains: UploadSample, interval: Interval) -> Difference:
    """Paired differences, one per picture."""
    low, high = interval or (None, None)
    return Difference(
        mean=float(gains.values.mean()), low=low, high=high, p_value=_p_value(gains.means), n=len(gains.values)
    )


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


def gain_below(
    leakage: Mapping[str, float], guess: Mapping[str, float], margin: float, together: Mapping[str, int]
) -> float:
    """P-value of the signed-rank test that uploads leak ``margin`` more than the guess, or more than that."""
    beyond = {name: value - guess[name] - margin for name, value in leakage.items() if name in guess}
    return signed_rank(UploadSample.of(beyond, together).means, "less")


def share_below(
    leakage: Mapping[str, float], guess: Mapping[str, float], margin: float, together: Mapping[str, int]
) -> float:
    """P-value of the exact binomial test that a share ``margin`` of the pictures leak or more, guesses among them.

    Trials are uploads. Where some pictures of one leak, it counts by their share, between the whole numbers by the
    incomplete beta function, which the binomial distribution is at these.
    """
    del guess  # what it has right as well counts as leaked: the test excludes less
    leaked = UploadSample.of({name: float(value > 0) for name, value in leakage.items()}, together).means
    hits, n = float(leaked.sum()), len(leaked)
    return float(stats.beta.sf(margin, hits + 1, n - hits)) if hits < n else 1.0


@cache
def share(hits: int, n: int, uploads: int | None = None) -> Share:
    """Share of pictures with Wilson's interval.

    Args:
        hits: How many.
        n: Of how many pictures.
        uploads: Behind how many uploads these were; by default each had its own. The interval is that of so many
            trials: it takes pictures of one upload as wholly dependent, which is the cautious end.
    """
    trials, middle = uploads or n, hits / n
    z2 = stats.norm.ppf((1 + CONFIDENCE) / 2) ** 2 / trials
    half = math.sqrt(z2 * (middle * (1 - middle) + z2 / 4))
    low, high = ((middle + z2 / 2 + side) / (1 + z2) for side in (-half, half))
    return Share(share=middle, low=low if hits else 0.0, high=high if hits < n else 1.0)
