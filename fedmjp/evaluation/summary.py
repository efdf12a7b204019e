"""Figures of runs that differ in their seed alone, put together."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedmjp.evaluation.figures import Estimate, Figures
from fedmjp.evaluation.runs import Kind, Trained, kinds
from fedmjp.training.rows import SHUFFLED_RATIO, Reported

# Attributes of ``Figures`` and their names in tables.
MEASURES: Mapping[str, str] = {
    "top1": "Top-1 %",
    "difference": "Diff. Norm.",
    "consistency": "Consistency %",
    "top1_shuffled": "Top-1 of x~ %",
}


@dataclass(frozen=True)
class Spread:
    """A figure of a kind of run.

    Attributes:
        mean: Over the runs.
        deviation: Their standard deviation; None for a single run.
        low: Lower end of the single run's 95 % interval over pictures.
        high: Its upper end.
    """

    mean: float
    deviation: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def band(self) -> tuple[float, float]:
        """Mean and deviation, or the interval, as the two ends of a band."""
        if self.deviation is not None:
            return self.mean - self.deviation, self.mean + self.deviation
        return (self.mean if self.low is None else self.low), (self.mean if self.high is None else self.high)


@dataclass(frozen=True)
class Line:
    """A kind of run at one mask ratio.

    Attributes:
        kind: What the runs have in common.
        seeds: How many runs there are.
        ratio: The wanted share of shuffled patches.
        realised: The mean share that the masks have.
        pictures: How many.
        spreads: By attribute of ``Figures``; None where a run has no such figure.
        example: One of the runs.
    """

    kind: Kind
    seeds: int
    ratio: float
    realised: float
    pictures: int
    spreads: Mapping[str, Spread | None]
    example: Trained

    @property
    def reported(self) -> Reported | None:
        """What the paper says of such a model."""
        return self.example.reported

    def printed(self, measure: str) -> float | None:
        """The paper's figure, if it has one; accuracy on x~ only at the ratio that it is reported for."""
        if self.reported is None or (measure == "top1_shuffled" and self.ratio != SHUFFLED_RATIO):
            return None
        value: float | None = getattr(self.reported, measure)
        return value


def summarise(runs: Sequence[Trained], found: Sequence[Sequence[Figures]]) -> list[Line]:
    """A line for each kind and mask ratio, in the order of the runs.

    Args:
        runs: What was evaluated.
        found: The figures of each run, one for each mask ratio.
    """
    groups: dict[Kind, list[int]] = {}
    for index, kind in enumerate(kinds(runs)):
        groups.setdefault(kind, []).append(index)
    return [
        _line(kind, runs[places[0]], [found[place][column] for place in places])
        for kind, places in groups.items()
        for column in range(len(found[places[0]]))
    ]


def _line(kind: Kind, example: Trained, same: Sequence[Figures]) -> Line:
    first = same[0]
    return Line(
        kind=kind,
        seeds=len(same),
        ratio=first.ratio,
        realised=first.realised,
        pictures=first.pictures,
        spreads={name: spread([getattr(each, name) for each in same]) for name in MEASURES},
        example=example,
    )


def spread(estimates: Sequence[Estimate | None]) -> Spread | None:
    """Of one figure over runs."""
    values = [each.value for each in estimates if each is not None]
    if len(values) < len(estimates):
        return None
    if len(values) > 1:
        return Spread(statistics.fmean(values), statistics.stdev(values))
    (only,) = estimates
    return None if only is None else Spread(only.value, None, only.low, only.high)
