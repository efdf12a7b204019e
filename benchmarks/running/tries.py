"""Trying one piece of a campaign's work: how long it took, or would have taken."""

import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.adversary import Adversary
from fedmjp.benchmarks.folder.pictures import save_png
from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment
from fedmjp.benchmarks.uploads.direct import DirectUploads, initial_model
from fedmjp.benchmarks.uploads.source import Batch, described
from fedmjp.config import ModelConfig
from fedmjp.data.selection import Selection
from fedmjp.exchange import Exchange
from fedmjp.metrics.gallery import Gallery
from fedmjp.metrics.scoring import score_pictures
from fedmjp.processes import raise_on_alarm
from fedmjp.records import Disclosure, Reconstruction, Upload

DIFFERENT = 12  # uploads that an attack is tried on that works on one after another
TIME_FOR_OTHERS = 3.0  # seconds after which no other of these but the first is begun
PIECES = 4  # that are tried together where one is quick; a run works on more at a time, a little faster
SOON = 0.001  # seconds: a timer of none would never ring
QUICK, SLOW = 0.3, 2.0  # seconds
# After which one that tells its steps is stopped, and extrapolated; some end long before their last step.
PATIENCE = 5.0
LONGEST, LONGEST_START = 10.0, 20.0  # after which one that tells none is stopped, and one that may yet tell
LONGEST_OF_BUDGET = 3.0  # the same of one that has a budget, which is what it takes


@dataclass(frozen=True)
class Tried:
    """Seconds of one piece of work; None if it was stopped and nothing tells, ``at_least`` so many."""

    seconds: float | None
    failure: str | None = None
    at_least: float = 0.0


@dataclass
class Scoring:
    """Seconds to score and save one trial, and the bytes of a picture's PNG; zero until a picture was tried."""

    seconds: float = 0.0
    png: int = 0

    def learn(self, experiment: Experiment, recorded: Exchange, made: Reconstruction) -> None:
        """From what an attack made of an upload."""
        scenario = experiment.scenario
        setting, private = experiment.settings[0], recorded.private
        private = private.of_places(scenario.wanted(private.labels.tolist()))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "picture.png"
            for _ in range(2):  # the first call loads libraries
                began = time.perf_counter()
                score_pictures(made, private, setting, metrics=experiment.metrics, protocol=experiment.protocol)
                save_png(made.images[0], path)
                seconds = time.perf_counter() - began
            # A natural picture: what an attack left grey or noisy is not typical.
            save_png(private.clean[0], path)
            self.seconds, self.png = seconds / len(private.pictures), path.stat().st_size


class _FewUploads(DirectUploads):
    """Uploads of a few batches, computed without the others of their pass, whose last bits count for nothing here."""

    def passes(self, batches: Sequence[Batch]) -> list[list[Batch]]:
        return [list(batches)]


class StoppedError(BaseException):
    """Work was stopped. No attack may catch it."""


