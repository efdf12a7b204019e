"""Gaussian noise in whole numbers, as defences with a differential privacy guarantee share it.

Floating-point noise betrays what it hides: of the floats, only some can be reached from a given update, and which ones
tells it (Mironov, CCS 2012, for Laplace noise). Here an update becomes whole steps of a grid, at most ``length`` long
as a vector, which is checked in whole numbers; rounded normal noise is added to the steps. A sum of whole numbers and
rounded noise is the rounded sum with unrounded noise, so the accounting of the Gaussian mechanism holds as it is. What
leaves is computed from the noisy steps alone.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedmjp.defences.base import Defence, require_finite
from fedmjp.defences.clipping import global_norm
from fedmjp.defences.rounded_normal import LARGEST, pieces, rounded_normal
from fedmjp.errors import DefenceError
from fedmjp.randomness import Randomness
from fedmjp.tensors import is_finite

if TYPE_CHECKING:
    from torch import Tensor

HIGHEST_EPSILON = 1e12  # up to which the accountant's figures are right, far beyond any guarantee
FINE = 64  # steps in a typical entry of a vector of the largest norm, and in the noise's deviation, at least
SHORTEST = 2.0**18  # steps in the largest norm, at least
SHRINK = 1 - 2.0**-30

ClippingNorm = Annotated[float, Field(ge=1e-30, le=1e30)]  # float32 holds it, and an entry of it


@dataclass(frozen=True)
class StepGrid:
    """Whole steps that stand for real numbers: ``length`` of them are as long as ``norm``."""

    norm: float
    length: int

    def steps(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Clip a vector to the norm and round it to whole steps, together at most ``length`` long.

        Args:
            vector: Finite tensors of real numbers, by name.

        Raises:
            DefenceError: If the vector is too long for double precision.
        """
        per_unit = self.length / self.norm
        longest = per_unit * global_norm(vector)
        if not math.isfinite(longest):
            raise DefenceError("the update is too long for double precision; it does not leave")
        factor = per_unit * self.length / max(longest, self.length)
        while True:
            steps = {name: _rounded(tensor, factor) for name, tensor in vector.items()}
            square = sum(int(part.square().sum()) for tensor in steps.values() for part in pieces(tensor))
            if square <= self.length**2:
                return steps
            factor *= SHRINK * self.length / math.sqrt(square)


def _rounded(tensor: Tensor, factor: float) -> Tensor:
    import torch

    steps = torch.empty_like(tensor, dtype=torch.int64, memory_format=torch.contiguous_format)
    for part, of_part in zip(pieces(tensor), pieces(steps), strict=True):
        of_part.copy_((part.double() * factor).round_())
    return steps


class Calibrated(Defence):
    """Base of defences that clip, and add Gaussian noise of one standard deviation to every real number.

    Whole numbers, such as the counters of a normalisation layer, do not move.
    """

    marks: ClassVar = frozenset({"noisy", "scaled"})
    sensitivity: ClassVar[int]  # clipping norms by which neighbours' sums can differ

    @property
    @abstractmethod
    def multiplier(self) -> float:
        """Return the noise's standard deviation over what a neighbour can change."""

    @property
    def divisor(self) -> int:
        """Return the number by which clipped vectors and noise are divided together."""
        return 1

    @property
    def deviation(self) -> float:
        """Return the noise's standard deviation on an entry."""
        return self._ratio * float(self.options.clipping_norm) / self.divisor

    @override
    def noise_on(self, uploaded: Tensor) -> float:
        return self.deviation if uploaded.is_floating_point() else 0.0

    def release(self, vectors: Sequence[Mapping[str, Tensor]], *, randomness: Randomness) -> dict[str, Tensor]:
        """Clip each vector, and release their sum with noise, over the divisor.

        Args:
            vectors: Tensors by name, alike in names, shapes and types.
            randomness: Source of the noise.

        Raises:
            DefenceError: If a tensor is complex or not finite, or the noise cannot be stated in whole numbers.
        """
        import torch

        for vector in vectors:
            require_finite(vector, self.name)
        tensors = vectors[0]
        for name, tensor in tensors.items():
            if tensor.is_complex():
                raise DefenceError(f"{self.name}: tensor {name!r} holds complex numbers, which it does not protect")
        real = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        grid = self._grid(sum(tensors[name].numel() for name in real))
        total: dict[str, Tensor] = {}
        for vector in vectors:
            for name, steps in grid.steps({name: vector[name] for name in real}).items():
                total[name] = total[name].add_(steps) if name in total else steps
        released = {name: torch.zeros(tensor.shape).to(tensor) for name, tensor in tensors.items()}
        for name, steps in total.items():
            noise = rounded_normal(randomness, name, tuple(steps.shape), self._ratio * grid.length)
            noisy = steps.add_(noise.to(steps.device))
            for part, of_part in zip(pieces(noisy), pieces(released[name]), strict=True):
                of_part.copy_(part.double().mul_(grid.norm / grid.length / self.divisor))
            if not is_finite(released[name]):
                raise DefenceError(
                    f"{self.name}: noise of {self.deviation:.3g} does not fit {tensors[name].dtype} of {name!r}; "
                    "send float32 or lower the clipping norm"
                )
        return released

    @property
    def _ratio(self) -> float:
        """Return the noise's standard deviation over the clipping norm, before the division."""
        return self.multiplier * self.sensitivity

    def _grid(self, entries: int) -> StepGrid:
        """Choose the grid by public numbers: fine for an entry of a clipped vector and for the noise."""
        steps = max(SHORTEST, FINE * math.sqrt(entries), FINE / self._ratio)
        grid = StepGrid(float(self.options.clipping_norm), 2 ** math.ceil(math.log2(steps)))
        if self._ratio * grid.length > LARGEST:
            raise DefenceError(
                f"{self.name}: noise of {self._ratio:.3g} times the clipping norm over {entries} numbers is "
                f"{self._ratio * grid.length:.3g} steps of a grid, at most {LARGEST:.3g} are drawn exactly; "
                "take a larger epsilon"
            )
        return grid
