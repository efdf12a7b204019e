"""Where the class token of the last block looks (MJP's Fig. 8), and how much its heads differ."""

import math
import sys
from typing import Any

import torch
from PIL.Image import Resampling
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from fedmjp.errors import BadInputError
from fedmjp.evaluation.consistency import sample
from fedmjp.models.classifier import Classifier
from fedmjp.models.inference import evaluated

BILINEAR = Resampling.BILINEAR
ANY = sys.maxsize  # classes: labels are not looked at


def last_attention(model: Classifier, images: Tensor, name: str) -> Tensor:
    """What the class token's query gives every patch in the last block, after the softmax.

    Args:
        model: A transformer with a class token.
        images: (pictures, 3, size, size) in [0, 1].
        name: Of the run, for what is said of it.

    Returns:
        (pictures, heads, patches), whose sums are below one by what the class token gives itself.

    Raises:
        BadInputError: If the model has no class token, or no attention of timm's form.
    """
    blocks = getattr(model.backbone, "blocks", None)
    if not getattr(model.backbone, "has_class_token", False) or blocks is None or not hasattr(blocks[-1].attn, "qkv"):
        raise BadInputError(f"{name}: its model has no class token whose attention could be shown")
    attention: Any = blocks[-1].attn
    seen: list[Tensor] = []
    hook = attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        with evaluated(model):
            model(images.to(model.mean.device))
            tokens = seen[0]
            pictures, count, _ = tokens.shape
            parts = attention.qkv(tokens).reshape(pictures, count, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
            queries, keys = attention.q_norm(parts[0][:, :, :1]), attention.k_norm(parts[1])
            weights: Tensor = (queries * attention.scale @ keys.mT).softmax(dim=-1)
    finally:
        hook.remove()
    return weights[:, :, 0, model.backbone.num_prefix_tokens :].cpu()


def whole_pictures(data: str, size: int, *, count: int, seed: int) -> Tensor:
    """(pictures, 3, size, size) of a validation split, at random, each resized whole as the official script does."""
    chosen = sample(data, classes=ANY, limit=count, seed=seed)
    photographs = (chosen.dataset.photograph(int(index)).resize((size, size), BILINEAR) for index in chosen.indices)
    return torch.stack([transforms.to_dtype(transforms.pil_to_tensor(each), scale=True) for each in photographs])


def entropies(attention: Tensor) -> Tensor:
    """(pictures, heads) entropy in bits of what each head spreads over the patches; log2 of their number at most."""
    shares = attention.double() / attention.double().sum(dim=-1, keepdim=True)
    bits: Tensor = torch.special.entr(shares).sum(dim=-1) / math.log(2)
    return bits


def distances(attention: Tensor) -> Tensor:
    """(pictures,) mean total variation between the heads of a picture: 0 where all look alike, 1 where none overlap."""
    shares = attention.double() / attention.double().sum(dim=-1, keepdim=True)
    heads = shares.shape[1]
    between = (shares[:, :, None] - shares[:, None]).abs().sum(dim=-1) / 2
    mean: Tensor = between.sum(dim=(1, 2)) / max(1, heads * (heads - 1))
    return mean
