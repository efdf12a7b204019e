"""Figures over pictures, against SciPy and against slow loops."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedmjp.benchmarks.leaderboard.statistics import (
    RESAMPLES,
    UploadSample,
    difference,
    intervals,
    share,
    share_below,
    signed_rank,
    statistics,
)


def sample(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).gamma(2.0, 5.0, n)


def alone(values) -> UploadSample:
    return UploadSample.alone(np.asarray(values))


@pytest.mark.parametrize("n", [8, 50, 500])
def test_interval_is_that_of_scipy_within_monte_carlo_error(n):
    values = sample(n)
    found = intervals([alone(values)])[0]
    oracle = stats.bootstrap((values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=1).confidence_interval
    error = values.std() / np.sqrt(n)
    assert found == pytest.approx((oracle.low, oracle.high), abs=0.2 * error)
    assert found != (oracle.low, oracle.high)


def test_interval_is_that_of_a_slow_loop_within_monte_carlo_error():
    values = sample(20)
    draw = np.random.default_rng(2)
    means = [draw.choice(values, len(values)).mean() for _ in range(5_000)]
    error = values.std() / np.sqrt(len(values))
    assert intervals([alone(values)])[0] == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.2 * error)


def test_interval_does_not_depend_on_what_is_computed_beside_it():
    values = [alone(sample(8, 1)), alone(sample(8, 2)), alone(sample(30, 3))]
    beside = intervals(values)
    by_itself = [intervals([one])[0] for one in values]
    np.testing.assert_allclose(beside, by_itself, rtol=1e-6)


def test_interval_of_many_pictures_is_drawn_in_pieces(monkeypatch):
    values = [alone(sample(40))]
    whole = intervals(values)
    monkeypatch.setattr("fedmjp.benchmarks.leaderboard.statistics.CHUNK", 40 * 1_000)
    error = values[0].values.std() / np.sqrt(40)
    assert intervals(values)[0] == pytest.approx(whole[0], abs=0.2 * error)


def test_interval_of_one_picture_is_none():
    assert intervals([alone([3.0]), alone([])]) == [None, None]


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 200), st.integers(2, 12))
def test_interval_of_equal_values_is_that_value(value, n):
    low, high = intervals([alone(np.full(n, value))])[0]
    assert low == pytest.approx(value, abs=1e-12)
    assert high == pytest.approx(value, abs=1e-12)


def test_interval_of_a_capped_value_among_low_ones_stays_in_range():
    low, high = intervals([alone([200.0, 10, 11, 12, 13, 9])])[0]
    assert 9 <= low < 42.5 < high <= 200


def test_interval_holds_the_true_mean_about_as_often_as_it_says():
    samples = [alone(np.random.default_rng(seed).normal(7, 2, 100)) for seed in range(200)]
    hits = sum(low <= 7 <= high for low, high in intervals(samples))
    assert stats.binomtest(hits, 200, 0.95).pvalue > 1e-4


@pytest.mark.parametrize(("higher_leaks", "p95"), [(True, 9.5), (False, 0.5)])
def test_statistics_look_towards_revealing(higher_leaks, p95):
    found = statistics(np.arange(11.0), (1, 2), worst=11.0, higher_leaks=higher_leaks)
    assert (found.mean, found.median, found.p95, found.worst) == (5, 5, p95, 11)
    assert (found.low, found.high) == (1, 2)


def test_difference_tests_signed_ranks():
    values = np.array([1.0, 2, 3, -0.5, 4, 5, 0])
    found = difference(alone(values), (0, 1))
    assert found.p_value == stats.wilcoxon(values, zero_method="pratt").pvalue
    assert found.n == 7


@pytest.mark.parametrize(
    "values", [[1, 1, -2], [0, 3, 3, -1, 0], [0.5, 2, 3, -1, 4, 6], [2, 2, 2, 2, 2, -2, 0, 5], [-1] * 7]
)
@pytest.mark.parametrize("alternative", ["two-sided", "less"])
def test_signed_ranks_of_few_values_are_those_of_scipy_with_ties_and_zeros(values, alternative):
    expected = stats.wilcoxon(values, alternative=alternative, zero_method="pratt").pvalue
    assert signed_rank(np.array(values, float), alternative) == pytest.approx(expected, abs=1e-12)


def test_difference_of_nothing_has_p_one():
    assert difference(alone(np.zeros(5)), (0, 0)).p_value == 1


def test_difference_of_one_picture_has_no_p():
    found = difference(alone([3.0]), None)
    assert (found.mean, found.low, found.high, found.p_value, found.n) == (3, None, None, None, 1)


@pytest.mark.parametrize(("hits", "n"), [(0, 8), (3, 8), (8, 8)])
def test_share_has_the_interval_of_wilson(hits, n):
    found = share(hits, n)
    z = stats.norm.ppf(0.975)
    p = hits / n
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert (found.share, found.low, found.high) == pytest.approx((p, centre - half, centre + half), abs=1e-9)


UPLOADS = (1, 4, 2, 8, 3, 8, 5, 1, 6, 4)  # pictures of each
TOGETHER = {f"{upload}-{place}": upload for upload, size in enumerate(UPLOADS) for place in range(size)}


def of_uploads(seed: int = 0) -> dict[str, float]:
    """Values by picture: a level per upload, and a little beside."""
    draw = np.random.default_rng(seed)
    levels = draw.gamma(2.0, 5.0, len(UPLOADS))
    return {name: levels[upload] + draw.normal() for name, upload in TOGETHER.items()}


def test_interval_over_uploads_of_unequal_sizes_is_that_of_scipy_for_a_ratio_of_sums():
    values = of_uploads()
    sums = [sum(values[name] for name in values if TOGETHER[name] == upload) for upload in range(len(UPLOADS))]
    oracle = stats.bootstrap(
        (np.array(sums), np.array(UPLOADS)),
        lambda totals, sizes, axis: totals.sum(axis) / sizes.sum(axis),
        paired=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=1,
    )
    expected = oracle.confidence_interval
    found = intervals([UploadSample.of(values, TOGETHER)])[0]
    assert found == pytest.approx((expected.low, expected.high), abs=0.2 * oracle.standard_error)
    (low, high) = intervals([alone(list(values.values()))])[0]
    assert found[1] - found[0] > 1.3 * (high - low), "pictures of one upload are no evidence of their own"


def test_equal_pictures_of_an_upload_count_as_one_picture():
    levels = {str(upload): value for upload, value in enumerate(sample(9))}
    values = {f"{upload}-{place}": value for upload, value in levels.items() for place in range(8)}
    repeated = UploadSample.of(values, {name: int(name[0]) for name in values})
    once = UploadSample.of(levels, {})
    np.testing.assert_allclose(intervals([repeated]), intervals([once]), rtol=1e-5)
    measured = [difference(gains, None) for gains in (repeated, once)]
    assert measured[0].p_value == pytest.approx(measured[1].p_value, abs=1e-12)
    assert [one.n for one in measured] == [72, 9]
    assert share(24, 72, 9).low == pytest.approx(share(3, 9).low, abs=1e-12)
    right = {name: float(name[0] == "0") for name in values}
    label = share_below(right, {}, 0.3, {name: int(name[0]) for name in right})
    assert label == pytest.approx(stats.binomtest(1, 9, 0.3, alternative="less").pvalue, abs=1e-12)


def test_intervals_over_uploads_hold_the_true_mean_where_those_over_pictures_do_not():
    """240 boards of 40 uploads; what the pictures of one share has as much variance as what they do not."""
    draw = np.random.default_rng(5)
    together = {str(place): place // 8 for place in range(320)}
    noise = draw.normal(7, 1, (240, 40)).repeat(8, axis=1) + draw.normal(0, 1, (240, 320))
    boards = [dict(zip(together, values, strict=True)) for values in noise.tolist()]
    hits = [
        sum(low <= 7 <= high for low, high in intervals([UploadSample.of(values, units) for values in boards]))
        for units in (together, {})
    ]
    assert hits[0] > 0.9 * 240
    assert hits[1] < 0.75 * 240


def test_a_share_of_an_upload_counts_between_whole_numbers():
    """Wilson's formula at 2.5 of 6, and a binomial test between those of 2 and of 3."""
    found, p, z = share(20, 48, 6), 2.5 / 6, stats.norm.ppf(0.975)
    centre, half = p + z**2 / 12, z * np.sqrt(p * (1 - p) / 6 + z**2 / 144)
    bounds = [(centre - half) / (1 + z**2 / 6), (centre + half) / (1 + z**2 / 6)]
    assert (found.share, found.low, found.high) == pytest.approx((p, *bounds), abs=1e-12)
    leaked = {str(place): float(place < 20) for place in range(48)}
    exact = [stats.binomtest(hits, 6, 0.7, alternative="less").pvalue for hits in (2, 3)]
    assert exact[0] < share_below(leaked, {}, 0.7, {name: int(name) // 8 for name in leaked}) < exact[1]


def test_a_thousand_intervals_over_five_hundred_pictures_take_seconds():
    samples = [alone(values) for values in np.random.default_rng(0).normal(15, 3, (1_000, 500))]
    start = time.process_time()
    intervals(samples)
    assert time.process_time() - start < 30  # a third of a second each, one by one, is minutes
