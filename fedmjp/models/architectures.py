"""What model names stand for: our own, and ``timm:NAME`` for other vision transformers of timm."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from fedmjp.errors import ConfigError, UnknownNameError
from fedmjp.models import names

TIMM = "timm:"
EXAMPLE = "timm:vit_base_patch16_224"
# What attacks and defences refer to by name; a transformer without one of them is another kind of model.
ENTRANCE = (names.CLASS_TOKEN, names.PATCH_WEIGHT, names.PATCH_BIAS, names.FIRST_QKV_WEIGHT, names.HEAD_BIAS)


class ArchitectureFamily(StrEnum):
    """How a model is built, and what MJP can do to it."""

    TRANSFORMER = "transformer"  # a timm VisionTransformer: its own E_pos, MJP adds E_unk
    SWIN = "swin"  # no absolute positions of its own: MJP adds E_pos and E_unk
    CONVOLUTIONAL = "convolutional"  # no positions: only a jigsaw


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
    """What a model name stands for."""

    timm_name: str  # what it is made of
    base: str  # that model in words
    purpose: str
    family: ArchitectureFamily = ArchitectureFamily.TRANSFORMER
    positions: Positions = Positions.LEARNED
    april: bool = False  # whether the first block is the one that APRIL's closed form needs
    patch_size: int | None = None  # the only one that it can have; None where any fits
    changes: Mapping[str, Any] = field(default_factory=dict)  # arguments of the timm model that are others

    @property
    def summary(self) -> str:
        """Describe the model in one line."""
        return "; ".join(filter(None, [self.base, _POSITIONS.get(self.positions), _APRIL if self.april else None]))

    @property
    def ignored_weights(self) -> list[str]:
        """Name timm's weights that are not taken from a checkpoint."""
        positions = ["pos_embed"] if self.positions is not Positions.LEARNED else []
        return [*positions, *(["blocks.0.norm1.weight", "blocks.0.norm1.bias"] if self.april else [])]


_APRIL = "first block without first norm and residuals, as APRIL's closed form needs; not a deployed model"
_POSITIONS = {
    Positions.ZERO: "position embedding that starts at zero, its gradient uploaded: MJP's 'w/o PEs' as APRIL reads it",
    Positions.ABSENT: "no position embedding, and so none of its gradient in the upload",
}
_SUFFIXES = {Positions.LEARNED: "", Positions.ZERO: "_zero_positions", Positions.ABSENT: "_without_positions"}


def _variants(name: str, timm_name: str, base: str, purpose: str, *positions: Positions) -> dict[str, Architecture]:
    variants = {}
    for kind in positions:
        usual = purpose if kind is Positions.LEARNED else "what position embeddings give away (MJP, Table 5)"
        variant = f"{name}{_SUFFIXES[kind]}"
        variants[variant] = Architecture(timm_name, base, usual, positions=kind)
        variants[f"{variant}_april"] = Architecture(timm_name, base, "APRIL's closed form", positions=kind, april=True)
    return variants


ARCHITECTURES = {
    **_variants(
        "deit_small", "deit_small_patch16_224", "DeiT-S as timm builds it, dim 384", "MJP's own experiments", *Positions
    ),
    **_variants(
        "deit_tiny",
        "deit_tiny_patch16_224",
        "DeiT-Ti as timm builds it, dim 192",
        "attacks on a smaller model",
        *Positions,
    ),
    "deit_micro": Architecture(
        "deit_tiny_patch16_224",
        "DeiT of dim 64 with 4 blocks of 2 heads",
        "training on a CPU",
        changes={"embed_dim": 64, "depth": 4, "num_heads": 2},
    ),
    "deit_mini": Architecture(
        "deit_tiny_patch16_224",
        "DeiT of dim 96 with 3 blocks of 3 heads",
        "training on a CPU, with more dimensions than 32 x 32 pixels have patches of 4",
        changes={"embed_dim": 96, "depth": 3, "num_heads": 3},
    ),
    **_variants(
        "vit_small",
        "vit_small_patch16_224",
        "ViT-S as timm builds it: DeiT-S with mean and standard deviation 0.5 instead of ImageNet's",
        "timm's ViT checkpoints",
        Positions.LEARNED,
    ),
    "swin_tiny": Architecture(
        "swin_tiny_patch4_window7_224",
        "Swin-T as timm builds it; defence mjp adds an absolute position embedding",
        "accuracy and consistency (MJP, Table 1); not attacked",
        ArchitectureFamily.SWIN,
        patch_size=4,
    ),
    "resnet50": Architecture(
        "resnet50",
        "ResNet-50 as timm builds it; defence none or jigsaw (MJP only shuffles its patches)",
        "accuracy and consistency (MJP, Table 1); not attacked",
        ArchitectureFamily.CONVOLUTIONAL,
    ),
}

