"""What the entries of a degraded tensor say of those that the client computed.

Every kind of degradation is put in one form: an entry, with normal noise on it, lies between two bounds. Of what is
noisy or rounded alone the bounds are equal; what was pruned lies below the smallest that was kept; a quantised entry
lies within a step of what is sent, the nearer the likelier; a sign says on which side of zero an entry lies. Where the
bounds are apart, they are replaced by the normal observation that has the same effect on what is believed of the entry
so far (expectation propagation).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedmjp.defences.base import Defence, Mark
from fedmjp.defences.quantise import Quantise
from fedmjp.threat import ThreatModel

COARSE: frozenset[Mark] = frozenset({"pruned", "signs"})
EVEN = 1 / 6  # of a squared step: the variance that random rounding leaves, on average over all places between levels
NODES = 24  # of the quadrature
FAR = 8.0  # standard deviations beyond which a belief is taken for zero
KEPT = 0.5  # of the last observation, where a belief is updated: undamped updates go to and fro
CERTAIN = 0.05  # share of the precision that has to be left when an entry's own observation is taken away
LEAST = 1e-6  # information, of what is believed already, that counts as some


@dataclass(frozen=True)
class Observations:
    """Independent normal observations of entries: ``value`` with variance 1 / ``precision``; 0 says nothing."""

    value: Tensor
    precision: Tensor

    def __add__(self, other: "Observations") -> "Observations":
        """Both together."""
        precision = self.precision + other.precision
        mean = (self.precision * self.value + other.precision * other.value) / precision
        return Observations(torch.where(precision > 0, mean, self.value), precision)


@dataclass(frozen=True)
class Entries:
    """The entries of one tensor, plus normal noise, lie between bounds.

    Attributes:
        variance: Of the noise.
        low: Lower bounds.
        high: Upper bounds; where they are the lower ones, the noisy entry itself is known.
        peaked: Whether the middle between the bounds is likelier than they are, linearly; else all is alike.
        magnitude: Mean magnitude of the entries, where it is told and nothing else is; None otherwise.
    """

    variance: Tensor
    low: Tensor
    high: Tensor
    peaked: bool = False
    magnitude: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether all noisy entries are known."""
        return bool((self.low == self.high).all())

    def scaled(self, factor: float) -> "Entries":
        """Those of the tensor times a positive factor."""
        magnitude = None if self.magnitude is None else self.magnitude * factor
        return Entries(self.variance * factor**2, self.low * factor, self.high * factor, self.peaked, magnitude)

    def part(self, first: int) -> "Entries":
        """Without the first rows."""
        return Entries(self.variance[first:], self.low[first:], self.high[first:], self.peaked, self.magnitude)

    @property
    def transposed(self) -> "Entries":
        """Of the transposed matrix."""
        return Entries(self.variance.mT, self.low.mT, self.high.mT, self.peaked, self.magnitude)

    def observed(self, mean: Tensor, variance: Tensor, last: Observations | None = None) -> Observations:
        """Normal observations that say the same of entries of which a normal distribution is believed.

        Args:
            mean: Of the belief.
            variance: Of the belief.
            last: Observations of this tensor that the belief rests on already; None if on none.
        """
        tiny = torch.finfo(mean.dtype).tiny
        value, precision = self.low.clone(), 1 / self.variance.clamp(min=tiny)
        apart = self.low < self.high
        if not apart.any():
            return Observations(value, precision)
        mean, variance = mean[apart], variance[apart].clamp(min=tiny)
        if last is not None:
            mean, variance = _without(mean, variance, last.value[apart], last.precision[apart])
        wide = variance + self.variance[apart]
        inside, spread = _moments(mean, wide.sqrt(), self.low[apart], self.high[apart], peaked=self.peaked)
        gained = 1 / spread - 1 / wide
        some = gained > LEAST / wide
        gained = torch.where(some, gained, 1.0)
        told = torch.where(some, (inside / spread - mean / wide) / gained, mean)
        precise = torch.where(some, 1 / (1 / gained + self.variance[apart]), 0.0)
        if last is not None:
            before = Observations(last.value[apart], KEPT * last.precision[apart])
            both = before + Observations(told, (1 - KEPT) * precise)
            told, precise = both.value, both.precision
        value[apart], precision[apart] = told, precise
        return Observations(value, precision)


def coarse(threat: ThreatModel) -> list[Defence]:
    """Defences that leave bounds instead of entries."""
    return [defence for defence in threat.pipeline.defences if COARSE & defence.marks]


