"""What defences with a differential privacy guarantee share: Gaussian noise of one standard deviation."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedmjp.defences.base import Defence

if TYPE_CHECKING:
    from torch import Tensor

HIGHEST_EPSILON = 1e12  # up to which the accountant's figures are right, far beyond any guarantee


class Calibrated(Defence):
    """Clips, and adds Gaussian noise of one standard deviation to every entry."""

    marks: ClassVar = frozenset({"noisy", "scaled"})

    @property
    @abstractmethod
    def deviation(self) -> float:
        """The noise's standard deviation on an entry."""

    @override
    def noise_on(self, uploaded: Tensor) -> float:
        return self.deviation if uploaded.is_floating_point() else 0.0
