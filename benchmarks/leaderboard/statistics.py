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
    def of(cls, values: Mapping[str, float], upload_numbers: Mapping[str, int]) -> Self:
        """Build a sample from named pictures.

        Args:
            values: Value of each picture, by name.
            upload_numbers: Number of the upload that each picture was behind, by name; where empty, all came alone.
        """
        if not upload_numbers:
            return cls.alone(values.values())
        _, places = np.unique([upload_numbers[name] for name in values], return_inverse=True)
        pictures = np.fromiter(values.values(), np.float64)
        sums, sizes = np.bincount(places, pictures), np.bincount(places)
        return cls(pictures, sums.astype(np.float64), sizes.astype(np.float64))

    @classmethod
    def alone(cls, values: Iterable[float]) -> Self:
        """Build a sample of pictures that each had an upload of its own.

        Args:
            values: A value per picture.
        """
        pictures = np.fromiter(values, np.float64)
        return cls(pictures, pictures, np.ones(len(pictures)))

    @property
    def means(self) -> Floats:
        """Return the mean value of each upload (uploads,)."""
        return self.sums / self.sizes


def intervals(samples: Sequence[UploadSample]) -> list[Interval]:
    """Compute the 95 % percentile bootstrap interval of each sample's mean over pictures, resampling uploads.

    Samples of the same uploads share their resamples: these are drawn once, from a seed, and multiplied with all
    samples at once. With uploads of different sizes, a resample's mean is the sum over its pictures divided by their
    number.

    Args:
        samples: The samples.

    Returns:
        Lower and upper bound for each sample, in order; None for a sample of fewer than two uploads.
    """
    ranges: list[Interval] = [None] * len(samples)
    indices_by_sizes: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        if len(sample.sizes) > 1:
            indices_by_sizes.setdefault(sample.sizes.tobytes(), []).append(index)
    for places in indices_by_sizes.values():
        bounds = _percentiles(np.stack([samples[index].sums for index in places]), samples[places[0]].sizes)
        for index, (low, high) in zip(places, bounds, strict=True):
            ranges[index] = (float(low), float(high))
    return ranges


def _percentiles(sums: Floats, sizes: Floats) -> Floats:
    """Compute bounds per row. Centred rows make single precision exact enough and keep constants exact."""
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
    """Summarise one metric over pictures.

    Args:
        values: Value of each picture, the mean over its seeds (pictures,).
        interval: Bounds of the mean, as ``intervals`` computes them.
        worst: The most revealing value of a single trial.
        higher_leaks: Whether higher values reveal more; decides on which side the 95th percentile lies.
    """
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
    """Summarise paired differences, one per picture.

    Args:
        gains: Leakage of the cell minus leakage of its reference.
        interval: Bounds of their mean, as ``intervals`` computes them.
    """
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
    """Compute the p-value of Wilcoxon's signed-rank test with Pratt's zeros, exact up to 13 values.

    The result is that of scipy, which tries the signs of few values with ties one by one: here it is all at once.

    Args:
        values: Differences (n,).
        alternative: Whether their centre may lie on either side of 0, or below it only.
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
    leakage: Mapping[str, float], guess: Mapping[str, float], margin: float, upload_numbers: Mapping[str, int]
) -> float:
    """Compute the signed-rank p-value of the hypothesis that uploads leak at least ``margin`` over the guess.

    Args:
        leakage: Leakage of the attack, by picture.
        guess: Leakage of the guess, by picture.
        margin: Gain over the guess, in the unit of the leakage.
        upload_numbers: Number of the upload that each picture was behind; where empty, all came alone.
    """
    beyond = {name: value - guess[name] - margin for name, value in leakage.items() if name in guess}
    return signed_rank(UploadSample.of(beyond, upload_numbers).means, "less")


def share_below(
    leakage: Mapping[str, float], guess: Mapping[str, float], margin: float, upload_numbers: Mapping[str, int]
) -> float:
    """Compute the binomial p-value of the hypothesis that at least a share ``margin`` of pictures leak.

    The test is exact and counts lucky guesses as leaks. Trials are uploads. Where some pictures of one leak, it counts
    by their share; between the whole numbers the binomial distribution is continued by the incomplete beta function.

    Args:
        leakage: Leakage of the attack, by picture.
        guess: Leakage of the guess, by picture.
        margin: Gain over the guess, in the unit of the leakage.
        upload_numbers: Number of the upload that each picture was behind; where empty, all came alone.
    """
    del guess  # what it has right as well counts as leaked: the test excludes less
    leaked = UploadSample.of({name: float(value > 0) for name, value in leakage.items()}, upload_numbers).means
    hits, n = float(leaked.sum()), len(leaked)
    return float(stats.beta.sf(margin, hits + 1, n - hits)) if hits < n else 1.0


@cache
def share(hits: int, n: int, uploads: int | None = None) -> Share:
    """Compute a share of pictures with Wilson's interval.

    Args:
        hits: Number of pictures that count.
        n: Number of pictures in all.
        uploads: Number of uploads that these were behind; by default each had its own. The interval is that of so many
            trials: it takes pictures of one upload as wholly dependent, which is the cautious end.
    """
    trials, middle = uploads or n, hits / n
    z2 = stats.norm.ppf((1 + CONFIDENCE) / 2) ** 2 / trials
    half = math.sqrt(z2 * (middle * (1 - middle) + z2 / 4))
    low, high = ((middle + z2 / 2 + side) / (1 + z2) for side in (-half, half))
    return Share(share=middle, low=low if hits else 0.0, high=high if hits < n else 1.0)