# Numbers that are trained, undefended, of 224 pixels and 1000 classes: to count them takes seconds.
PARAMETERS = {
    "deit_small": 22_050_664,
    "deit_small_april": 22_049_896,
    "deit_small_zero_positions": 22_050_664,
    "deit_small_zero_positions_april": 22_049_896,
    "deit_small_without_positions": 21_975_016,
    "deit_small_without_positions_april": 21_974_248,
    "deit_tiny": 5_717_416,
    "deit_tiny_april": 5_717_032,
    "deit_tiny_zero_positions": 5_717_416,
    "deit_tiny_zero_positions_april": 5_717_032,
    "deit_tiny_without_positions": 5_679_592,
    "deit_tiny_without_positions_april": 5_679_208,
    "deit_micro": 326_952,
    "deit_mini": 525_544,
    "vit_small": 22_050_664,
    "vit_small_april": 22_049_896,
    "swin_tiny": 28_288_354,
    "resnet50": 25_557_032,
}


def architecture(name: str) -> Architecture:
    """Look a model up.

    Args:
        name: One of ``ARCHITECTURES``, or ``timm:NAME``.

    Raises:
        UnknownNameError: If there is no such model; the message offers the nearest names.
        ConfigError: If it is a model of timm's that cannot be used here.
    """
    if name.startswith(TIMM):
        return _of_timm(name.removeprefix(TIMM))
    if name not in ARCHITECTURES:
        raise UnknownNameError("model", name, [*ARCHITECTURES, f"{TIMM}NAME"])
    return ARCHITECTURES[name]


@lru_cache
def _of_timm(name: str) -> Architecture:
    import timm  # noqa: PLC0415 (seconds of imports, which a mistyped name need not wait for)
    import torch  # noqa: PLC0415

    timm_names = timm.list_pretrained() if "." in name else timm.list_models()  # a dot: with the tag of certain weights
    if name not in timm_names:
        raise UnknownNameError("timm model", name, timm_names)
    with torch.device("meta"):
        model: Any = timm.create_model(name, num_classes=1)
    reason = _unlike_deit(model)
    if reason:
        raise ConfigError(
            f"{TIMM}{name} {reason}: take a VisionTransformer of timm's with one class token and learned positions, "
            f"such as {EXAMPLE}"
        )
    patch_size = int(model.patch_embed.patch_size[0])
    base = f"timm's {name}, dim {model.embed_dim}, patches of {patch_size} pixels"
    return Architecture(name, base, "other sizes of transformers", patch_size=patch_size)


def _unlike_deit(model: Any) -> str | None:
    """Say why attacks and defences, which are written for DeiT, would misread a timm model; None if they do not."""
    from timm.layers import PatchEmbed  # noqa: PLC0415
    from timm.models.vision_transformer import VisionTransformer  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    if not isinstance(model, VisionTransformer):
        return f"is a {type(model).__name__}"
    if model.num_prefix_tokens != 1:
        return f"has {model.num_prefix_tokens} tokens before the patches"
    if model.pos_embed is None or model.pos_embed.shape[1] != model.patch_embed.num_patches + 1:
        return "has no learned position for the class token and for every patch"
    if type(model.patch_embed) is not PatchEmbed or not isinstance(model.patch_embed.norm, nn.Identity):
        return "does more to patches than to project them"
    parameters = {name for name, _ in model.named_parameters(prefix="backbone")}
    missing = [name for name in ENTRANCE if name not in parameters]
    return f"has no {missing[0].removeprefix('backbone.')}" if missing else None
