"""Figures of a run at one mask ratio, with intervals over its pictures, and of runs that differ in their seed alone."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedmjp.evaluation.consistency import Booleans, Consistency, Floats
from fedmjp.evaluation.runs import Kind, TrainedModel, describe_kinds
from fedmjp.training.rows import SHUFFLED_RATIO, Reported

CONFIDENCE = 0.95
# Attributes of ``Figures`` and their names in tables.
MEASURES: Mapping[str, str] = {
    "top1": "Top-1 %",
    "difference": "Diff. Norm.",
    "consistency": "Consistency %",
    "top1_shuffled": "Top-1 of x~ %",
}


@dataclass(frozen=True)
class Estimate:
    """A mean over the pictures of one run with its 95 % interval, if there are two, or over runs with its deviation."""

    value: float
    low: float | None = None
    high: float | None = None
    deviation: float | None = None

    @property
    def band(self) -> tuple[float, float]:
        """Compute the two ends of a band: mean and deviation, or the interval."""
        if self.deviation is not None:
            return self.value - self.deviation, self.value + self.deviation
        return (self.value if self.low is None else self.low), (self.value if self.high is None else self.high)


@dataclass(frozen=True)
class Figures:
    """A model's figures at one requested mask ratio; accuracies and consistency are in per cent."""

    ratio: float
    realised: float  # the mean share that the masks have
    pictures: int
    undecided: int  # pictures with a logit that is not finite
    top1: Estimate  # on x
    difference: Estimate | None  # over the pictures where it is finite; None if there are none
    consistency: Estimate
    top1_shuffled: Estimate  # on x~


def compute_figures(consistency: Consistency) -> Iterator[Figures]:
    """Compute the figures of each mask ratio."""
    for index, ratio in enumerate(consistency.ratios):
        yield Figures(
            ratio=ratio,
            realised=float(consistency.realised[index].mean()),
            pictures=len(consistency.keys),
            undecided=int(consistency.undecided.sum()),
            top1=estimate_share(consistency.correct),
            difference=estimate_mean(consistency.difference[index]),
            consistency=estimate_share(consistency.agrees[index]),
            top1_shuffled=estimate_share(consistency.correct_shuffled[index]),
        )


def estimate_share(hits: Booleans) -> Estimate:
    """Estimate the share of hits in per cent, with Wilson's interval."""
    interval = stats.binomtest(int(hits.sum()), len(hits)).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(100 * float(hits.mean()), 100 * float(interval.low), 100 * float(interval.high))


def estimate_mean(values: Floats) -> Estimate | None:
    """Estimate the mean of the finite values with Student's interval; None if no value is finite.

    The mean of many values is nearly normal; a bootstrap would give the same.
    """
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    mean = float(finite.mean())
    if len(finite) == 1:
        return Estimate(mean)
    half = float(stats.sem(finite) * stats.t.ppf((1 + CONFIDENCE) / 2, len(finite) - 1))
    return Estimate(mean, mean - half, mean + half)


@dataclass(frozen=True)
class Line:
    """A kind of run at one requested mask ratio."""

    kind: Kind
    seeds: int  # how many runs there are
    ratio: float
    realised: float
    pictures: int
    spreads: Mapping[str, Estimate | None]  # by attribute of ``Figures``; None where a run has no such figure
    example: TrainedModel  # one of the runs

    @property
    def reported(self) -> Reported | None:
        """Return the paper's figures of such a model."""
        return self.example.reported

    def get_reported(self, measure: str) -> float | None:
        """Return the paper's figure, if it has one; accuracy on x~ only at the ratio that it is reported for."""
        if self.reported is None or (measure == "top1_shuffled" and self.ratio != SHUFFLED_RATIO):
            return None
        value: float | None = getattr(self.reported, measure)
        return value


def summarise(runs: Sequence[TrainedModel], measured: Sequence[Sequence[Figures]]) -> list[Line]:
    """Summarise the figures of runs in a line for each kind and mask ratio, in the order of the runs."""
    groups: dict[Kind, list[int]] = {}
    for index, kind in enumerate(describe_kinds(runs)):
        groups.setdefault(kind, []).append(index)
    lines = []
    for kind, places in groups.items():
        for same in zip(*(measured[place] for place in places), strict=True):
            first = same[0]
            spreads = {
                name: _summarise_seeds([getattr(run_figures, name) for run_figures in same]) for name in MEASURES
            }
            about = (first.ratio, first.realised, first.pictures)
            lines.append(Line(kind, len(same), *about, spreads, runs[places[0]]))
    return lines


def _summarise_seeds(estimates: Sequence[Estimate | None]) -> Estimate | None:
    """Average one figure over runs; None if a run lacks it."""
    values = [estimate.value for estimate in estimates if estimate is not None]
    if len(values) < len(estimates):
        return None
    return estimates[0] if len(values) == 1 else Estimate(statistics.fmean(values), deviation=statistics.stdev(values))
