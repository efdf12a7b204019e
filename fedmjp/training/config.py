"""What a central training run is: model, defences, data, recipe and puzzle."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedmjp.config import MAX_SEED
from fedmjp.defences.base import Plan
from fedmjp.defences.pipeline import Defended, Pipeline, pipeline_of
from fedmjp.learning import Learning

# With others a run may go on; where the pictures lie says nothing of them, and they are compared themselves.
INCIDENTAL = {"data": True, "device": True, "checkpoint_every": True, "recipe": {"workers": True}}


class TrainingConfig(Defended, Learning):
    """A central training run: defences act on pictures, the model or the gradients of single pictures; nothing leaves.

    ``data`` is what ``fedmjp.data.datasets.open_dataset`` opens. Initial weights come from the model's seed or file;
    ``seed`` is of everything else: order, augmentation, puzzles, drop path.
    """

    data: str = "bundled"
    seed: int = Field(0, ge=0, le=MAX_SEED)
    device: Literal["cpu", "cuda"] = "cpu"
    checkpoint_every: int = Field(1, ge=1, description="epochs between checkpoints")

    def digest(self, exclude: Mapping[str, Any] | None = None) -> str:
        """Return the SHA-256, as hex, of all fields that determine the weights.

        Args:
            exclude: Fields to leave out; those that only say how a run is carried out by default.
        """
        return super().digest(INCIDENTAL if exclude is None else exclude)

    def planned(self, steps_per_epoch: int) -> Pipeline:
        """Complete the defences by what follows from the length of the run; an epoch counts as an upload.

        Args:
            steps_per_epoch: Number of steps.
        """
        epochs = self.recipe.epochs
        plan = Plan(epochs, epochs * steps_per_epoch, steps_per_epoch, self.recipe.batch_size)
        return pipeline_of(self.pipeline.planned(plan))

    @model_validator(mode="after")
    def _defences_act(self) -> Self:
        self.require_defences(self.pipeline, self.model.grid, self.recipe.epochs)
        for defence in self.pipeline.defences:
            if {"update", "aggregate"} & set(defence.stages):
                raise ValueError(f"{defence.name} acts on what leaves a client, and nothing leaves here: leave it out")
        return self
