"""Build a model by name from its configuration."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import timm
import torch

from fedmjp.config import ModelConfig
from fedmjp.errors import ConfigError, UnknownNameError
from fedmjp.models.april import AprilBlock
from fedmjp.models.checkpoints import load_checkpoint
from fedmjp.models.classifier import VitClassifier
from fedmjp.seeds import derive

BYTES_PER_VALUE = 4  # an update is float32


class Positions(StrEnum):
    """What becomes of timm's learned position embedding.

    ``ZERO`` and ``ABSENT`` compute the same logits and differ in what is uploaded. The row "w/o PEs"
    of MJP's Table 5 must be ``ZERO``: APRIL's closed form, which it was attacked with, reads the
    position embedding's gradient.
    """

    LEARNED = "learned"  # as timm builds it
    ZERO = "zero"  # a parameter with a gradient; drawn, then set to zero
    ABSENT = "absent"  # no parameter, so that no upload shows its gradient


@dataclass(frozen=True)
class Architecture:
    """What a model name stands for.

    Attributes:
        timm_name: The timm model that it is made of.
        base: That model in words.
        positions: What becomes of its position embedding.
        april: Whether the first block is the one that APRIL's closed form needs.
    """

    timm_name: str
    base: str
    positions: Positions = Positions.LEARNED
    april: bool = False

    @property
    def summary(self) -> str:
        """One line."""
        changes = [_POSITIONS[self.positions]] if self.positions is not Positions.LEARNED else []
        return "; ".join([self.base, *changes, *([_APRIL] if self.april else [])])

    @property
    def ignored_weights(self) -> list[str]:
        """Names of timm's weights that are not taken from a checkpoint."""
        positions = ["pos_embed"] if self.positions is not Positions.LEARNED else []
        return [*positions, *(["blocks.0.norm1.weight", "blocks.0.norm1.bias"] if self.april else [])]


_APRIL = "first block without first norm and residuals, as APRIL's closed form needs; not a deployed model"
_POSITIONS = {
    Positions.ZERO: "position embedding that starts at zero, its gradient uploaded: MJP's 'w/o PEs' as APRIL reads it",
    Positions.ABSENT: "no position embedding, and so none of its gradient in the upload",
}
_SUFFIXES = {Positions.LEARNED: "", Positions.ZERO: "_zero_positions", Positions.ABSENT: "_without_positions"}
_DEIT_SMALL = "DeiT-S as timm builds it (22.1 M parameters, dim 384)"
_DEIT_TINY = "DeiT-Ti as timm builds it (5.7 M parameters, dim 192)"
_VIT_SMALL = "ViT-S as timm builds it: DeiT-S with mean and standard deviation 0.5 instead of ImageNet's"


def _variants(name: str, timm_name: str, base: str, *positions: Positions) -> dict[str, Architecture]:
    return {
        f"{name}{_SUFFIXES[each]}{'_april' if april else ''}": Architecture(timm_name, base, each, april)
        for each in positions
        for april in (False, True)
    }


ARCHITECTURES = {
    **_variants("deit_small", "deit_small_patch16_224", _DEIT_SMALL, *Positions),
    **_variants("deit_tiny", "deit_tiny_patch16_224", _DEIT_TINY, *Positions),
    **_variants("vit_small", "vit_small_patch16_224", _VIT_SMALL, Positions.LEARNED),
}


def architecture(name: str) -> Architecture:
    """Look a model name up; UnknownNameError with the nearest names if there is none."""
    if name not in ARCHITECTURES:
        raise UnknownNameError("model", name, ARCHITECTURES)
    return ARCHITECTURES[name]


def build(config: ModelConfig) -> VitClassifier:
    """Build the model with initial weights drawn from ``config.seed``, or those of ``config.weights``.

    The weights that variants of a model share, such as the defended and the undefended one, are the
    same for the same seed. timm draws them from torch's global generator; the global state is put
    back afterwards.

    Raises:
        UnknownNameError: If there is no such model.
        ConfigError: If the model cannot be defended as asked.
        CheckpointError: If there are no such weights, or they do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "weights"))  # noqa: TID251 (timm takes no generator; state is restored)
        model = _drawn(config)
    if config.weights is not None:
        load_checkpoint(model, config.weights, ignored=architecture(config.name).ignored_weights)
    return model


def blueprint(config: ModelConfig) -> VitClassifier:
    """The model without weights, on torch's meta device: for questions of shape and applicability.

    Raises:
        UnknownNameError: If there is no such model.
        ConfigError: If the model cannot be defended as asked.
    """
    with torch.device("meta"):
        return _drawn(config)


def upload_bytes(config: ModelConfig) -> int:
    """Size of a whole update of the model, all its parameters in float32."""
    return BYTES_PER_VALUE * sum(parameter.numel() for parameter in blueprint(config).parameters())


def _drawn(config: ModelConfig) -> VitClassifier:
    """The model on torch's current device, drawn from torch's global generator."""
    found = architecture(config.name)
    if config.defence == "mjp" and found.positions is not Positions.LEARNED:
        raise ConfigError(
            f"{config.name} has no learned position embedding that MJP could replace: take defence none or jigsaw"
        )
    # All of it is drawn and some taken away, so that the rest does not depend on the variant.
    backbone: Any = timm.create_model(
        found.timm_name,
        img_size=config.image_size,
        patch_size=config.patch_size,
        num_classes=config.classes,
    )
    if found.positions is Positions.ABSENT:
        backbone.pos_embed = None
    if found.positions is Positions.ZERO:
        torch.nn.init.zeros_(backbone.pos_embed)
    if found.april:
        backbone.blocks[0] = AprilBlock(backbone.blocks[0])
    return VitClassifier(backbone, defended=config.defence == "mjp").eval()
