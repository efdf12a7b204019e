"""Differential privacy of Gaussian noise, composed over uploads or steps, by Google's ``dp_accounting``.

A *noise multiplier* is the standard deviation of the noise over what one neighbour can change (the sensitivity).
All numbers are for exact arithmetic on real numbers, which noise in whole numbers keeps to (``privacy``) and noise in
floating point, as of an app's own, does not.
"""

import math
from functools import lru_cache

from dp_accounting import PoissonSampledDpEvent, SelfComposedDpEvent, dp_event
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian, get_sigma_gaussian
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant


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
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier)), times))
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=256)
def noise_multiplier(epsilon: float, delta: float, times: int) -> float:
    """Find the smallest noise multiplier with which releases cost no more than epsilon together.

    Args:
        epsilon: Of the guarantee, above 0.
        delta: Of the guarantee, in (0, 1).
        times: Number of releases, from 1.
    """
    return math.sqrt(times) * float(get_sigma_gaussian(epsilon, delta))
