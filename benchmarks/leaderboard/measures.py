"""Measures by which cells are judged: one for each thing that attacks reveal, in units of its own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedmjp.benchmarks.leaderboard.entries import LEAKAGE
from fedmjp.benchmarks.leaderboard.statistics import gain_below, share_below
from fedmjp.metrics import EXACT, RECOGNISABLE, metric
from fedmjp.settings import Reveals

EXACT_FEATURE = 1e-3  # feature_error up to which a feature counts as exact: float32 gradients leave less
POINTS = 100  # percentage points of a share


class Threshold(NamedTuple):
    """A value of a metric from which on, towards revealing, something holds of a picture."""

    metric: str
    limit: float

    def passed(self, values: Iterable[float]) -> int:
        """Count the values that pass.

        Args:
            values: Values of the metric.
        """
        higher = metric(self.metric).higher_leaks
        return sum(value >= self.limit if higher else value <= self.limit for value in values)


@dataclass(frozen=True)
class Measure:
    """How cells are judged whose attacks reveal one kind of thing.

    Attributes:
        leakage: The metric that verdicts follow from; higher reveals more.
        exact: From when on a picture counts as recovered exactly; the share of these orders cells.
        centre: What of the leakage orders cells of equal shares.
        margin: Mean leakage over the guess below which nothing counts as recovered.
        exposing: What makes a single picture a leak, if it leaks ``exposed`` more than the guess; None where one right
            answer is no evidence.
        exposed: See there.
        colour_tells: Whether flat pictures count in no figure: their mean colour alone is as good as an attack.
        below: The p-value of the hypothesis that the gain over the guess is at least so much, from the leakage per
            picture of the attack and of the guess, and the uploads: small if it surely is less.
        test: Its name.
        floor: Name of the guess.
        guesses: What a guess may reveal to be held against.
        scale: Factor on leakage and its differences as they are told.
        unit: Of these.
        exactly: How many pictures are recovered exactly, in words.
        middle: The centre times ``scale``, in words; empty where it says the same.
        exposure: How many pictures are exposed, in words; empty where the headline says it.
    """

    leakage: str
    exact: Threshold
    centre: Literal["median", "mean"]
    margin: float
    exposing: Threshold | None
    exposed: float
    colour_tells: bool
    below: Callable[[Mapping[str, float], Mapping[str, float], float, Mapping[str, int]], float]
    test: str
    floor: str
    guesses: frozenset[Reveals]
    scale: float
    unit: str
    exactly: str
    middle: str
    exposure: str

    @property
    def metrics(self) -> frozenset[str]:
        """Return the names of the metrics that judge a cell."""
        thresholds = [self.exact, *([self.exposing] if self.exposing else [])]
        return frozenset({self.leakage, *(threshold.metric for threshold in thresholds)})

    def amount(self, value: float) -> str:
        """Write a difference of leakage in the measure's unit: ``1 dB``.

        Args:
            value: The difference, unscaled.
        """
        return f"{self.scale * value:g} {self.unit}"


MEASURES: dict[Reveals, Measure] = {
    "pictures": Measure(
        leakage=LEAKAGE,
        exact=Threshold(LEAKAGE, EXACT),
        centre="median",
        margin=1.0,
        exposing=Threshold(LEAKAGE, RECOGNISABLE),
        exposed=3.0,  # half the error power of a guess
        colour_tells=True,
        below=gain_below,
        test="a signed-rank test",
        floor="grey",
        guesses=frozenset({"pictures"}),
        scale=1,
        unit="dB",
        exactly="{count} of {n} exactly",
        middle=", median {value:.1f} dB",
        exposure="{count} of {n} pictures recognisable and 3 dB better than the guess",
    ),
    "features": Measure(
        leakage="rank1",
        exact=Threshold("feature_error", EXACT_FEATURE),
        centre="mean",
        margin=0.05,
        exposing=Threshold("feature_error", EXACT_FEATURE),
        exposed=0.0,
        colour_tells=False,
        below=share_below,
        test="a binomial test",
        floor="chance",
        guesses=frozenset({"features"}),
        scale=POINTS,
        unit="percentage points",
        exactly="{count} of {n} features exactly",
        middle=", {value:.0f} % of the pictures found among all",
        exposure="",
    ),
    "labels": Measure(
        leakage="label_accuracy",
        exact=Threshold("label_accuracy", 1.0),
        centre="mean",
        margin=0.05,
        exposing=None,
        exposed=0.0,
        colour_tells=False,
        below=share_below,
        test="a binomial test",
        floor="chance",
        guesses=frozenset({"labels", "features"}),  # who tells features tells labels
        scale=POINTS,
        unit="percentage points",
        exactly="{count} of {n} labels",
        middle="",
        exposure="",
    ),
}


def needed_metrics(reveals: Reveals) -> frozenset[str]:
    """Return the metrics that judge cells of a kind, and those of the cells that they may be the guess of.

    Args:
        reveals: The kind of thing that an attack reveals.
    """
    guessed = {measure.leakage for measure in MEASURES.values() if reveals in measure.guesses}
    return MEASURES[reveals].metrics | guessed


def computable_metric(name: str, reveals: Reveals) -> bool:
    """Tell whether a metric can be computed from what is revealed: features tell labels, too.

    Args:
        name: The metric.
        reveals: The kind of thing that an attack reveals.
    """
    return reveals in MEASURES[metric(name).of].guesses