class _Pace:
    """What an attack's steps tell of the time that it would have taken; those before the first are its start."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first: tuple[float, int] | None = None
        self.seconds: float | None = None

    def __call__(self, done: int, total: int, _loss: float) -> None:
        elapsed = time.perf_counter() - self._began
        if self._first is None:
            self._first = elapsed, done
            self.seconds = elapsed * total / done if done else None
            return
        start, before = self._first
        if done > before:
            self.seconds = start + (elapsed - start) * (total - before) / (done - before)
            if elapsed - start > PATIENCE:
                raise StoppedError


def try_building(arm: ModelConfig, device: str) -> Tried:
    """Make a model."""
    began = time.perf_counter()
    initial_model(arm, device)
    return Tried(time.perf_counter() - began)


def try_uploads(experiment: Experiment, selection: Selection, batches: Sequence[Batch]) -> Tried:
    """Compute the uploads of a few batches."""
    initial_model(experiment.arm, experiment.scenario.device)
    source, few = _FewUploads(experiment, selection), batches[:1]
    seconds, failure = _timed_uploads(source, few)
    if seconds < SLOW and not failure:
        few = batches[: PIECES if seconds < QUICK else 1]
        seconds, failure = _timed_uploads(source, few)
    return Tried(seconds / len(few), failure)


def try_attack(experiment: Experiment, selection: Selection, batches: Sequence[Batch], scoring: Scoring) -> Tried:
    """Let the experiment's only attack at one upload, or if that is quick, at several.

    One that iterates meets several from the start, as in a run, where it works on them together. Where it works on one
    after another, several are tried: a few pictures can take most of the time.
    """
    (tried,), source = experiment.attacks, _FewUploads(experiment, selection)
    attack = ATTACKS.get(tried.name)
    drawn = random.Random(tried.label).sample(batches, min(len(batches), DIFFERENT))  # noqa: S311 (no secret)
    recorded = _recorded(source, drawn[:1])
    if not recorded:
        return Tried(0.0, "there was no upload to try it on")
    first = recorded[0].upload
    adversary = Adversary(source.model(first.weights), experiment.threat, experiment.scenario.seed)
    together = min(PIECES, attack.stack, len(batches)) if attack.optimises else 1
    longest = LONGEST_START if attack.optimises else LONGEST
    found, made = _attempt(adversary, tried, [first] * together, longest)
    if made and isinstance(made[0], Reconstruction) and not scoring.png:
        scoring.learn(experiment, recorded[0], made[0])
    if attack.optimises and attack.stack == 1:
        return _with_others(found, adversary, tried, source, drawn[1:])
    if not made or found.seconds is None or found.seconds > SLOW or attack.optimises:
        return found
    return _attempt(adversary, tried, [first] * (PIECES if found.seconds < QUICK else 1), LONGEST)[0]


def _with_others(
    found: Tried, adversary: Adversary, tried: AttackConfig, source: DirectUploads, batches: Sequence[Batch]
) -> Tried:
    """The mean over other uploads as well, as many as there is time for; one that is stopped counts, too."""
    if found.seconds is None or found.failure:
        return found
    seconds, began = [found.seconds], time.perf_counter()
    for batch in batches:
        if time.perf_counter() - began > TIME_FOR_OTHERS:
            break
        for exchange in _recorded(source, [batch]):
            other, _ = _attempt(adversary, tried, [exchange.upload], LONGEST)
            seconds.append(other.at_least if other.seconds is None else other.seconds)
    return Tried(mean(seconds))


def _recorded(source: DirectUploads, batches: Sequence[Batch]) -> list[Exchange]:
    return [exchange for exchange in source.uploads(batches).values() if isinstance(exchange, Exchange)]


def try_gallery(experiment: Experiment, selection: Selection, batches: Sequence[Batch]) -> Tried:
    """Look at one picture as the evaluator does."""
    source = _FewUploads(experiment, selection)
    recorded = _recorded(source, batches[:1])
    if not recorded:
        return Tried(0.0)
    upload, one = recorded[0].upload, recorded[0].private.part(0, 1)
    versions = {setting.compared_with for setting in experiment.settings}
    began = time.perf_counter()
    Gallery.of(source.model(upload.weights), upload.weights, [one], versions)
    return Tried(time.perf_counter() - began)


def _timed_uploads(source: DirectUploads, batches: Sequence[Batch]) -> tuple[float, str | None]:
    began = time.perf_counter()
    exchanges = source.uploads(batches)
    failures = [outcome for outcome in exchanges.values() if isinstance(outcome, str)]
    return time.perf_counter() - began, failures[0] if failures else None


def _attempt(
    adversary: Adversary, tried: AttackConfig, uploads: Sequence[Upload], longest: float
) -> tuple[Tried, Sequence[Disclosure]]:
    budget = tried.build().usual_seconds
    began, pace = time.perf_counter(), _Pace()
    try:
        with stopped_after(longest if budget is None else min(longest, LONGEST_OF_BUDGET)):
            made = adversary.reconstruct(tried.name, uploads, tried.options, then=tried.then, on_progress=pace)
    except StoppedError:
        limits = [seconds for seconds in (pace.seconds, budget) if seconds is not None]
        elapsed = time.perf_counter() - began
        return Tried(min(limits) / len(uploads) if limits else None, at_least=elapsed), []
    except Exception as error:  # noqa: BLE001 (any error of an attack is a result, here as in a run)
        return Tried((time.perf_counter() - began) / len(uploads), described(error)), []
    return Tried((time.perf_counter() - began) / len(uploads)), made


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Raise ``StoppedError`` when so many seconds are over, or those of a block around this one."""
    stop = raise_on_alarm(StoppedError, signal.ITIMER_REAL)
    former, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
    around = signal.getitimer(signal.ITIMER_REAL)[0]
    signal.setitimer(signal.ITIMER_REAL, max(SOON, min(seconds, around or seconds)))
    try:
        yield
    finally:
        left = max(SOON, around - (time.monotonic() - began)) if around else 0.0
        signal.signal(signal.SIGALRM, former)
        signal.setitimer(signal.ITIMER_REAL, left)
