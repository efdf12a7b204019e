"""What model names stand for: our own, and ``timm:NAME`` for other vision transformers of timm."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

import timm
import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedmjp.errors import ConfigError, UnknownNameError
from fedmjp.models import names

TIMM = "timm:"
EXAMPLES = ("vit_base_patch16_224", "vit_tiny_patch16_224")
# What attacks and defences refer to by name; a transformer without one of them is another kind of model.
ENTRANCE = (names.CLASS_TOKEN, names.PATCH_WEIGHT, names.PATCH_BIAS, names.FIRST_QKV_WEIGHT, names.HEAD_BIAS)


class Family(StrEnum):
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
    """What a model name stands for.

    Attributes:
        timm_name: The timm model that it is made of.
        base: That model in words.
        purpose: What it is for here.
        family: How it is built.
        positions: What becomes of its position embedding.
        april: Whether the first block is the one that APRIL's closed form needs.
        patch_size: The only one that it can have; None where any fits.
        changes: Arguments of the timm model that are others.
    """

    timm_name: str
    base: str
    purpose: str
    family: Family = Family.TRANSFORMER
    positions: Positions = Positions.LEARNED
    april: bool = False
    patch_size: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

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
_DEIT_SMALL = "DeiT-S as timm builds it, dim 384"
_DEIT_TINY = "DeiT-Ti as timm builds it, dim 192"
_DEIT_MICRO = "DeiT of dim 64 with 4 blocks of 2 heads"
_VIT_SMALL = "ViT-S as timm builds it: DeiT-S with mean and standard deviation 0.5 instead of ImageNet's"
_SWIN_TINY = "Swin-T as timm builds it; defence mjp adds an absolute position embedding"
_RESNET50 = "ResNet-50 as timm builds it; defence none or jigsaw (MJP only shuffles its patches)"


def _variants(name: str, timm_name: str, base: str, purpose: str, *positions: Positions) -> dict[str, Architecture]:
    return {
        f"{name}{_SUFFIXES[each]}{'_april' if april else ''}": Architecture(
            timm_name, base, _purpose(purpose, each, april=april), positions=each, april=april
        )
        for each in positions
        for april in (False, True)
    }


def _purpose(usual: str, positions: Positions, *, april: bool) -> str:
    if april:
        return "APRIL's closed form"
    return usual if positions is Positions.LEARNED else "what position embeddings give away (MJP, Table 5)"


ARCHITECTURES = {
    **_variants("deit_small", "deit_small_patch16_224", _DEIT_SMALL, "MJP's own experiments", *Positions),
    **_variants("deit_tiny", "deit_tiny_patch16_224", _DEIT_TINY, "attacks on a smaller model", *Positions),
    "deit_micro": Architecture(
        "deit_tiny_patch16_224",
        _DEIT_MICRO,
        "training on a CPU",
        changes={"embed_dim": 64, "depth": 4, "num_heads": 2},
    ),
    **_variants("vit_small", "vit_small_patch16_224", _VIT_SMALL, "timm's ViT checkpoints", Positions.LEARNED),
    "swin_tiny": Architecture(
        "swin_tiny_patch4_window7_224",
        _SWIN_TINY,
        "accuracy and consistency (MJP, Table 1); not attacked",
        Family.SWIN,
        patch_size=4,
    ),
    "resnet50": Architecture(
        "resnet50", _RESNET50, "accuracy and consistency (MJP, Table 1); not attacked", Family.CONVOLUTIONAL
    ),
}


def architecture(name: str) -> Architecture:
    """Look a model name up.

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
    known = _timm_names(name)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        raise UnknownNameError("timm model", name, near or EXAMPLES)
    with torch.device("meta"):
        model: Any = timm.create_model(name, num_classes=1)
    reason = _unlike_deit(model)
    if reason:
        raise ConfigError(
            f"{TIMM}{name} {reason}: take a VisionTransformer of timm's with one class token and learned positions, "
            f"such as {TIMM}{EXAMPLES[0]}"
        )
    patch_size = int(model.patch_embed.patch_size[0])
    base = f"timm's {name}, dim {model.embed_dim}, patches of {patch_size} pixels"
    return Architecture(name, base, "other sizes of transformers", patch_size=patch_size)


def _timm_names(name: str) -> list[str]:
    """Names that timm knows; those with the tag of certain weights where ``name`` has one."""
    listed = timm.list_pretrained() if "." in name else timm.list_models()
    return [str(each) for each in listed]


def _unlike_deit(model: Any) -> str | None:
    """Why attacks and defences, which are written for DeiT, would misread a timm model; None if they do not."""
    if not isinstance(model, VisionTransformer):
        return f"is a {type(model).__name__}"
    if model.num_prefix_tokens != 1:
        return f"has {model.num_prefix_tokens} tokens before the patches"
    if model.pos_embed is None or model.pos_embed.shape[1] != model.patch_embed.num_patches + 1:
        return "has no learned position for the class token and for every patch"
    if type(model.patch_embed) is not PatchEmbed or not isinstance(model.patch_embed.norm, nn.Identity):
        return "does more to patches than to project them"
    known = {name for name, _ in model.named_parameters(prefix="backbone")}
    missing = [name for name in ENTRANCE if name not in known]
    return f"has no {missing[0].removeprefix('backbone.')}" if missing else None
