"""What a central training run is: model, defences, data, recipe and puzzle."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedmjp.config import MAX_SEED
from fedmjp.defences.pipeline import Defended
from fedmjp.learning import Learning

# With others a run may go on.
INCIDENTAL = {"device": True, "checkpoint_every": True, "recipe": {"workers": True}}


class TrainingConfig(Defended, Learning):
    """A central training run.

    Attributes:
        model: Initial weights come from its seed, or from its file.
        defences: That act on pictures, on the model, or on the gradients of single pictures: nothing leaves.
        data: "bundled", a folder of ``CLASS/picture`` files, a folder with ``train`` and ``val`` of that
            kind, a folder of ``train.parquet`` and ``validation.parquet``, or "hub:OWNER/NAME".
        seed: Of everything but the initial weights: order, augmentation, puzzles, drop path.
        checkpoint_every: Epochs between checkpoints.
    """

    data: str = "bundled"
    seed: int = Field(0, ge=0, le=MAX_SEED)
    device: Literal["cpu", "cuda"] = "cpu"
    checkpoint_every: int = Field(1, ge=1)

    def digest(self, exclude: Mapping[str, Any] | None = None) -> str:
        """As of any configuration, without what only says how a run is carried out."""
        return super().digest(INCIDENTAL if exclude is None else exclude)

    @model_validator(mode="after")
    def _defences_act(self) -> Self:
        self.require_defences(self.pipeline, self.model.grid, self.recipe.epochs)
        for each in self.pipeline.made:
            if {"update", "aggregate"} & set(each.stages):
                raise ValueError(f"{each.name} acts on what leaves a client, and nothing leaves here: leave it out")
        return self
