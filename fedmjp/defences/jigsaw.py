"""Shuffle the patches of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from fedmjp import jigsaw
from fedmjp.config import Config, MaskRatio
from fedmjp.defences.base import Arranged, Defence, Drawn, Stage
from fedmjp.randomness import Randomness
from fedmjp.tensors import to_device

if TYPE_CHECKING:
    from torch import Tensor


class JigsawOptions(Config):
    """Options of the shuffle."""

    mask_ratio: MaskRatio = Field(0.27, description="wanted share of the patches that change places")
    shuffle: bool = Field(True, description="without, patches stay in place: MJP's masks alone (setting a)")


class Jigsaw(Defence):
    """A shuffle of the patches of block-wise masks; they keep the position embeddings of their new places.

    Example:
        >>> import torch
        >>> from fedmjp.randomness import SeededRandomness
        >>> images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> arranged = Jigsaw({"mask_ratio": 0.5}).arrange(images, 8, randomness=[SeededRandomness(seed=0)])
        >>> arranged.images.shape, arranged.mask.shape, bool((arranged.images != images).any())
        (torch.Size([1, 3, 32, 32]), torch.Size([1, 64]), True)
    """

    name = "jigsaw"
    paper = "Ren et al., Masked Jigsaw Puzzle, CVPR 2023, Table 4, row E"
    summary = "shuffles the patches of block-wise masks, without MJP's unknown embedding"
    told = "that patches are shuffled, and the wanted share; neither mask nor order"
    stages: ClassVar[tuple[Stage, ...]] = ("pictures",)
    marks: ClassVar = frozenset({"shuffled"})
    options_type: ClassVar[type[Config]] = JigsawOptions

    @property
    @override
    def mask_ratio(self) -> float:
        return float(self.options.mask_ratio)

    @property
    @override
    def shuffles(self) -> bool:
        return bool(self.options.shuffle)

    def arrange(self, images: Tensor, grid: int, *, randomness: Sequence[Randomness]) -> Arranged:
        """Shuffle pictures by one puzzle each; arguments as for ``Defence.arrange``."""
        return self.shown(images, self._drawn(grid, randomness))

    def ahead(self, grid: int, *, randomness: Sequence[Randomness]) -> Drawn | None:
        """Draw the puzzles; None for a subclass that arranges otherwise. Arguments as for ``Defence.ahead``."""
        return self._drawn(grid, randomness) if type(self).arrange is Jigsaw.arrange else None

    def _drawn(self, grid: int, randomness: Sequence[Randomness]) -> Drawn:
        import torch

        puzzles = [jigsaw.draw(grid, self.mask_ratio, generator=source.generator()) for source in randomness]
        return torch.cat([puzzle.mask for puzzle in puzzles]), torch.cat([puzzle.source for puzzle in puzzles])

    def shown(self, images: Tensor, drawn: Drawn) -> Arranged:
        """Move the patches of pictures; arguments as for ``Defence.shown``."""
        mask, source = drawn
        shuffled = jigsaw.rearrange(images, to_device(source, images.device)) if self.options.shuffle else images
        return Arranged(shuffled, mask, source)

    def refusal(self, earlier: Sequence[Defence]) -> str | None:
        """Refuse a second shuffle, which is a jigsaw with another mask ratio; arguments as for ``Defence.refusal``."""
        first = next((defence for defence in earlier if isinstance(defence, Jigsaw)), None)
        return f"{first.name} and {self.name} both shuffle patches: name one of them" if first else None
