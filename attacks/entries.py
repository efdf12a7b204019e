"""Bounds that the entries of a degraded tensor set to those that the client computed.

Every kind of degradation is put in one form: an entry, with normal noise on it, lies between two bounds. The bounds are
equal where it is noisy or rounded alone; what was pruned lies below the smallest that was kept; a quantised entry
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

    def __add__(self, second: "Observations") -> "Observations":
        """Combine two independent sets of observations."""
        precision = self.precision + second.precision
        mean = (self.precision * self.value + second.precision * second.value) / precision
        return Observations(torch.where(precision > 0, mean, self.value), precision)


@dataclass(frozen=True)
class Entries:
    """Bounds between which the entries of one tensor, plus normal noise, lie.

    Attributes:
        variance: The noise's variance.
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
        """Say whether all noisy entries are known."""
        return bool((self.low == self.high).all())

    def scaled(self, factor: float) -> "Entries":
        """Multiply the tensor by a positive factor.

        Args:
            factor: Above 0.
        """
        magnitude = None if self.magnitude is None else self.magnitude * factor
        return Entries(self.variance * factor**2, self.low * factor, self.high * factor, self.peaked, magnitude)

    def part(self, first: int) -> "Entries":
        """Leave the first rows out.

        Args:
            first: The number of rows that are left out.
        """
        return Entries(self.variance[first:], self.low[first:], self.high[first:], self.peaked, self.magnitude)

    @property
    def transposed(self) -> "Entries":
        """Transpose the matrix."""
        return Entries(self.variance.mT, self.low.mT, self.high.mT, self.peaked, self.magnitude)

    def observed(self, mean: Tensor, variance: Tensor, last: Observations | None = None) -> Observations:
        """Replace bounds by normal observations that have the same effect on a normal belief.

        Args:
            mean: The belief's mean, like the entries.
            variance: The belief's variance.
            last: Observations of this tensor that the belief rests on already; None if on none.
        """
        tiny = torch.finfo(mean.dtype).tiny
        value, precision = self.low.clone(), 1 / self.variance.clamp(min=tiny)
        bounded = self.low < self.high
        if not bounded.any():
            return Observations(value, precision)
        mean, variance = mean[bounded], variance[bounded].clamp(min=tiny)
        if last is not None:
            mean, variance = _without(mean, variance, last.value[bounded], last.precision[bounded])
        wide = variance + self.variance[bounded]
        inside, spread = _moments(mean, wide.sqrt(), self.low[bounded], self.high[bounded], peaked=self.peaked)
        gained = 1 / spread - 1 / wide
        some = gained > LEAST / wide
        gained = torch.where(some, gained, 1.0)
        center = torch.where(some, (inside / spread - mean / wide) / gained, mean)
        precise = torch.where(some, 1 / (1 / gained + self.variance[bounded]), 0.0)
        if last is not None:
            damped = Observations(last.value[bounded], KEPT * last.precision[bounded])
            both = damped + Observations(center, (1 - KEPT) * precise)
            center, precise = both.value, both.precision
        value[bounded], precision[bounded] = center, precise
        return Observations(value, precision)


def coarse(threat: ThreatModel) -> list[Defence]:
    """List the defences that leave bounds instead of entries.

    Args:
        threat: States the defences.
    """
    return [defence for defence in threat.pipeline.defences if COARSE & defence.marks]


def unread(threat: ThreatModel) -> str | None:
    """Say why the effect of the defences on entries cannot be put as bounds.

    Args:
        threat: States the defences.

    Returns:
        The reason; None if bounds describe it.
    """
    defences, bounding = threat.pipeline.defences, coarse(threat)
    if len(bounding) > 1:
        return f"{bounding[0].name} and {bounding[1].name} together leave no bounds that can be read off"
    for defence in bounding:
        if "noisy" in defence.marks and not isinstance(defence, Quantise):
            return f"how {defence.name} rounds is not known"
        for later in defences[defences.index(defence) + 1 :]:
            if "noisy" in later.marks:
                return f"{later.name} hides the bounds that {defence.name} leaves"
    if threat.pipeline.by_example and threat.update == "delta":
        return f"how loud the noise of {threat.pipeline.by_example[0].name} is in a weight delta is not known"
    return None


def step_of(uploaded: Tensor, threat: ThreatModel) -> float:
    """Return the distance between two levels that entries were rounded to at random; 0 under other defences.

    Args:
        uploaded: One tensor of an upload.
        threat: States the defences.
    """
    if unread(threat) is not None:
        return 0.0
    return sum(
        float(uploaded.abs().max()) / defence.levels for defence in coarse(threat) if isinstance(defence, Quantise)
    )


def read_entries(uploaded: Tensor, threat: ThreatModel, averaged: int = 1) -> Entries:
    """Read what an uploaded tensor says of the client's, in float64; what ``unread`` names is taken for noise.

    Args:
        uploaded: A tensor of one upload, or the mean of several that differ in noise and random rounding alone.
        threat: States what was done to the entries.
        averaged: The number of uploads behind the mean. Noise is smaller by its root; rounding is not, as it may be the
            same.
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
    """Take an observation out of a belief, as far as the belief rests on others, too."""
    precision_left = 1 / variance - precision
    some = precision_left > CERTAIN / variance
    precision_left = torch.where(some, precision_left, 1 / variance)
    return torch.where(some, (mean / variance - precision * value) / precision_left, mean), 1 / precision_left


def _moments(mean: Tensor, deviation: Tensor, low: Tensor, high: Tensor, *, peaked: bool) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of normal variables between bounds, by quadrature where they have their mass."""
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
    """Return places in [-1, 1] and weights of Gauss-Legendre quadrature."""
    places, weights = np.polynomial.legendre.leggauss(NODES)
    return places.tolist(), weights.tolist()
