"""Shuffled patches and pixels (SPP): all patches of a picture change places, and so do the pixels in them."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fedmjp.defences.base import Arranged, NoOptions
from fedmjp.defences.jigsaw import Jigsaw
from fedmjp.patches import from_patches, to_patches
from fedmjp.randomness import Randomness


class Pixels(Jigsaw):
    """Moves all patches of a picture, and, with one permutation for all of them, the pixels inside.

    References:
        Tolstikhin et al., "MLP-Mixer", NeurIPS 2021, the permuted pixels of section 3.4; Ren et al., "Masked Jigsaw
        Puzzle", CVPR 2023, Table 4 (row C).
    """

    name = "pixels"
    paper = "Ren et al., Masked Jigsaw Puzzle, CVPR 2023, Table 4, row C (SPP)"
    summary = "shuffles all patches of a picture, and the pixels in them alike"
    told = "that patches and pixels are shuffled; neither order"
    marks: ClassVar = frozenset({"shuffled", "reshaped"})
    options_type = NoOptions

    @property
    def mask_ratio(self) -> float:
        """As of ``Defence``."""
        return 1.0

    @property
    def shuffles(self) -> bool:
        """As of ``Defence``."""
        return True

    def arrange(self, images: Tensor, grid: int, *, randomness: Sequence[Randomness]) -> Arranged:
        """As of ``Defence``."""
        size = images.shape[-1] // grid
        moved, sources = [], []
        for patches, source in zip(to_patches(images, size), randomness, strict=True):
            generator = source.generator()
            pixels = torch.randperm(size**2, generator=generator).to(images.device)
            places = torch.randperm(grid**2, generator=generator)
            moved.append(patches.view(grid**2, 3, -1)[places.to(images.device)][..., pixels].flatten(1))
            sources.append(places)
        found = torch.stack(sources)
        return Arranged(from_patches(torch.stack(moved), images.shape[-1], size), torch.ones_like(found).bool(), found)
