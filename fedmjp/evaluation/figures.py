"""Figures of one run at one mask ratio, with 95 % intervals over its pictures."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from fedmjp.evaluation.consistency import Booleans, Consistency, Floats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over pictures with its interval; no interval below two pictures."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Figures:
    """What a model does at one mask ratio; accuracies and consistency are in per cent.

    Attributes:
        ratio: The wanted share of shuffled patches.
        realised: The mean share that the masks have.
        pictures: How many.
        undecided: How many of them have a logit that is not finite.
        top1: Accuracy on x.
        difference: Diff. Norm., over the pictures where it is finite; None if there are none.
        consistency: Share of predictions that stay the same.
        top1_shuffled: Accuracy on x~.
    """

    ratio: float
    realised: float
    pictures: int
    undecided: int
    top1: Estimate
    difference: Estimate | None
    consistency: Estimate
    top1_shuffled: Estimate


def figures(found: Consistency) -> Iterator[Figures]:
    """One for each mask ratio."""
    for index, ratio in enumerate(found.ratios):
        yield Figures(
            ratio=ratio,
            realised=float(found.realised[index].mean()),
            pictures=len(found.keys),
            undecided=int(found.undecided.sum()),
            top1=_share(found.correct),
            difference=_mean(found.difference[index]),
            consistency=_share(found.agrees[index]),
            top1_shuffled=_share(found.correct_shuffled[index]),
        )


def _share(hits: Booleans) -> Estimate:
    """In per cent, with Wilson's interval."""
    interval = stats.binomtest(int(hits.sum()), len(hits)).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(100 * float(hits.mean()), 100 * float(interval.low), 100 * float(interval.high))


def _mean(values: Floats) -> Estimate | None:
    """With Student's interval: a mean over many pictures is nearly normal, and a bootstrap would say the same."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    mean = float(finite.mean())
    if len(finite) == 1:
        return Estimate(mean, None, None)
    half = float(stats.sem(finite) * stats.t.ppf((1 + CONFIDENCE) / 2, len(finite) - 1))
    return Estimate(mean, mean - half, mean + half)
