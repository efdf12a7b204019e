"""Checks for figures that no honest entry can have, and for data that contradict those of its references."""

import math
import re
from collections.abc import Iterator, Sequence, Set
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE, BoardEntry, Provenance
from fedmjp.benchmarks.leaderboard.measures import MEASURES
from fedmjp.config import MAX_SEED, ModelConfig
from fedmjp.metrics import metric
from fedmjp.texts import UNPRINTABLE

ROUNDING = 1e-6
ERROR = "mse"
LARGEST_SCORE = 1e30  # single precision computes with it
LONGEST_TEXT = 2000  # letters
SHA256 = re.compile("[0-9a-f]{64}")


def odd_texts(content: Any) -> Iterator[str]:
    """Yield faults of a submission's texts, keys among them: too long, or with letters that a terminal would obey.

    Args:
        content: The submission, as parsed JSON.
    """
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and (len(value) > LONGEST_TEXT or UNPRINTABLE.search(value)):
            fault = f"is longer than {LONGEST_TEXT:,} letters" if len(value) > LONGEST_TEXT else "cannot be printed"
            yield f"the text {value[:40]!a} {fault}"


def impossible_figures(entry: BoardEntry) -> Iterator[str]:
    """Yield metrics and shares that lie out of range or contradict each other.

    Args:
        entry: A submitted cell.
    """
    trials = _trials_per_picture(entry)
    for picture, value in (entry.flat or {}).items():
        yield from _outside(LEAKAGE, f"of {picture!r}", value, trials)
    for name, values in entry.scores.items():
        for picture, value in values.items():
            yield from _outside(name, f"of {picture!r}", value, trials)
        yield from _outside(name, "worst", entry.metrics[name].worst, 1)
        yield from _not_the_worst(name, list(values.values()), entry.metrics[name].worst, trials)
    yield from _against_leakage(entry, trials)
    yield from _found_among_fewer(entry)
    if (entry.realised_ratio or 0) > entry.mask_ratio + ROUNDING:
        yield f"{entry.realised_ratio:g} of the patches were masked, but its defences mask {entry.mask_ratio:g} at most"


def _trials_per_picture(entry: BoardEntry) -> int:
    """Count the trials that a score may be the mean of."""
    return 1 if entry.trials == entry.n + len(entry.flat or ()) else len(entry.provenance.seeds)


def _outside(name: str, field: str, value: float, trials: int) -> Iterator[str]:
    definition = metric(name)
    possible = definition.lowest - ROUNDING <= value <= min(definition.highest, LARGEST_SCORE) + ROUNDING
    if possible and definition.whole:
        possible = abs(Fraction(value).limit_denominator(trials) - value) <= ROUNDING
    if not possible:
        several = f", or the mean of {trials} trials at most" if definition.whole and trials > 1 else ""
        yield f"{name} {field} is {value}; it can be {definition.bounds}{several}"


def _not_the_worst(name: str, values: Sequence[float], worst: float, trials: int) -> Iterator[str]:
    """Yield a fault if the worst trial reveals less than the mean of a picture, or more than a single one can."""
    definition = metric(name)
    most = max(values) if definition.higher_leaks else min(values)
    if definition.whole:
        most, trials = math.ceil(most), 1
    beyond = worst - most if definition.higher_leaks else most - worst
    tolerated = ROUNDING * abs(most)  # errors of features are of that size
    if beyond < -tolerated or (trials == 1 and beyond > tolerated):
        yield f"{name} worst is {worst}, but its scores per picture give {most}"


