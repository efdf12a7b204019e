"""Gaussian noise of one standard deviation, as defences with a differential privacy guarantee share it."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedmjp.defences.base import Defence

if TYPE_CHECKING:
    from torch import Tensor

HIGHEST_EPSILON = 1e12  # up to which the accountant's figures are right, far beyond any guarantee


class Calibrated(Defence):
    """Base of defences that clip, and add Gaussian noise of one standard deviation to every entry."""

    marks: ClassVar = frozenset({"noisy", "scaled"})

    @property
    @abstractmethod
    def deviation(self) -> float:
        """Return the noise's standard deviation on an entry."""

    @override
    def noise_on(self, uploaded: Tensor) -> float:
        return self.deviation if uploaded.is_floating_point() else 0.0
