"""Where the class token of the last block looks (MJP's Fig. 8), and how much its heads differ."""

import math
import sys
from typing import Any

import torch
from PIL.Image import Resampling
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from fedmjp.errors import BadInputError
from fedmjp.evaluation.consistency import sample_pictures
from fedmjp.models.classifier import Classifier
from fedmjp.models.inference import evaluated

BILINEAR = Resampling.BILINEAR
ANY = sys.maxsize  # classes: labels are not looked at


def read_last_attention(model: Classifier, images: Tensor, name: str) -> Tensor:
    """Compute the attention of the class token's query to every patch in the last block, after the softmax.

    Args:
        model: A transformer with a class token.
        images: (pictures, 3, size, size) in [0, 1].
        name: Of the run, for error messages.

    Returns:
        (pictures, heads, patches), whose sums are below one by what the class token gives itself.

    Raises:
        BadInputError: If the model has no class token, or no attention of timm's form.
    """
    blocks = getattr(model.backbone, "blocks", None)
    if not getattr(model.backbone, "has_class_token", False) or blocks is None or not hasattr(blocks[-1].attn, "qkv"):
        raise BadInputError(f"{name}: its model has no class token whose attention could be shown")
    attention: Any = blocks[-1].attn
    block_inputs: list[Tensor] = []
    hook = attention.register_forward_pre_hook(lambda _, inputs: block_inputs.append(inputs[0]))
    try:
        with evaluated(model):
            model(images.to(model.mean.device))
            tokens = block_inputs[0]
            pictures, count, _ = tokens.shape
            parts = attention.qkv(tokens).reshape(pictures, count, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
            queries, keys = attention.q_norm(parts[0][:, :, :1]), attention.k_norm(parts[1])
            weights: Tensor = (queries * attention.scale @ keys.mT).softmax(dim=-1)
    finally:
        hook.remove()
    return weights[:, :, 0, model.backbone.num_prefix_tokens :].cpu()


def load_whole_pictures(data: str, size: int, *, count: int, seed: int) -> Tensor:
    """Load random validation pictures, each resized whole as the official script does, (count, 3, size, size).

    Args:
        data: bundled, a folder or hub:OWNER/NAME.
        size: Pixels per side.
        count: Number of pictures.
        seed: Of the choice.
    """
    sample = sample_pictures(data, classes=ANY, limit=count, seed=seed)
    photographs = (sample.dataset.photograph(int(index)).resize((size, size), BILINEAR) for index in sample.indices)
    return torch.stack([transforms.to_dtype(transforms.pil_to_tensor(picture), scale=True) for picture in photographs])


def compute_entropies(attention: Tensor) -> Tensor:
    """Compute the entropy in bits of attention (pictures, heads, patches), per picture and head."""
    shares = attention.double() / attention.double().sum(dim=-1, keepdim=True)
    bits: Tensor = torch.special.entr(shares).sum(dim=-1) / math.log(2)
    return bits


def compute_head_distances(attention: Tensor) -> Tensor:
    """Average the total variation between the heads of a picture, (pictures,): 0 all alike, 1 no overlap."""
    shares = attention.double() / attention.double().sum(dim=-1, keepdim=True)
    heads = shares.shape[1]
    between = (shares[:, :, None] - shares[:, None]).abs().sum(dim=-1) / 2
    mean: Tensor = between.sum(dim=(1, 2)) / max(1, heads * (heads - 1))
    return mean
