"""What no honest entry can say: figures that nothing has, and data that do not fit what it is held against."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from benchmarks.leaderboard.entries import LEAKAGE, Entry, Provenance, Statistics
from fedmjp.config import MAX_SEED, ModelConfig
from fedmjp.metrics import metric
from fedmjp.texts import UNPRINTABLE

ROUNDING = 1e-6
ERROR = "mse"
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


def impossible_figures(entry: Entry) -> Iterator[str]:
    """Metrics and shares that lie where none can, or that contradict each other."""
    for picture, value in {**entry.leakage, **(entry.flat or {})}.items():
        yield from _outside(LEAKAGE, f"of {picture!r}", value)
    for name, figures in entry.metrics.items():
        for field, value in figures.model_dump(exclude_none=True).items():
            yield from _outside(name, field, value)
        if name != LEAKAGE:  # which is computed again
            yield from _disordered(name, figures)
    yield from _against_leakage(entry)
    if (entry.realised_ratio or 0) > entry.mask_ratio + ROUNDING:
        yield f"{entry.realised_ratio:g} of the patches were masked, but its defences mask {entry.mask_ratio:g} at most"


def _outside(name: str, field: str, value: float) -> Iterator[str]:
    known = metric(name)
    if not known.lowest - ROUNDING <= value <= known.highest + ROUNDING:
        yield f"{name} {field} is {value}; it can be {known.bounds}"


def _disordered(name: str, figures: Statistics) -> Iterator[str]:
    low, high = figures.low, figures.high
    if low is not None and high is not None and not low - ROUNDING <= figures.mean <= high + ROUNDING:
        yield f"{name} mean is {figures.mean}, outside of its interval from {low} to {high}"
    sign = 1 if metric(name).higher_leaks else -1
    most = max((figures.mean, figures.median, figures.p95), key=lambda value: sign * value)
    if sign * (most - figures.worst) > ROUNDING:
        yield f"{name} worst is {figures.worst}, but {most} reveals more"


def _against_leakage(entry: Entry) -> Iterator[str]:
    """PSNR is the MSE in decibels, trial by trial; the mean over several trials of a picture is of the logarithm."""
    error, leakage = entry.metrics.get(ERROR), entry.metrics.get(LEAKAGE)
    if error is None or leakage is None or not entry.leakage:
        return
    least = float(np.mean(10 ** (-np.array(list(entry.leakage.values())) / 10)))
    if error.mean < least - ROUNDING or (entry.trials == entry.n and error.mean > least + ROUNDING):
        yield f"{ERROR} mean is {error.mean}, but its leakage per picture makes {least:.6g}"
    if abs(error.worst - 10 ** (-leakage.worst / 10)) > ROUNDING:
        yield f"{ERROR} worst is {error.worst}, but the {LEAKAGE} makes {10 ** (-leakage.worst / 10):.6g}"


def impossible_origin(entry: Entry) -> Iterator[str]:
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


def contradictions_with(entry: Entry, reference: Entry) -> Iterator[str]:
    """Where an entry and its floor or twin are not of the same data, though the one is held against the other."""
    ours, theirs = entry.provenance, reference.provenance
    named = f"{reference.defence}, {reference.attack}, which it is held against,"
    for name in ("campaign", "config_sha256", "data", "seeds"):
        if getattr(ours, name) != getattr(theirs, name):
            yield f"{name} is {getattr(ours, name)!r}, but {named} has {getattr(theirs, name)!r}"
    if entry.failures or entry.missing or reference.failures or reference.missing:
        return  # what failed has a digest, but no leakage
    same = ours.pictures_sha256 == theirs.pictures_sha256
    if same is not (entry.leakage.keys() == reference.leakage.keys()):
        yield f"pictures_sha256 and the names of its pictures disagree whether {named} is of the same pictures"
    if same and _network(entry) == _network(reference) and ours.weights_sha256 != theirs.weights_sha256:
        yield f"weights_sha256 is not that of {named} though both are of the same model"


def _network(entry: Entry) -> tuple[str, ModelConfig]:
    return entry.weights, entry.pipeline.change_model(ModelConfig(name=entry.model))
