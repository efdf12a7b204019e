"""Where searches for tokens start: at tokens of patches that are drawn from the prior of natural pictures.

From points drawn alike in all directions nearly all searches end in the few places where smooth patches crowd. Drawn
patches have most of their level taken away, because what tells patches apart is not their brightness.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.first_block.block import Norm, norm_of
from fedmjp.attacks.first_block.places import TokenEmbedding
from fedmjp.models.classifier import VitClassifier

LEVEL = 0.1  # what is left of the mean of each channel


@dataclass(frozen=True)
class NaturalStarts:
    """Draws whitened tokens behind the first attention, as if it added nothing."""

    entrance: TokenEmbedding
    norm: Norm
    root: Tensor  # (values, values), of the covariance of patches

    @staticmethod
    def of(model: VitClassifier) -> "NaturalStarts":
        """For one model."""
        entrance = TokenEmbedding.of(model)
        strengths, axes = torch.linalg.eigh(entrance.prior.covariance)
        return NaturalStarts(entrance, norm_of(model, "0.norm2"), axes * strengths.clamp(min=0).sqrt())

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, dim), in places drawn alike."""
        positions, mean = self.entrance.positions, self.entrance.prior.mean
        drawn = torch.randn(count, len(mean), generator=generator, dtype=torch.float64).to(mean) @ self.root.mT
        channels = drawn.view(count, 3, -1)
        patches = (channels - (1 - LEVEL) * channels.mean(2, keepdim=True)).flatten(1) + mean
        places = torch.randint(len(positions), (count,), generator=generator).to(mean.device)
        tokens = patches @ self.entrance.weight.mT + self.entrance.shift + positions[places]
        return self.norm.whiten(tokens)[0]
