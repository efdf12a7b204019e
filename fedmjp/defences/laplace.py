"""Laplace noise in proportion to each tensor."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedmjp.config import Config
from fedmjp.defences.tensors import TensorDefence, noise_in
from fedmjp.randomness import Randomness

STEP = 2.0**-24  # of uniform float32 values


class LaplaceOptions(Config):
    """How much noise."""

    noise: float = Field(0.01, gt=0, allow_inf_nan=False, description="standard deviation over each tensor's RMS")


class Laplace(TensorDefence):
    """Adds Laplace noise to every entry, zeros included: more small values and more large ones than Gaussian noise.

    Its standard deviation is a share of the tensor's own root mean square. That share depends on the data: it is
    no differential privacy. The noise is the Laplace quantile of uniform values, and ends at 12.4 standard
    deviations.
    """

    name = "laplace"
    paper = "noise as in Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, section 5.1, here relative"
    summary = "Laplace noise in proportion to each tensor's root mean square; no privacy guarantee"
    told = "the standard deviation of the noise, relative to each tensor"
    marks: ClassVar = frozenset({"noisy"})
    options_type = LaplaceOptions

    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        """As of ``TensorDefence``."""
        # The middle of each interval, in doubles: neither end, where the quantile is infinite.
        centred = randomness.uniform(name, tensor.shape).double() + STEP / 2 - 0.5
        drawn = -centred.sign() * torch.log1p(-2 * centred.abs()) / 2**0.5
        return tensor + float(self.options.noise) * tensor.square().mean().sqrt() * drawn.to(tensor)

    def noise_on(self, uploaded: Tensor) -> float:
        """As of ``Defence``: what was uploaded holds the noise already."""
        return noise_in(uploaded, self.options.noise)
