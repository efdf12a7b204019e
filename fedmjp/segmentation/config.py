"""What a training of a segmentation network is: backbone and heads, weights, scenes and recipe."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fedmjp.config import MAX_IMAGE_SIZE, MAX_SEED, Checkpoint, Config, Numbers
from fedmjp.learning import HIGHEST_RATE

STAGES = 4  # of a Swin transformer, as UperNet reads them
# With others a run may go on.
INCIDENTAL = {"data": True, "device": True, "recipe": {"workers": True, "checkpoint_every": True}}


class UperNetModel(Config):
    """UperNet on a Swin transformer; the defaults are Swin-T and the heads of mmsegmentation.

    ``weights`` are those of a Swin transformer trained to classify; without, all are drawn.
    """

    dim: int = Field(96, ge=1, description="of the first stage's tokens; each later one has twice as many")
    depths: Numbers = Field((2, 2, 6, 2), description="blocks of each stage")
    heads: Numbers = Field((3, 6, 12, 24), description="of attention, in each stage")
    window: int = Field(7, ge=2, description="tokens per side of a window")
    channels: int = Field(512, ge=1, description="of UperNet's head")
    auxiliary_channels: int = Field(256, ge=1, description="of the head that helps in training, on the third stage")
    drop_path: float = Field(0.3, ge=0, lt=1, description="share of the last branch's uses that training leaves out")
    weights: Checkpoint | None = None

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        for name, given in (("depths", self.depths), ("heads", self.heads)):
            if len(given) != STAGES or min(given) < 1:
                raise ValueError(f"{name} = {given}: name {STAGES} numbers above 0, one per stage")
        for stage, heads in enumerate(self.heads):
            if self.dim * 2**stage % heads:
                raise ValueError(f"{self.dim * 2**stage} numbers of stage {stage + 1} do not divide into {heads} heads")
        return self


class SegmentationRecipe(Config):
    """How it is trained; MJP's paper does not say, the defaults are mmsegmentation's for UperNet on Swin-T."""

    iterations: int = Field(160_000, ge=1)
    batch_size: int = Field(16, ge=2, description="heads normalise over it, so one picture is too few")
    crop: int = Field(512, ge=32, le=MAX_IMAGE_SIZE, description="pixels per side of what is trained on")
    learning_rate: float = Field(6e-5, gt=0, le=HIGHEST_RATE, description="falls linearly to 0 after the warm-up")
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False, description="of all but norms and positions")
    warmup_iterations: int = Field(1500, ge=0)
    auxiliary_weight: float = Field(0.4, ge=0, allow_inf_nan=False, description="of the auxiliary head's loss")
    checkpoint_every: int = Field(2000, ge=1, description="iterations between checkpoints")
    workers: int = Field(0, ge=0, description="processes that read pictures")

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        if self.warmup_iterations >= self.iterations:
            raise ValueError(
                f"warmup_iterations={self.warmup_iterations} leaves nothing of iterations={self.iterations}: set a "
                "smaller recipe.warmup_iterations"
            )
        return self


class SegmentationConfig(Config):
    """A training of a segmentation network; ``data`` is a folder in ADE20K's layout."""

    data: str
    model: UperNetModel = UperNetModel()
    recipe: SegmentationRecipe = SegmentationRecipe()
    seed: int = Field(0, ge=0, le=MAX_SEED)
    device: Literal["cpu", "cuda"] = "cpu"

    def digest(self, exclude: Mapping[str, Any] | None = None) -> str:
        """As of any configuration, without what only says how a run is carried out."""
        return super().digest(INCIDENTAL if exclude is None else exclude)
