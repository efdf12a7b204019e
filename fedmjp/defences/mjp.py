"""Masked Jigsaw Puzzle: a jigsaw whose patches share one unknown position embedding."""

from typing import ClassVar

from typing_extensions import override

from fedmjp.config import ModelConfig
from fedmjp.defences.jigsaw import Jigsaw


class Mjp(Jigsaw):
    """A shuffle of the patches of block-wise masks, which then share one "unknown" position embedding.

    DAL, the localisation loss that training adds, is an option of the model and of the recipe.

    Example:
        >>> from fedmjp.config import ModelConfig
        >>> Mjp().change_model(ModelConfig(name="deit_tiny")).unknown_embedding
        True
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
