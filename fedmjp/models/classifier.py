"""A timm vision transformer that takes images in [0, 1], optionally with MJP's unknown embedding."""

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.func import functional_call

from fedmjp.errors import BadInputError


class VitClassifier(nn.Module):
    """Images in [0, 1] to class logits; the only place where mean and standard deviation are applied.

    With ``defended``, a mask may be passed to ``forward``: masked patches then share one learned
    "unknown" position embedding E_unk instead of their own row of E_pos (MJP, section 4.1). The
    timm forward is used as it is: for the call, its position embedding is replaced by one that
    depends on the mask, and gradients flow back to both E_pos and E_unk.

    The official code keeps E_pos and E_unk as the rows of one ``nn.Embedding`` drawn from N(0, 1),
    although its baseline starts at a standard deviation of 0.02. Here E_unk starts like E_pos, so
    that the defence is the only difference between the arms.

    Args:
        backbone: A timm vision transformer with absolute position embeddings, or with none.
        defended: Whether to add E_unk, which takes position embeddings that it stands in for.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: VisionTransformer, *, defended: bool) -> None:
        super().__init__()
        self.backbone = backbone
        pretrained: Any = backbone.pretrained_cfg
        self.register_buffer("mean", _channels(pretrained["mean"]), persistent=False)
        self.register_buffer("std", _channels(pretrained["std"]), persistent=False)
        self.unknown_embedding: nn.Parameter | None = None
        if defended:
            self.unknown_embedding = nn.Parameter(nn.init.trunc_normal_(torch.empty(backbone.embed_dim), std=0.02))

    @property
    def defended(self) -> bool:
        """Whether the model has MJP's unknown position embedding."""
        return self.unknown_embedding is not None

    @property
    def has_positions(self) -> bool:
        """Whether the model has a position embedding, so that updates hold its gradient."""
        return self.backbone.pos_embed is not None

    @property
    def patch_size(self) -> int:
        """Pixels per side of a patch."""
        return int(self.backbone.patch_embed.patch_size[0])

    @property
    def image_size(self) -> int:
        """Pixels per side of an image."""
        return int(self.backbone.patch_embed.img_size[0])

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches (the class token) that have a row in the position embedding."""
        return int(self.backbone.num_prefix_tokens)

    def denormalise(self, images: Tensor) -> Tensor:
        """From the network's input space back to [0, 1] (values outside are clipped)."""
        return (images * self.std.to(images) + self.mean.to(images)).clamp(0, 1)

    def masked_position_embedding(self, mask: Tensor) -> Tensor:
        """(batch, tokens, dim): E_unk at masked patches, E_pos elsewhere; ``mask`` is (batch, patches)."""
        if self.unknown_embedding is None:
            raise BadInputError("a mask was given to a model without an unknown position embedding")
        prefix = mask.new_zeros(mask.shape[0], self.prefix_tokens)
        masked_tokens = torch.cat([prefix, mask], dim=1)[:, :, None]
        # Not get_parameter: under functional_call the weights are plain tensors.
        positions: Any = self.backbone.pos_embed
        return torch.where(masked_tokens, self.unknown_embedding, positions)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, size, size) in [0, 1].

        Raises:
            BadInputError: If a mask is given to an undefended model.
        """
        normalised = (images - self.mean) / self.std
        if mask is None:
            logits: Tensor = self.backbone(normalised)
            return logits
        positions = self.masked_position_embedding(mask)
        masked_logits: Tensor = functional_call(self.backbone, {"pos_embed": positions}, (normalised,))
        return masked_logits


def _channels(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(3, 1, 1)
