"""Figures over pictures, against SciPy and against slow loops."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks.leaderboard.statistics import RESAMPLES, difference, intervals, share, signed_rank, statistics


def sample(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).gamma(2.0, 5.0, n)


@pytest.mark.parametrize("n", [8, 50, 500])
def test_interval_is_that_of_scipy_within_monte_carlo_error(n):
    values = sample(n)
    found = intervals([values])[0]
    oracle = stats.bootstrap((values,), np.mean, n_resamples=RESAMPLES, method="percentile", rng=1).confidence_interval
    error = values.std() / np.sqrt(n)
    assert found == pytest.approx((oracle.low, oracle.high), abs=0.2 * error)
    assert found != (oracle.low, oracle.high)


def test_interval_is_that_of_a_slow_loop_within_monte_carlo_error():
    values = sample(20)
    draw = np.random.default_rng(2)
    means = [draw.choice(values, len(values)).mean() for _ in range(5_000)]
    error = values.std() / np.sqrt(len(values))
    assert intervals([values])[0] == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.2 * error)


def test_interval_does_not_depend_on_what_is_computed_beside_it():
    values = [sample(8, 1), sample(8, 2), sample(30, 3)]
    together = intervals(values)
    alone = [intervals([each])[0] for each in values]
    np.testing.assert_allclose(together, alone, rtol=1e-6)


def test_interval_of_many_pictures_is_drawn_in_pieces(monkeypatch):
    values = [sample(40)]
    whole = intervals(values)
    monkeypatch.setattr("benchmarks.leaderboard.statistics.CHUNK", 40 * 1_000)
    error = values[0].std() / np.sqrt(40)
    assert intervals(values)[0] == pytest.approx(whole[0], abs=0.2 * error)


def test_interval_of_one_picture_is_none():
    assert intervals([np.array([3.0]), np.array([])]) == [None, None]


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 200), st.integers(2, 12))
def test_interval_of_equal_values_is_that_value(value, n):
    low, high = intervals([np.full(n, value)])[0]
    assert low == pytest.approx(value, abs=1e-12)
    assert high == pytest.approx(value, abs=1e-12)


def test_interval_of_a_capped_value_among_low_ones_stays_in_range():
    low, high = intervals([np.array([200.0, 10, 11, 12, 13, 9])])[0]
    assert 9 <= low < 42.5 < high <= 200


def test_interval_holds_the_true_mean_about_as_often_as_it_says():
    samples = [np.random.default_rng(seed).normal(7, 2, 100) for seed in range(200)]
    hits = sum(low <= 7 <= high for low, high in intervals(samples))
    assert stats.binomtest(hits, 200, 0.95).pvalue > 1e-4


@pytest.mark.parametrize(("higher_leaks", "p95"), [(True, 9.5), (False, 0.5)])
def test_statistics_look_towards_revealing(higher_leaks, p95):
    found = statistics(np.arange(11.0), (1, 2), worst=11.0, higher_leaks=higher_leaks)
    assert (found.mean, found.median, found.p95, found.worst) == (5, 5, p95, 11)
    assert (found.low, found.high) == (1, 2)


def test_difference_tests_signed_ranks():
    values = np.array([1.0, 2, 3, -0.5, 4, 5, 0])
    found = difference(values, (0, 1))
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
    assert difference(np.zeros(5), (0, 0)).p_value == 1


def test_difference_of_one_picture_has_no_p():
    found = difference(np.array([3.0]), None)
    assert (found.mean, found.low, found.high, found.p_value, found.n) == (3, None, None, None, 1)


@pytest.mark.parametrize(("hits", "n"), [(0, 8), (3, 8), (8, 8)])
def test_share_has_the_interval_of_wilson(hits, n):
    found = share(hits, n)
    z = stats.norm.ppf(0.975)
    p = hits / n
    centre = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert (found.share, found.low, found.high) == pytest.approx((p, centre - half, centre + half), abs=1e-9)


def test_a_thousand_intervals_over_five_hundred_pictures_take_seconds():
    samples = list(np.random.default_rng(0).normal(15, 3, (1_000, 500)))
    start = time.process_time()
    intervals(samples)
    assert time.process_time() - start < 30  # a third of a second each, one by one, is minutes
