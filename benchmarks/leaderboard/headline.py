"""What a cell is known by everywhere: the share of its pictures that is recovered exactly, then the median leakage."""

import math

from benchmarks.leaderboard.entries import LEAKAGE, Entry


def headline(entry: Entry) -> tuple[float, float]:
    """What cells are ordered by: the share recovered exactly, then the median; the least of all without a score."""
    return (entry.exact.share, entry.metrics[LEAKAGE].median) if entry.exact else (0.0, -math.inf)


def exactly(entry: Entry) -> str:
    """How many of the pictures are recovered exactly: ``12 of 46``."""
    return f"{round(entry.exact.share * entry.n) if entry.exact else 0} of {entry.n}"


def recovery(entry: Entry) -> str:
    """The headline in words: ``12 of 46 exactly, median 20.1 dB``."""
    return f"{exactly(entry)} exactly, median {headline(entry)[1]:.1f} dB" if entry.exact else "no figures yet"
