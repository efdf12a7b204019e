"""Gaussian noise in proportion to each tensor."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedmjp.config import Config
from fedmjp.defences.tensors import TensorDefence, noise_in
from fedmjp.randomness import Randomness


class GaussianOptions(Config):
    """How much noise."""

    noise: float = Field(0.01, gt=0, allow_inf_nan=False, description="standard deviation over each tensor's RMS")


class Gaussian(TensorDefence):
    """Adds Gaussian noise to every entry, zeros included.

    Its standard deviation is a share of the tensor's own root mean square, so that the noise is as loud in a small
    tensor as in a large one. That share depends on the data: it is no differential privacy.
    """

    name = "gaussian"
    paper = "noise as in Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, section 5.1, here relative"
    summary = "Gaussian noise in proportion to each tensor's root mean square; no privacy guarantee"
    told = "the standard deviation of the noise, relative to each tensor"
    marks: ClassVar = frozenset({"noisy"})
    options_type = GaussianOptions

    def change(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        """As of ``TensorDefence``."""
        drawn = randomness.normal(name, tensor.shape).to(tensor)
        return tensor + float(self.options.noise) * tensor.square().mean().sqrt() * drawn

    def noise_on(self, uploaded: Tensor) -> float:
        """As of ``Defence``: what was uploaded holds the noise already."""
        return noise_in(uploaded, self.options.noise)
