"""Gaussian noise in proportion to each tensor."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from fedmjp.config import Config
from fedmjp.defences.base import Client, Defence
from fedmjp.randomness import Randomness


class GaussianOptions(Config):
    """How much noise."""

    noise: float = Field(0.01, gt=0, allow_inf_nan=False, description="standard deviation over each tensor's RMS")


class Gaussian(Defence):
    """Adds Gaussian noise to every entry, zeros included.

    Its standard deviation is a share of the tensor's own root mean square, so that the noise is as loud in a small
    tensor as in a large one. That share depends on the data: it is no differential privacy.
    """

    name = "gaussian"
    paper = "noise as in Zhu et al., Deep Leakage from Gradients, NeurIPS 2019, section 5.1, here relative"
    summary = "Gaussian noise in proportion to each tensor's root mean square; no privacy guarantee"
    told = "the standard deviation of the noise, relative to each tensor"
    stages = ("update",)
    marks: ClassVar = frozenset({"noisy"})
    options_type = GaussianOptions

    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        """As of ``Defence``."""
        del client
        return {name: self._noised(name, tensor, randomness) for name, tensor in update.items()}

    def noise_on(self, uploaded: Tensor) -> float:
        """As of ``Defence``: what was uploaded holds the noise already."""
        share: float = self.options.noise
        return share * float(uploaded.double().square().mean().sqrt()) / (1 + share**2) ** 0.5

    def _noised(self, name: str, tensor: Tensor, randomness: Randomness) -> Tensor:
        drawn = randomness.normal(name, tensor.shape).to(tensor)
        return tensor + self.options.noise * tensor.square().mean().sqrt() * drawn
