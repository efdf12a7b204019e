"""Areas under the curve and rates with their intervals, for what an audit tells of examples and labels."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binomtest, norm, rankdata
from torch import Tensor

LEVEL = 0.95
ROOT = 1e-9
Interval = tuple[float, float]


def area_under_curve(members: Tensor, negatives: Tensor) -> float:
    """Compute the share of pairs in which the member has the higher score; a tie is half a pair.

    Args:
        members: Scores (m,).
        negatives: Scores (n,) of examples that are no members.
    """
    ranks = rankdata(np.concatenate([members.numpy(), negatives.numpy()]))[: len(members)]
    return float((ranks.sum() - len(members) * (len(members) + 1) / 2) / (len(members) * len(negatives)))


def area_interval(area: float, members: int, negatives: int, level: float = LEVEL) -> Interval:
    """Compute an interval of an area under the curve, which has a width at areas of 0 and 1 as well.

    Bounds are the areas from which the one that was measured is ``level``'s number of Hanley and McNeil's standard
    errors away, with these at the bound: Newcombe, Statistics in Medicine, 2006, part 2, method 5. DeLong's interval
    has no width where members and others come apart.

    Args:
        area: Measured one, 0 to 1.
        members: How many scores there are of members.
        negatives: How many of others.
        level: Of confidence, 0 to 1.
    """
    reach, half = float(norm.ppf((1 + level) / 2)), (members + negatives) / 2 - 1

    def excess(bound: float) -> float:
        spread = 1 + half * ((1 - bound) / (2 - bound) + bound / (1 + bound))
        return float((area - bound) ** 2 - reach**2 * bound * (1 - bound) * spread / (members * negatives))

    # An area of 0 or 1 is a root of its own, which says nothing.
    low = brentq(excess, 0, area - ROOT) if area > ROOT else 0.0
    high = brentq(excess, area + ROOT, 1) if area < 1 - ROOT else 1.0
    return float(low), float(high)


def rate_interval(hits: int, tries: int) -> Interval:
    """Compute Clopper and Pearson's 95 % interval of a rate.

    Args:
        hits: How often it came true.
        tries: How often it could.
    """
    interval = binomtest(hits, tries).proportion_ci(LEVEL, method="exact")
    return float(interval.low), float(interval.high)


def rate_at(members: Tensor, negatives: Tensor, false_rate: float) -> list[float] | None:
    """Measure the share of members above all others but a rate of them, with its interval.

    Args:
        members: Scores (m,).
        negatives: Scores (n,).
        false_rate: Share of the others that may be taken for members.

    Returns:
        Rate and bounds; None where the others are too few to speak of such a share.
    """
    allowed = int(false_rate * len(negatives) + 1e-9)
    if not allowed:
        return None
    hits = int((members > negatives.sort(descending=True).values[allowed]).sum())
    return rounded([hits / len(members), *rate_interval(hits, len(members))])


def rounded(values: Sequence[float]) -> list[float]:
    """Round rates for a report.

    Args:
        values: Rates, 0 to 1.
    """
    return [round(float(value), 4) for value in values]