def unread(threat: ThreatModel) -> str | None:
    """Why what was done to entries cannot be put as bounds; None if it can."""
    made, several = threat.pipeline.defences, coarse(threat)
    if len(several) > 1:
        return f"{several[0].name} and {several[1].name} together leave no bounds that can be read off"
    for defence in several:
        if "noisy" in defence.marks and not isinstance(defence, Quantise):
            return f"how {defence.name} rounds is not known"
        for later in made[made.index(defence) + 1 :]:
            if "noisy" in later.marks:
                return f"{later.name} hides the bounds that {defence.name} leaves"
    if threat.pipeline.by_example and threat.update == "delta":
        return f"how loud the noise of {threat.pipeline.by_example[0].name} is in a weight delta is not known"
    return None


def step_of(uploaded: Tensor, threat: ThreatModel) -> float:
    """Between two levels that entries of an uploaded tensor were rounded to at random; 0 of other pipelines."""
    if unread(threat) is not None:
        return 0.0
    return sum(float(uploaded.abs().max()) / each.levels for each in coarse(threat) if isinstance(each, Quantise))


def read_entries(uploaded: Tensor, threat: ThreatModel, averaged: int = 1) -> Entries:
    """What an uploaded tensor says of the client's, in float64; what ``unread`` names is taken for noise.

    Args:
        uploaded: Of one upload, or the mean of several that differ in noise and random rounding alone.
        threat: What was done to the entries.
        averaged: Of how many it is the mean. Noise is smaller by their root; rounding is not, as it may be the same.
    """
    tensor = uploaded.double()
    rounding = max(threat.rounding, torch.finfo(uploaded.dtype).eps / 2)
    bounds = coarse(threat) if unread(threat) is None else []
    step = step_of(uploaded, threat)
    noisy = [defence.noise_on(uploaded) for defence in threat.pipeline.defences if defence not in bounds]
    variance = (rounding * tensor).square() / 3 + sum(deviation**2 for deviation in noisy) / averaged
    sent = tensor.abs()
    if not bounds or not sent.any():
        return Entries(variance, tensor, tensor)
    if step and averaged > 1:
        return Entries(variance + EVEN * step**2 / averaged, tensor, tensor)
    if step:
        return Entries(variance, tensor - step, tensor + step, peaked=True)
    (defence,) = bounds
    if "signs" in defence.marks:
        endless, scale = torch.full_like(tensor, torch.inf), float(sent.max())
        low, high = torch.where(tensor > 0, 0.0, -endless), torch.where(tensor < 0, 0.0, endless)
        zero = tensor == 0  # of signs alone zero is one, too
        noise = torch.full_like(tensor, float(sum(deviation**2 for deviation in noisy)))
        return Entries(noise, low.masked_fill(zero, 0.0), high.masked_fill(zero, 0.0), magnitude=scale)
    least = sent[sent > 0].min()
    return Entries(variance, torch.where(sent > 0, tensor, -least), torch.where(sent > 0, tensor, least))


def _without(mean: Tensor, variance: Tensor, value: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """A belief before an observation that it rests on, as far as it rests on others, too."""
    left = 1 / variance - precision
    some = left > CERTAIN / variance
    left = torch.where(some, left, 1 / variance)
    return torch.where(some, (mean / variance - precision * value) / left, mean), 1 / left


def _moments(mean: Tensor, deviation: Tensor, low: Tensor, high: Tensor, *, peaked: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance of normal variables between bounds, by quadrature where they have their mass."""
    nearest = torch.minimum(torch.maximum(mean, low), high)
    away = (nearest - mean).abs()
    # Beyond a bound the density falls off the faster the farther its mean is.
    reach = 2 * FAR * deviation.square() / (2 * deviation + away)
    start, end = torch.maximum(nearest - reach, low), torch.minimum(nearest + reach, high)
    total, first, second = (torch.zeros_like(mean) for _ in range(3))
    middle, half = (low + high) / 2, (high - low) / 2
    for place, weight in zip(*_nodes(), strict=True):
        inside = start + (end - start) * (place + 1) / 2
        # Relative to the nearest point, where the density is largest, and measured from there.
        share = inside - nearest
        density = weight * torch.exp(-share * (share + 2 * (nearest - mean)) / (2 * deviation.square()))
        if peaked:
            density = density * (1 - (inside - middle).abs() / half).clamp(min=0)
        total, first, second = total + density, first + density * share, second + density * share.square()
    total = total.clamp(min=torch.finfo(mean.dtype).tiny)
    shift = first / total
    variance = (second / total - shift.square()).clamp(min=1e-12 * (end - start).square())
    return nearest + shift, variance


@lru_cache(maxsize=1)
def _nodes() -> tuple[list[float], list[float]]:
    """Places in [-1, 1] and weights of Gauss and Legendre's quadrature."""
    places, weights = np.polynomial.legendre.leggauss(NODES)
    return places.tolist(), weights.tolist()