def _against_leakage(entry: BoardEntry, trials: int) -> Iterator[str]:
    """Yield pictures whose MSE and PSNR disagree.

    PSNR is the MSE in decibels, trial by trial; the mean over several trials of a picture is of the logarithm.
    """
    if not {ERROR, LEAKAGE} <= entry.scores.keys():
        return
    for picture, value in entry.scores[ERROR].items():
        least = 10 ** (-entry.scores[LEAKAGE][picture] / 10)
        if value < least - ROUNDING or (trials == 1 and value > least + ROUNDING):
            yield f"{ERROR} of {picture!r} is {value}, but the {LEAKAGE} makes {least:.6g}"
    error, least = entry.metrics[ERROR].worst, 10 ** (-entry.metrics[LEAKAGE].worst / 10)
    if abs(error - least) > ROUNDING:
        yield f"{ERROR} worst is {error}, but the {LEAKAGE} makes {least:.6g}"


def _found_among_fewer(entry: BoardEntry) -> Iterator[str]:
    """Yield pictures found as the nearest more often than among the five nearest."""
    for first, more in (("rank1", "rank5"), ("rank1_crop", "rank5_crop")):
        among = entry.scores.get(more, {})
        for picture, value in entry.scores.get(first, {}).items() if among else ():
            if value > among[picture] + ROUNDING:
                yield f"{first} of {picture!r} is {value}, but {more} is {among[picture]}"


def impossible_origin(entry: BoardEntry) -> Iterator[str]:
    """Yield malformed digests, seeds that nothing draws from, and impossible times.

    Args:
        entry: A submitted cell.
    """
    provenance = entry.provenance
    digests = [provenance.config_sha256, provenance.pictures_sha256, *provenance.weights_sha256]
    for digest in [*digests, *([] if entry.weights == "untrained" else [entry.weights])]:
        if not SHA256.fullmatch(digest):
            yield f"{digest[:80]!r} is no SHA-256 in hexadecimal digits"
    if len(set(provenance.seeds)) < len(provenance.seeds) or not all(
        0 <= seed <= MAX_SEED for seed in provenance.seeds
    ):
        yield f"its seeds are not different numbers from 0 to {MAX_SEED}"
    yield from _impossible_times(provenance)


def _impossible_times(provenance: Provenance) -> Iterator[str]:
    try:
        times = [datetime.fromisoformat(text) for text in (provenance.first, provenance.last) if text is not None]
    except ValueError:
        yield f"its times {provenance.first!r} and {provenance.last!r} are not of the form 2026-11-20T10:00:00+00:00"
        return
    aware = [time if time.tzinfo else time.replace(tzinfo=UTC) for time in times]
    if aware != sorted(aware) or any(time > datetime.now(UTC) + timedelta(days=1) for time in aware):
        yield f"its first trial was at {provenance.first} and its last at {provenance.last}, which cannot be"


def contradictions_with(entry: BoardEntry, reference: BoardEntry) -> Iterator[str]:
    """Yield where an entry and its floor or twin do not have the same data.

    Args:
        entry: A submitted cell.
        reference: The cell that it is compared with.
    """
    provenance, expected = entry.provenance, reference.provenance
    label = f"{reference.defence}, {reference.attack}, which it is held against,"
    for name in ("campaign", "config_sha256", "data", "seeds"):
        if getattr(provenance, name) != getattr(expected, name):
            yield f"{name} is {getattr(provenance, name)!r}, but {label} has {getattr(expected, name)!r}"
    if entry.failures or entry.missing or reference.failures or reference.missing:
        return  # what failed has a digest, but no leakage
    same = provenance.pictures_sha256 == expected.pictures_sha256
    if same is not (_pictures(entry) == _pictures(reference)):
        yield f"pictures_sha256 and the names of its pictures disagree whether {label} is of the same pictures"
    if same and _network(entry) == _network(reference) and provenance.weights_sha256 != expected.weights_sha256:
        yield f"weights_sha256 is not that of {label} though both are of the same model"


def _pictures(entry: BoardEntry) -> Set[str]:
    return entry.scores.get(MEASURES[entry.reveals].leakage, {}).keys()


def _network(entry: BoardEntry) -> tuple[str, ModelConfig]:
    return entry.weights, entry.pipeline.change_model(ModelConfig(name=entry.model))
