"""Layouts of checkpoints: whose names their weights have, and what those are called here."""

import re
from collections.abc import Mapping
from enum import StrEnum

from torch import Tensor

from fedmjp.errors import CheckpointError
from fedmjp.models import names

INDEX_EMBEDDING = "index_embedding"
LOCALISATION = "localisation."

# The official MJP code's names, and ours.
_OFFICIAL_POSITIONS = {"pos_embed.weight": "pos_embed", "absolute_pos_embed.weight": "patch_embed.pos_embed"}
_OFFICIAL_INDEX = "index_embed"
_OFFICIAL_LOCALISATION = "dlocr."
# The original code of Swin, which MJP's is made of, keeps what follows from the image size among its weights and
# ends a stage with the merging of patches that timm begins the next one with.
_SWIN_BUFFERS = (".attn_mask", ".relative_position_index")
_SWIN_MERGING = re.compile(r"^layers\.(\d+)\.downsample\.")
_SWIN_FIRST_MERGING = "layers.0.downsample.norm.weight"
# Parts of a name that torch's wrappers add: those of DataParallel and AveragedModel at its beginning, those of
# torch.compile, FSDP and activation checkpointing wherever they were applied.
_FIRST_WRAPPER = "module."
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_COUNT_OF_AVERAGED = "n_averaged"  # beside the weights of an AveragedModel
_PATCHES = "patch_embed.proj.weight"
_OURS = "backbone."


class Layout(StrEnum):
    """Whose names the weights of a checkpoint have."""

    FEDMJP = "fedmjp's"
    OFFICIAL = "that of the official MJP code"
    SWIN = "that of the original Swin code"
    TIMM = "timm's, which is DeiT's too"


def in_our_layout(loaded: Mapping[str, Tensor], path: str) -> tuple[Layout, dict[str, Tensor]]:
    """Recognise a layout, and give the weights our names, without ``backbone.``.

    Args:
        loaded: Tensors by the names of the file.
        path: Of the file, for errors.
    """
    bare = [unwrap_name(name) for name in loaded]
    # A training framework's module has the network under a name of its own, as Lightning's ``model.``.
    holders = {name.removesuffix(_PATCHES).removesuffix(_OURS) for name in bare if name.endswith(_PATCHES)}
    holder = holders.pop() if len(holders) == 1 else ""
    inside = [name.removeprefix(holder) for name in bare]
    weights: dict[str, Tensor] = {}
    for name, weight in zip(inside, loaded.values(), strict=True):
        short = name.removeprefix(_OURS)
        if short in weights:
            raise CheckpointError(f"{path} holds {short} twice, with different prefixes: keep the one that is meant")
        weights[short] = weight
    weights.pop(_COUNT_OF_AVERAGED, None)
    layout = Layout.FEDMJP if any(name.startswith(_OURS) for name in inside) else Layout.TIMM
    if _SWIN_FIRST_MERGING in weights:
        layout = Layout.SWIN
        weights = {_timms_swin(name): weight for name, weight in weights.items() if not name.endswith(_SWIN_BUFFERS)}
    renamed = _from_official(weights)
    return layout if renamed.keys() == weights.keys() else Layout.OFFICIAL, renamed


def unwrap_name(name: str) -> str:
    """Remove what torch's wrappers add to the name of a tensor.

    Args:
        name: In a wrapped module's state.

    Example:
        >>> unwrap_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.norm1.weight")
        'blocks.0.norm1.weight'
    """
    bare = _WRAPPERS.sub("", name)
    while bare.startswith(_FIRST_WRAPPER):
        bare = bare.removeprefix(_FIRST_WRAPPER)
    return bare


def _from_official(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name in _OFFICIAL_POSITIONS:  # an embedding whose last row is the unknown one
            renamed |= {_OFFICIAL_POSITIONS[name]: weight[None, :-1], names.UNKNOWN_EMBEDDING: weight[-1]}
        elif name == _OFFICIAL_INDEX:
            renamed[INDEX_EMBEDDING] = weight
        elif name.startswith(_OFFICIAL_LOCALISATION):
            renamed[LOCALISATION + name.removeprefix(_OFFICIAL_LOCALISATION)] = weight
        else:
            renamed[name] = weight
    return renamed


def _timms_swin(name: str) -> str:
    if name.startswith("head."):
        return name.replace("head.", "head.fc.", 1)
    return _SWIN_MERGING.sub(lambda match: f"layers.{int(match[1]) + 1}.downsample.", name)
