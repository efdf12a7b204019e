"""Defences of pictures: patches change places, alone, with MJP's unknown embedding, or with the pixels in them."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from fedmjp import jigsaw
from fedmjp.config import Config, MaskRatio, ModelConfig
from fedmjp.defences.base import Arranged, Defence, NoOptions, Stage
from fedmjp.patches import from_patches, to_patches
from fedmjp.randomness import Randomness


class JigsawOptions(Config):
    """How much is shuffled."""

    mask_ratio: MaskRatio = Field(0.27, description="wanted share of the patches that change places")
    shuffle: bool = Field(True, description="without, patches stay in place: MJP's masks alone (setting a)")


class Jigsaw(Defence):
    """Shuffles the patches of block-wise masks; they keep the position embeddings of their new places."""

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
        """One puzzle per picture."""
        drawn = [jigsaw.draw(grid, self.mask_ratio, generator=source.generator()) for source in randomness]
        mask, source = (torch.cat([getattr(each, name) for each in drawn]) for name in ("mask", "source"))
        shown = jigsaw.rearrange(images, source.to(images.device)) if self.options.shuffle else images
        return Arranged(shown, mask, source)

    def refusal(self, before: Sequence[Defence]) -> str | None:
        """Shuffling twice is a jigsaw with another mask ratio."""
        other = next((each for each in before if isinstance(each, Jigsaw)), None)
        return f"{other.name} and {self.name} both shuffle patches: name one of them" if other else None


class Mjp(Jigsaw):
    """Shuffles the patches of block-wise masks, and gives all of them one shared "unknown" position embedding.

    What training adds (DAL, the localisation loss) is an option of the model and of the recipe.
    """

    name = "mjp"
    paper = "Ren et al., Masked Jigsaw Puzzle, CVPR 2023"
    summary = "shuffles the patches of block-wise masks, which then share one unknown position embedding"
    told = "that MJP is used, and the wanted mask ratio; neither mask nor order"
    stages = ("pictures", "model")
    marks: ClassVar = frozenset({"shuffled", "masked"})

    @override
    def change_model(self, model: ModelConfig) -> ModelConfig:
        return model.model_copy(update={"unknown_embedding": True})


class Pixels(Jigsaw):
    """Moves all patches of a picture, and, with one permutation for all of them, the pixels inside.

    References:
        Tolstikhin et al., "MLP-Mixer", NeurIPS 2021, the permuted pixels of section 3.4.
    """

    name = "pixels"
    paper = "Ren et al., Masked Jigsaw Puzzle, CVPR 2023, Table 4, row C (SPP)"
    summary = "shuffles all patches of a picture, and the pixels in them alike"
    told = "that patches and pixels are shuffled; neither order"
    marks: ClassVar = frozenset({"shuffled", "reshaped"})
    options_type = NoOptions
    mask_ratio = 1.0
    shuffles = True

    @override
    def arrange(self, images: Tensor, grid: int, *, randomness: Sequence[Randomness]) -> Arranged:
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
