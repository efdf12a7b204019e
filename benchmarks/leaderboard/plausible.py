"""What no honest entry can say: figures that nothing has, and data that do not fit what it is held against."""

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
    """Texts of a submission, keys among them, that are too long or hold what a terminal would obey."""
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
    """Metrics and shares that lie where none can, or that contradict each other."""
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
    """How many trials a score may be the mean of."""
    return 1 if entry.trials == entry.n + len(entry.flat or ()) else len(entry.provenance.seeds)


def _outside(name: str, field: str, value: float, trials: int) -> Iterator[str]:
    known = metric(name)
    possible = known.lowest - ROUNDING <= value <= min(known.highest, LARGEST_SCORE) + ROUNDING
    if possible and known.whole:
        possible = abs(Fraction(value).limit_denominator(trials) - value) <= ROUNDING
    if not possible:
        several = f", or the mean of {trials} trials at most" if known.whole and trials > 1 else ""
        yield f"{name} {field} is {value}; it can be {known.bounds}{several}"


def _not_the_worst(name: str, values: Sequence[float], worst: float, trials: int) -> Iterator[str]:
    """A single trial reveals as much as the mean of several, or more."""
    known = metric(name)
    most = max(values) if known.higher_leaks else min(values)
    if known.whole:
        most, trials = math.ceil(most), 1
    beyond = worst - most if known.higher_leaks else most - worst
    tolerated = ROUNDING * abs(most)  # errors of features are of that size
    if beyond < -tolerated or (trials == 1 and beyond > tolerated):
        yield f"{name} worst is {worst}, but its scores per picture give {most}"


def _against_leakage(entry: BoardEntry, trials: int) -> Iterator[str]:
    """PSNR is the MSE in decibels, trial by trial; the mean over several trials of a picture is of the logarithm."""
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
    """Who is found as the nearest is among the five nearest."""
    for first, more in (("rank1", "rank5"), ("rank1_crop", "rank5_crop")):
        among = entry.scores.get(more, {})
        for picture, value in entry.scores.get(first, {}).items() if among else ():
            if value > among[picture] + ROUNDING:
                yield f"{first} of {picture!r} is {value}, but {more} is {among[picture]}"


def impossible_origin(entry: BoardEntry) -> Iterator[str]:
    """Digests that are none, seeds that nothing draws from, times that were not."""
    given = entry.provenance
    digests = [given.config_sha256, given.pictures_sha256, *given.weights_sha256]
    for digest in [*digests, *([] if entry.weights == "untrained" else [entry.weights])]:
        if not SHA256.fullmatch(digest):
            yield f"{digest[:80]!r} is no SHA-256 in hexadecimal digits"
    if len(set(given.seeds)) < len(given.seeds) or not all(0 <= seed <= MAX_SEED for seed in given.seeds):
        yield f"its seeds are not different numbers from 0 to {MAX_SEED}"
    yield from _impossible_times(given)


def _impossible_times(given: Provenance) -> Iterator[str]:
    try:
        times = [datetime.fromisoformat(text) for text in (given.first, given.last) if text is not None]
    except ValueError:
        yield f"its times {given.first!r} and {given.last!r} are not of the form 2026-11-20T10:00:00+00:00"
        return
    aware = [time if time.tzinfo else time.replace(tzinfo=UTC) for time in times]
    if aware != sorted(aware) or any(time > datetime.now(UTC) + timedelta(days=1) for time in aware):
        yield f"its first trial was at {given.first} and its last at {given.last}, which cannot be"


def contradictions_with(entry: BoardEntry, reference: BoardEntry) -> Iterator[str]:
    """Where an entry and its floor or twin are not of the same data, though the one is held against the other."""
    ours, theirs = entry.provenance, reference.provenance
    named = f"{reference.defence}, {reference.attack}, which it is held against,"
    for name in ("campaign", "config_sha256", "data", "seeds"):
        if getattr(ours, name) != getattr(theirs, name):
            yield f"{name} is {getattr(ours, name)!r}, but {named} has {getattr(theirs, name)!r}"
    if entry.failures or entry.missing or reference.failures or reference.missing:
        return  # what failed has a digest, but no leakage
    same = ours.pictures_sha256 == theirs.pictures_sha256
    if same is not (_pictures(entry) == _pictures(reference)):
        yield f"pictures_sha256 and the names of its pictures disagree whether {named} is of the same pictures"
    if same and _network(entry) == _network(reference) and ours.weights_sha256 != theirs.weights_sha256:
        yield f"weights_sha256 is not that of {named} though both are of the same model"


def _pictures(entry: BoardEntry) -> Set[str]:
    return entry.scores.get(MEASURES[entry.reveals].leakage, {}).keys()


def _network(entry: BoardEntry) -> tuple[str, ModelConfig]:
    return entry.weights, entry.pipeline.change_model(ModelConfig(name=entry.model))
