"""Hide whether a picture is there: clip the gradient of each, and add noise (DP-SGD)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import Spent
from fedmjp.defences.privacy import HIGHEST_EPSILON, Calibrated, ClippingNorm
from fedmjp.errors import DefenceError
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor


class DpSgdOptions(Config):
    """Options of the guarantee, and the training that it is for."""

    epsilon: float = Field(8.0, gt=0, le=HIGHEST_EPSILON, description="that all steps together cost a picture")
    delta: float = Field(1e-5, gt=0, lt=1, description="of the same guarantee")
    clipping_norm: ClippingNorm = Field(1.0, description="largest norm of a picture's gradient")
    steps: int = Field(1, ge=1, description="steps of a client that the epsilon is for")
    steps_per_upload: int = Field(1, ge=1, description="steps behind one upload, to count what uploads cost")
    batch_size: int = Field(1, ge=1, description="pictures expected in a step, by which their sum is divided")


class DpSgd(Calibrated):
    """DP-SGD: clipped gradients of single pictures, and Gaussian noise that hides whether a picture is there.

    One picture more or less changes the sum of the clipped gradients by at most the clipping norm; the noise on
    the sum has the noise multiplier times that as its standard deviation. The sum is divided by ``batch_size``,
    which may not depend on the data. The multiplier is the smallest with which ``steps`` steps cost no more than
    epsilon together, if a picture takes part in every one of them. Batches are drawn by shuffling here, so nothing is
    credited to sampling: that needs batches of random size (Poisson sampling).

    Example:
        >>> spent = DpSgd({"epsilon": 4, "steps": 100}).spent(100)
        >>> round(spent.epsilon, 2), spent.unit
        (4.0, 'picture')
    """

    name = "dp_sgd"
    paper = "Abadi et al., Deep learning with differential privacy, CCS 2016"
    summary = "clips the gradient of each picture and adds Gaussian noise: epsilon per picture, composed over steps"
    told = "clipping norm and standard deviation of the noise, not the factors of the clipping"
    stages = ("examples",)
    scope = "example"
    sensitivity = 1
    options_type = DpSgdOptions

    @property
    @override
    def multiplier(self) -> float:
        from fedmjp.defences.accounting import noise_multiplier

        return noise_multiplier(self.options.epsilon, self.options.delta, self.options.steps)

    @property
    @override
    def divisor(self) -> int:
        return int(self.options.batch_size)

    def protect_examples(self, gradients: Mapping[str, Tensor], *, randomness: Randomness) -> dict[str, Tensor]:
        """Combine clipped gradients and noise; arguments as for ``Defence.protect_examples``.

        Raises:
            DefenceError: If a value is not finite, or a step has more pictures than ``batch_size``.
        """
        batch = max(map(len, gradients.values()), default=0)
        if batch > self.options.batch_size:
            raise DefenceError(
                f"{self.name}: a step has {batch} pictures, batch-size is {self.options.batch_size}; set it to {batch}"
            )
        examples = [{name: gradient[place] for name, gradient in gradients.items()} for place in range(batch)]
        nobody = {name: gradient.new_zeros(gradient.shape[1:]) for name, gradient in gradients.items()}
        return self.release([nobody, *examples], randomness=randomness)

    def spent(self, uploads: int) -> Spent:
        """Compute the privacy that uploads cost a picture, which may take part in each step.

        Args:
            uploads: How many, from 0.
        """
        from fedmjp.defences.accounting import composed_epsilon

        options = self.options
        steps = uploads * options.steps_per_upload
        epsilon = composed_epsilon(self.multiplier, options.delta, steps)
        return Spent(epsilon, options.delta, "add-or-remove-one", "picture", uploads)
