"""UperNet on a Swin transformer, from transformers, with weights of a Swin transformer that classifies.

MJP's Table 9 trains UperNet on Swin-T "pre-trained on ImageNet-1K", with and without MJP, and says no more. It is read
so: MJP is in what the backbone was trained with. Its absolute position embedding, which Swin-T alone does not have, is
then part of the network, resized to the grid of a picture. Nothing is masked while scenes are learnt: a shuffled patch
has no place in a map of labels. The unknown embedding is therefore not used.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedmjp.config import Checkpoint
from fedmjp.errors import CheckpointError, suggestion
from fedmjp.models import names
from fedmjp.models.checkpoints import read_weights
from fedmjp.models.layouts import LOCALISATION
from fedmjp.seeds import derive, scoped_randomness
from fedmjp.segmentation.config import STAGES, UperNetModel
from fedmjp.segmentation.scenes import CLASSES, IGNORED

PATCH = 4  # pixels per side, of every Swin transformer
POSITIONS = "patch_embed.pos_embed"
# What classifies, and what only MJP's training needs.
UNUSED = ("head.", "norm.", LOCALISATION, names.UNKNOWN_EMBEDDING)
QKV = ("q_proj", "k_proj", "v_proj")
STAGE = re.compile(r"^layers\.(\d+)\.(.+)")
# timm's names, and those of transformers.
RENAMED = {
    "patch_embed.proj.": "embeddings.patch_embeddings.projection.",
    "patch_embed.norm.": "embeddings.norm.",
    POSITIONS: "embeddings.position_embeddings",
    ".norm1.": ".layernorm_before.",
    ".norm2.": ".layernorm_after.",
    ".attn.proj.": ".attention.o_proj.",
    ".attn.qkv.": ".attention.qkv.",
    ".attn.relative": ".attention.relative_position_bias.relative",
}


class UperNet(nn.Module):
    """From normalised pictures to logits of each pixel, as transformers computes it.

    Args:
        model: Its sizes; its weights are not loaded.
        positions: A table of absolute positions such as it is to have one; None for none.
    """

    def __init__(self, model: UperNetModel, positions: Tensor | None) -> None:
        # Seconds, and an extra.
        from transformers import SwinConfig, UperNetConfig, UperNetForSemanticSegmentation  # noqa: PLC0415

        super().__init__()
        backbone = SwinConfig(
            image_size=PATCH * (1 if positions is None else round((positions.numel() / model.dim) ** 0.5)),
            embed_dim=model.dim,
            depths=list(model.depths),
            num_heads=list(model.heads),
            window_size=model.window,
            drop_path_rate=model.drop_path,
            use_absolute_embeddings=positions is not None,
            out_features=[f"stage{stage + 1}" for stage in range(STAGES)],
        )
        config = UperNetConfig(
            backbone_config=backbone,
            hidden_size=model.channels,
            auxiliary_channels=model.auxiliary_channels,
            num_labels=CLASSES,
            loss_ignore_index=IGNORED,
        )
        self.network: Any = UperNetForSemanticSegmentation(config)
        swin = self.network.backbone.swin
        swin.forward = partial(swin.forward, interpolate_pos_encoding=True)  # of absolute positions, where it has any

    def forward(self, pictures: Tensor) -> Tensor:
        """(batch, 3, height, width), of sides that are multiples of ``PATCH``, to (batch, classes, height, width)."""
        logits: Tensor = self.network(pictures).logits
        return logits

    def loss(self, pictures: Tensor, labels: Tensor, auxiliary_weight: float) -> Tensor:
        """Mean cross-entropy over the pixels that have a class, and the auxiliary head's, weighted; a scalar."""
        self.network.config.auxiliary_loss_weight = auxiliary_weight
        value: Tensor = self.network(pictures, labels=labels).loss
        return value


def build_network(model: UperNetModel, seed: int) -> UperNet:
    """The network with its heads drawn from the seed, and the backbone too where there are no weights.

    Raises:
        CheckpointError: If the weights cannot be read, or are not of such a Swin transformer.
    """
    weights = {} if model.weights is None else _swin_weights(model.weights)
    with scoped_randomness(derive(seed, "weights")):  # transformers takes no generator
        made = UperNet(model, weights.get(_renamed(POSITIONS)))
    if model.weights is not None:
        _load(made.network.backbone, weights, model.weights.path)
    return made.eval()


def _swin_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Weights of a classifier's backbone under transformers' names."""
    made: dict[str, Tensor] = {}
    for name, weight in read_weights(checkpoint).items():
        if not name.startswith(UNUSED):
            theirs = _renamed(name)
            if ".attention.qkv." in theirs:
                parts = zip(QKV, weight.chunk(3), strict=False)  # what is not there is told below
                made |= {theirs.replace("qkv", part): value for part, value in parts}
            else:
                made[theirs] = weight
    return made


def _renamed(name: str) -> str:
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    if found := STAGE.match(name):
        # timm begins a stage with the merging of patches that transformers ends the one before with.
        name = f"encoder.layers.{int(found[1]) - found[2].startswith('downsample.')}.{found[2]}"
    return f"swin.{name}"


def _load(backbone: nn.Module, weights: Mapping[str, Tensor], path: str) -> None:
    """Give the backbone its weights; the norms before the heads are not among a classifier's and stay drawn."""
    shapes = {
        name: value.shape
        for name, value in backbone.named_parameters()
        if not name.startswith(("hidden_states_norms.", "swin.layernorm."))
    }
    for name in sorted(shapes.keys() ^ weights.keys()):
        has = "lacks" if name in shapes else "holds"
        near = suggestion(name, weights if name in shapes else shapes)
        raise CheckpointError(f"{path} is not of such a Swin transformer: it {has} {name}; {near}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{path} does not fit the model: {name} is {tuple(weights[name].shape)} instead of {tuple(shape)}; "
                "set model.dim, model.heads and model.window to those of its training, whose pictures must have had 32 "
                "pixels per side for each token of a window"
            )
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
