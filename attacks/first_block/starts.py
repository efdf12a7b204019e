"""Starts of searches for tokens: tokens of patches that are drawn from the prior of natural pictures.

From isotropic points nearly all searches end in the few places where smooth patches crowd. Most of the level of drawn
patches is taken away, because brightness does not tell patches apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.first_block.block import Norm, norm_of
from fedmjp.attacks.first_block.places import TokenEmbedding
from fedmjp.models.classifier import VitClassifier

LEVEL = 0.1  # share of the mean of each channel that remains


@dataclass(frozen=True)
class NaturalStarts:
    """Draws whitened tokens behind the first attention, as if attention added nothing."""

    embedding: TokenEmbedding
    norm: Norm
    root: Tensor  # (values, values), of the covariance of patches

    @staticmethod
    def of(model: VitClassifier) -> "NaturalStarts":
        """Prepare to draw starts for one model."""
        embedding = TokenEmbedding.of(model)
        strengths, axes = torch.linalg.eigh(embedding.prior.covariance)
        return NaturalStarts(embedding, norm_of(model, "0.norm2"), axes * strengths.clamp(min=0).sqrt())

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw whitened tokens (count, dim), in uniformly drawn places.

        Args:
            count: How many.
            generator: On the CPU.
        """
        positions, mean = self.embedding.positions, self.embedding.prior.mean
        drawn = torch.randn(count, len(mean), generator=generator, dtype=torch.float64).to(mean) @ self.root.mT
        channels = drawn.view(count, 3, -1)
        patches = (channels - (1 - LEVEL) * channels.mean(2, keepdim=True)).flatten(1) + mean
        places = torch.randint(len(positions), (count,), generator=generator).to(mean.device)
        tokens = patches @ self.embedding.weight.mT + self.embedding.shift + positions[places]
        return self.norm.whiten(tokens)[0]
