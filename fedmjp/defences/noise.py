"""Noise in proportion to each tensor, as Gaussian and Laplace noise share it."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import TensorDefence
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor


class NoiseOptions(Config):
    """Options of the noise."""

    noise: float = Field(0.01, gt=0, allow_inf_nan=False, description="standard deviation over each tensor's RMS")


class RelativeNoise(TensorDefence):
    """Base of defences that add noise to every entry, zeros included.

    Its standard deviation is a share of the tensor's own root mean square, so that the noise is as loud in a small
    tensor as in a large one. That share depends on the data: it is no differential privacy.
    """

    paper = "noise as in Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, section 5.1, here relative"
    told = "the standard deviation of the noise, relative to each tensor"
    marks: ClassVar = frozenset({"noisy"})
    options_type = NoiseOptions

    @override
    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        drawn = self.draw(name, tensor, randomness).to(tensor)
        return tensor + float(self.options.noise) * tensor.square().mean().sqrt() * drawn

    @abstractmethod
    def draw(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        """Draw noise of variance 1 on the CPU.

        Args:
            name: Of the tensor.
            tensor: Gives the shape.
            randomness: Source of the noise.
        """

    @override
    def noise_on(self, uploaded: Tensor) -> float:
        if not uploaded.is_floating_point() or not uploaded.numel():
            return 0.0
        share = float(self.options.noise)  # of the tensor before the noise, which what was uploaded holds already
        return share * float(uploaded.double().square().mean().sqrt()) / math.sqrt(1 + share**2)
