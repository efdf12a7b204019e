"""What MJP does to a batch of training pictures."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp import jigsaw
from fedmjp.jigsaw import Jigsaw
from fedmjp.models.classifier import Classifier
from fedmjp.patches import from_patches, to_patches
from fedmjp.training.config import Puzzle


@dataclass(frozen=True)
class Puzzled:
    """A batch as the network sees it.

    Attributes:
        images: (batch, 3, size, size) in [0, 1].
        jigsaw: The puzzle of each picture, on the CPU; None where patches kept their places or went "pixels".
    """

    images: Tensor
    jigsaw: Jigsaw | None = None


def puzzled(images: Tensor, model: Classifier, puzzle: Puzzle, *, epoch: int, generator: torch.Generator) -> Puzzled:
    """Shuffle a batch as the puzzle says.

    Args:
        images: (batch, 3, size, size) in [0, 1].
        model: Whose patches are moved.
        puzzle: What to do.
        epoch: From 0.
        generator: Source of randomness, on the CPU.
    """
    if puzzle.shuffle == "none" or epoch < puzzle.warmup_epochs:
        return Puzzled(images)
    if torch.rand((), generator=generator).item() >= puzzle.probability:
        return Puzzled(images)
    if puzzle.shuffle == "pixels":
        return Puzzled(_pixels_shuffled(images, model, generator))
    count = len(images) if puzzle.masks == "picture" else 1
    drawn = [jigsaw.draw(model.grid, puzzle.mask_ratio, generator=generator) for _ in range(count)]
    source = torch.cat([each.source for each in drawn]).expand(len(images), -1)
    mask = torch.cat([each.mask for each in drawn]).expand(len(images), -1)
    return Puzzled(jigsaw.rearrange(images, source.to(images.device)), Jigsaw(mask, source))


def _pixels_shuffled(images: Tensor, model: Classifier, generator: torch.Generator) -> Tensor:
    """SPP: one permutation of the pixels in every patch, one of the patches, the same for the whole batch."""
    patches = to_patches(images, model.patch_size)
    batch, count, values = patches.shape
    pixels = torch.randperm(values // 3, generator=generator).to(images.device)
    places = torch.randperm(count, generator=generator).to(images.device)
    moved = patches.view(batch, count, 3, -1)[:, places][..., pixels]
    return from_patches(moved.reshape(batch, count, values), model.image_size, model.patch_size)
