"""What a cell is known by everywhere: the share of its pictures that is recovered exactly, then the middle leakage."""

import math

from fedmjp.benchmarks.leaderboard.entries import BoardEntry
from fedmjp.benchmarks.leaderboard.measures import MEASURES

NOTHING = (0.0, -math.inf)


def headline(entry: BoardEntry) -> tuple[float, float]:
    """What cells are ordered by: the share recovered exactly, then the middle; the least of all without a score.

    The middle is the median of PSNR for pictures, the share that is found among all for features.
    """
    measure = MEASURES[entry.reveals]
    return (entry.exact.share, getattr(entry.metrics[measure.leakage], measure.centre)) if entry.exact else NOTHING


def exactly(entry: BoardEntry) -> str:
    """How many of the pictures are recovered exactly: ``12 of 46``."""
    return f"{_count(entry)} of {entry.n}"


def _count(entry: BoardEntry) -> int:
    return round(entry.exact.share * entry.n) if entry.exact else 0


def recovery(entry: BoardEntry) -> str:
    """The headline in words: ``12 of 46 exactly, median 20.1 dB``, ``12 of 64 exactly from 8 uploads, ...``."""
    if not entry.exact:
        return "no figures yet"
    measure = MEASURES[entry.reveals]
    said = measure.exactly.format(count=_count(entry), n=entry.n)
    said += f" from {uploads(entry)}" if entry.together else ""
    return said + measure.middle.format(value=measure.scale * headline(entry)[1])


def uploads(entry: BoardEntry) -> str:
    """How many uploads its pictures were behind: ``8 uploads``."""
    return "1 upload" if entry.uploads == 1 else f"{entry.uploads} uploads"


def pictures(entry: BoardEntry) -> str:
    """How many pictures count: ``64 pictures``, ``64 pictures of 8 uploads`` where some came together."""
    counted = "1 picture" if entry.n == 1 else f"{entry.n} pictures"
    return f"{counted} of {uploads(entry)}" if entry.together else counted
