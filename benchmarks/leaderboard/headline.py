"""What a cell is known by everywhere: the share of its pictures that is recovered exactly, then the middle leakage."""

import math

from benchmarks.leaderboard.entries import Entry
from benchmarks.leaderboard.measures import MEASURES

NOTHING = (0.0, -math.inf)


def headline(entry: Entry) -> tuple[float, float]:
    """What cells are ordered by: the share recovered exactly, then the middle; the least of all without a score.

    The middle is the median of PSNR for pictures, the share that is found among all for features.
    """
    measure = MEASURES[entry.reveals]
    return (entry.exact.share, getattr(entry.metrics[measure.leakage], measure.centre)) if entry.exact else NOTHING


def exactly(entry: Entry) -> str:
    """How many of the pictures are recovered exactly: ``12 of 46``."""
    return f"{_count(entry)} of {entry.n}"


def _count(entry: Entry) -> int:
    return round(entry.exact.share * entry.n) if entry.exact else 0


def recovery(entry: Entry) -> str:
    """The headline in words: ``12 of 46 exactly, median 20.1 dB``."""
    measure = MEASURES[entry.reveals]
    said = measure.exactly.format(count=_count(entry), n=entry.n)
    return said + measure.middle.format(value=measure.scale * headline(entry)[1]) if entry.exact else "no figures yet"
