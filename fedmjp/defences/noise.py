"""Noise in proportion to each tensor, Gaussian or Laplace."""

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import TensorDefence
from fedmjp.randomness import Randomness

STEP = 2.0**-24  # of uniform float32 values


class NoiseOptions(Config):
    """How much noise."""

    noise: float = Field(0.01, gt=0, allow_inf_nan=False, description="standard deviation over each tensor's RMS")


class RelativeNoise(TensorDefence):
    """Adds noise to every entry, zeros included.

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
        """Noise of variance 1, of the tensor's shape, on the CPU."""

    @override
    def noise_on(self, uploaded: Tensor) -> float:
        if not uploaded.is_floating_point() or not uploaded.numel():
            return 0.0
        share = float(self.options.noise)  # of the tensor before the noise, which what was uploaded holds already
        return share * float(uploaded.double().square().mean().sqrt()) / math.sqrt(1 + share**2)


class Gaussian(RelativeNoise):
    """Adds Gaussian noise."""

    name = "gaussian"
    summary = "Gaussian noise in proportion to each tensor's root mean square; no privacy guarantee"

    @override
    def draw(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        return randomness.normal(name, tensor.shape)


class Laplace(RelativeNoise):
    """Adds Laplace noise: more small values and more large ones than Gaussian noise.

    It is the Laplace quantile of uniform values, and ends at 12.4 standard deviations.
    """

    name = "laplace"
    summary = "Laplace noise in proportion to each tensor's root mean square; no privacy guarantee"

    @override
    def draw(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        # The middle of each interval, in doubles: neither end, where the quantile is infinite.
        centred = randomness.uniform(name, tensor.shape).double() + STEP / 2 - 0.5
        return -centred.sign() * torch.log1p(-2 * centred.abs()) / 2**0.5
