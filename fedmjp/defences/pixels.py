"""Shuffle patches, and the pixels in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import Arranged
from fedmjp.defences.jigsaw import Jigsaw
from fedmjp.patches import from_patches, to_patches
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor


class Pixels(Jigsaw):
    """A shuffle of all patches of a picture and, with one permutation for all of them, of the pixels inside.

    Example:
        >>> import torch
        >>> from fedmjp.randomness import SeededRandomness
        >>> images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> arranged = Pixels().arrange(images, 4, randomness=[SeededRandomness(seed=0)])
        >>> torch.equal(arranged.images.sort().values, images.sort().values), bool(arranged.mask.all())
        (False, True)

    References:
        Tolstikhin et al., "MLP-Mixer", NeurIPS 2021, the permuted pixels of section 3.4.
    """

    name = "pixels"
    paper = "Ren et al., Masked Jigsaw Puzzle, CVPR 2023, Table 4, row C (SPP)"
    summary = "shuffles all patches of a picture, and the pixels in them alike"
    told = "that patches and pixels are shuffled; neither order"
    marks: ClassVar = frozenset({"shuffled", "reshaped"})
    options_type = Config
    mask_ratio = 1.0
    shuffles = True

    @override
    def arrange(self, images: Tensor, grid: int, *, randomness: Sequence[Randomness]) -> Arranged:
        import torch

        size = images.shape[-1] // grid
        moved, sources = [], []
        for patches, source in zip(to_patches(images, size), randomness, strict=True):
            generator = source.generator()
            pixels = torch.randperm(size**2, generator=generator).to(images.device)
            places = torch.randperm(grid**2, generator=generator)
            moved.append(patches.view(grid**2, 3, -1)[places.to(images.device)][..., pixels].flatten(1))
            sources.append(places)
        order = torch.stack(sources)
        return Arranged(from_patches(torch.stack(moved), images.shape[-1], size), torch.ones_like(order).bool(), order)
