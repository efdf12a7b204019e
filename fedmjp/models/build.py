"""Build a model by name from its configuration."""

from dataclasses import dataclass
from typing import Any

import timm
import torch

from fedmjp.config import ModelConfig
from fedmjp.errors import UnknownNameError
from fedmjp.models.april import AprilBlock
from fedmjp.models.classifier import VitClassifier
from fedmjp.seeds import derive


@dataclass(frozen=True)
class Architecture:
    """What a model name stands for."""

    timm_name: str
    summary: str
    april: bool = False


_APRIL = "first block without first norm and residuals, as APRIL's closed form needs; not a deployed model"
ARCHITECTURES = {
    "deit_small": Architecture("deit_small_patch16_224", "DeiT-S as timm builds it (22.1 M parameters, dim 384)"),
    "deit_small_april": Architecture("deit_small_patch16_224", f"DeiT-S, {_APRIL}", april=True),
    "deit_tiny": Architecture("deit_tiny_patch16_224", "DeiT-Ti as timm builds it (5.7 M parameters, dim 192)"),
    "deit_tiny_april": Architecture("deit_tiny_patch16_224", f"DeiT-Ti, {_APRIL}", april=True),
}


def architecture(name: str) -> Architecture:
    """Look a model name up; UnknownNameError with the nearest names if there is none."""
    if name not in ARCHITECTURES:
        raise UnknownNameError("model", name, ARCHITECTURES)
    return ARCHITECTURES[name]


def build(config: ModelConfig) -> VitClassifier:
    """Build the model with initial weights drawn from ``config.seed``.

    The weights shared by the defended and the undefended model are the same for the same seed.
    timm draws them from torch's global generator; the global state is put back afterwards.

    Raises:
        UnknownNameError: If there is no such model.
    """
    found = architecture(config.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "weights"))  # noqa: TID251 (timm takes no generator; state is restored)
        backbone: Any = timm.create_model(
            found.timm_name,
            img_size=config.image_size,
            patch_size=config.patch_size,
            num_classes=config.classes,
        )
        if found.april:
            backbone.blocks[0] = AprilBlock(backbone.blocks[0])
        return VitClassifier(backbone, defended=config.defence == "mjp").eval()
