"""Differential privacy of Gaussian noise, composed over uploads or steps, by Google's ``dp_accounting``.

A *noise multiplier* is the standard deviation of the noise over what one neighbour can change (the sensitivity).
All numbers are for exact arithmetic on real numbers; floating-point noise comes close to that.
"""

import math
from functools import lru_cache

from dp_accounting import PoissonSampledDpEvent, SelfComposedDpEvent, dp_event, mechanism_calibration
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian, get_sigma_gaussian
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

TOLERANCE = 1e-3  # of a calibrated multiplier; the error is on the safe side
STRIDE = 1.25
COARSE = 1e-3  # grid of privacy losses on which multipliers are searched


@lru_cache(maxsize=256)
def composed_epsilon(multiplier: float, delta: float, times: int, rate: float = 1.0) -> float:
    """Compute the epsilon that releases with Gaussian noise cost together.

    Without sampling this is exact (Balle and Wang, ICML 2018: n releases are one with the noise of a single one
    over the root of n). With a rate below 1 it is the upper bound of privacy loss distributions (PLD).

    Args:
        multiplier: Noise multiplier of a release.
        delta: Of the guarantee, in (0, 1).
        times: Number of releases, from 0.
        rate: Probability with which each example takes part in a release (Poisson sampling).
    """
    if times == 0:
        return 0.0
    if rate == 1:
        return float(get_epsilon_gaussian(multiplier / math.sqrt(times), delta))
    return _sampled_epsilon(PLDAccountant(), multiplier, delta, times, rate)


@lru_cache(maxsize=256)
def noise_multiplier(epsilon: float, delta: float, times: int, rate: float = 1.0) -> float:
    """Find the smallest noise multiplier with which releases cost no more than epsilon together.

    Args:
        epsilon: Of the guarantee, above 0.
        delta: Of the guarantee, in (0, 1).
        times: Number of releases, from 1.
        rate: Probability with which each example takes part in a release (Poisson sampling).
    """
    unsampled = math.sqrt(times) * float(get_sigma_gaussian(epsilon, delta))
    if rate == 1:
        return unsampled
    # Sampling only helps, and PLD takes long where there is little noise: go down in short steps.
    # A coarse grid overstates epsilon by little and is ten times as fast.
    grid = min(COARSE, COARSE * epsilon)
    low = high = unsampled
    while _sampled_epsilon(PLDAccountant(value_discretization_interval=grid), low, delta, times, rate) <= epsilon:
        low, high = low / STRIDE, low
    return float(
        mechanism_calibration.calibrate_dp_mechanism(
            lambda: PLDAccountant(value_discretization_interval=grid),
            lambda multiplier: _sampled(multiplier, times, rate),
            epsilon,
            delta,
            mechanism_calibration.ExplicitBracketInterval(low, high),
            tol=TOLERANCE * high,
        )
    )


def _sampled_epsilon(accountant: PLDAccountant, multiplier: float, delta: float, times: int, rate: float) -> float:
    accountant.compose(_sampled(multiplier, times, rate))
    return float(accountant.get_epsilon(delta))


def _sampled(multiplier: float, times: int, rate: float) -> dp_event.DpEvent:
    return SelfComposedDpEvent(PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier)), times)
