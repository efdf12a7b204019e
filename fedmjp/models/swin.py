"""Swin with what MJP adds to it: an absolute position embedding, and the unknown one."""

from typing import Any

from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from typing_extensions import override

from fedmjp.models.classifier import PositionedClassifier


class SwinClassifier(PositionedClassifier):
    """A timm Swin transformer with an absolute position embedding E_pos, and MJP's E_unk in its place at masks.

    timm's Swin has relative positions alone. "We add MJP to the absolute PEs of Swin-T" (MJP, section 5.2), for
    which the official code has the option ``ape``: a learned embedding per patch, added after the patch
    embedding and its norm. Here it is a parameter of timm's patch embedding, ``patch_embed.pos_embed``, which a
    hook adds to the output; timm's forward is used as it is. Its start is the official one, a truncated normal
    distribution of standard deviation 0.02.

    The official configuration of the plain Swin-T has no absolute embedding, so the undefended arm is timm's own.

    With DAL the official code reads, for Swin, the position of a patch from the row of the next one, since it
    counts a class token that Swin does not have. Here a patch's own row is read.
    """

    positions_name = "patch_embed.pos_embed"

    def __init__(self, backbone: SwinTransformer, *, index_embedding: bool = False) -> None:
        embed: Any = backbone.patch_embed
        positions = embed.proj.weight.new_empty(1, embed.num_patches, backbone.embed_dim)
        embed.pos_embed = nn.Parameter(nn.init.trunc_normal_(positions, std=0.02))
        embed.register_forward_hook(_add_positions)
        super().__init__(backbone, defended=True, index_embedding=index_embedding)

    @override
    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {f"backbone.{self.positions_name}"}


def _add_positions(embed: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
    """(batch, rows, columns, dim), with positions (batch or 1, patches, dim) added."""
    positions: Any = embed.pos_embed
    moved: Tensor = embedded + positions.reshape(-1, *embedded.shape[1:])
    return moved
