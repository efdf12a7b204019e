"""What a campaign will cost: kinds of work are tried on a picture or a few, within half a minute, and counted."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from fedmjp.benchmarks.campaign.prepare import Prepared
from fedmjp.benchmarks.running.kinds_of_work import Work, kinds_of_work
from fedmjp.benchmarks.running.tries import Scoring, StoppedError, Tried, stopped_after

SECONDS, AT_MOST = 30.0, 60.0  # of this thread, and on a clock where others are at work, after which nothing is tried
KEPT_PER_CELL = 3
ROW_BYTES = 1_500  # of the database, indices included; fedmjp.benchmarks.performance.store measures it


@dataclass(frozen=True)
class Probe:
    """What one kind of work costs: ``seconds`` each, ``count`` times; with a ``failure``, those until it failed."""

    what: str
    seconds: float
    count: int
    failure: str | None = None

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self.seconds * self.count


@dataclass(frozen=True)
class Estimate:
    """Times, and bytes on disk: pictures at the end and at most, and the database.

    ``untried`` counts kinds of work that there was no time for: they are taken to cost what similar ones do.
    """

    probes: tuple[Probe, ...]
    untried: int
    picture_bytes: int
    peak_picture_bytes: int
    database_bytes: int

    @property
    def seconds(self) -> float:
        """In all, on one worker with all cores."""
        return sum(probe.total for probe in self.probes)


def estimate(prepared: Prepared, on_probe: Callable[[str], None]) -> Estimate:
    """Try kinds of work of a campaign; ``on_probe`` is told what is tried next."""
    worked, deadline, scoring = time.thread_time(), time.monotonic() + AT_MOST, Scoring()
    work, tried = _in_order(kinds_of_work(prepared, scoring)), dict[Work, Tried]()
    for one in work:
        if time.thread_time() > worked + SECONDS or time.monotonic() > deadline:
            break
        on_probe(one.what)
        tried[one] = _tried(one, deadline)
    known = {one: found for one, found in tried.items() if found.seconds is not None}
    probes = [_probe(one, tried.get(one), known) for one in work]
    trials = len(prepared.plan.trials)
    pictures, peak = _picture_counts(prepared)
    return Estimate(
        probes=(*probes, Probe("scores, pictures, rows", scoring.seconds, trials)),
        untried=len(work) - len(tried),
        picture_bytes=pictures * scoring.png,
        peak_picture_bytes=peak * scoring.png,
        database_bytes=trials * ROW_BYTES,
    )


def _tried(one: Work, deadline: float) -> Tried:
    began = time.monotonic()
    try:
        with stopped_after(deadline - began):
            return one.measure()
    except StoppedError:
        return Tried(None, at_least=time.monotonic() - began)


def _in_order(work: Sequence[Work]) -> list[Work]:
    """Of each attack the smallest, then of each with its options and uploads the smallest and the largest, then others.

    Within each of these what iterates last, by model, so that each is built once, and what there is most of first.
    """
    by_size = sorted(work, key=lambda one: (one.size, -one.weight))
    first = set({one.like[0]: one for one in reversed(by_size)}.values())
    ends = {*{one.like: one for one in by_size}.values(), *{one.like: one for one in reversed(by_size)}.values()}
    weights = Counter[str]()
    for one in work:
        weights[one.network] += one.weight

    def place(one: Work) -> tuple[Any, ...]:
        return one not in first, one not in ends, one.nature, -weights[one.network], one.network, -one.weight

    return sorted(work, key=place)


def _probe(one: Work, tried: Tried | None, known: dict[Work, Tried]) -> Probe:
    """What it cost, or what similar work did, by the number of pictures; at least the time until it was stopped.

    Without a trial a search is taken to cost the same however many uploads of a picture there are, and an attack that
    ends after some seconds has all of them where none like it was tried.
    """
    if tried and tried.seconds is not None:
        return Probe(one.what, tried.seconds, one.count, tried.failure)
    least = tried.at_least if tried else 0.0
    for depth in range(len(one.like), -1 if one.allowed is None else 0, -1):
        similar = [other for other in known if other.like[:depth] == one.like[:depth] and other.nature == one.nature]
        if similar:
            seconds = _at_size(one.size, [(other.size, known[other].seconds or 0.0) for other in similar])
            return Probe(one.what, max(least, seconds), one.count)
    return Probe(one.what, max(least, one.allowed or 0.0), one.count)


def _at_size(size: int, known: Sequence[tuple[int, float]]) -> float:
    """Seconds at a size: on the line through the means at the two nearest sizes, or through zero if there is one."""
    by_size = defaultdict[int, list[float]](list)
    for each, seconds in known:
        by_size[each].append(seconds)
    near, *others = sorted(by_size, key=lambda each: abs(each - size))
    there = mean(by_size[near])
    if not others:
        return there * size / near
    other = others[0]
    return max(0.0, there + (mean(by_size[other]) - there) * (size - near) / (other - near))


def _picture_counts(prepared: Prepared) -> tuple[int, int]:
    """Files at the end, and at most at any time."""
    trials = prepared.plan.trials
    if prepared.campaign.keep == "none":
        return 0, 0
    originals = 2 * len({trial.stem for trial in trials})
    if prepared.campaign.keep == "all":
        whole = len(trials) + originals
        return whole, whole
    by_arm = Counter(trial.arm for trial in trials)
    kept = KEPT_PER_CELL * len({trial.cell for trial in trials})
    return 3 * kept, 3 * kept + max(by_arm.values(), default=0) + originals
