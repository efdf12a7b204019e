"""Hide which data a client has: clip its whole update, and add noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import Client, Spent
from fedmjp.defences.privacy import HIGHEST_EPSILON, Calibrated, ClippingNorm
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor


class LocalDpOptions(Config):
    """Options of the guarantee."""

    epsilon: float = Field(8.0, gt=0, le=HIGHEST_EPSILON, description="that all rounds together cost a client")
    delta: float = Field(1e-5, gt=0, lt=1, description="of the same guarantee")
    clipping_norm: ClippingNorm = Field(1.0, description="largest norm of the whole update")
    rounds: int = Field(1, ge=1, description="uploads of a client that the epsilon is for")


class LocalDp(Calibrated):
    """Local differential privacy: a clipped update, and Gaussian noise that hides which data the client has.

    Two data sets of a client, however different, give updates at most twice the clipping norm apart; the noise's
    standard deviation is the noise multiplier times that. The multiplier is the smallest with which the stated
    rounds cost no more than epsilon together.

    Example:
        >>> spent = LocalDp({"epsilon": 8, "rounds": 10}).spent(10)
        >>> round(spent.epsilon, 2), spent.unit
        (8.0, 'client')
    """

    name = "local_dp"
    paper = (
        "Dwork and Roth, Algorithmic foundations of differential privacy, 2014; noise as in Balle and Wang, ICML 2018"
    )
    summary = "clips the whole update and adds Gaussian noise: epsilon per client, composed over rounds"
    told = "clipping norm and standard deviation of the noise, not the factor of the clipping"
    stages = ("update",)
    scope = "update"
    sensitivity = 2
    options_type = LocalDpOptions

    @property
    @override
    def multiplier(self) -> float:
        from fedmjp.defences.accounting import noise_multiplier

        return noise_multiplier(self.options.epsilon, self.options.delta, self.options.rounds)

    @override
    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        return self.release([update], randomness=randomness)

    @override
    def spent(self, uploads: int) -> Spent:
        from fedmjp.defences.accounting import composed_epsilon

        epsilon = composed_epsilon(self.multiplier, self.options.delta, uploads)
        return Spent(epsilon, self.options.delta, "replace-one", "client", uploads)
