"""The first block of a pre-norm vision transformer in float64, written out so that parts of it can be evaluated."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn

from fedmjp.models.classifier import VitClassifier

PREFIX = "backbone.blocks.0."
PROJ_WEIGHT, PROJ_BIAS = PREFIX + "attn.proj.weight", PREFIX + "attn.proj.bias"
FC1_WEIGHT, FC2_WEIGHT = PREFIX + "mlp.fc1.weight", PREFIX + "mlp.fc2.weight"


@dataclass(frozen=True)
class Linear:
    """A linear layer ``x W^T + b``."""

    weight: Tensor
    bias: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Apply the layer to rows (rows, values)."""
        return rows @ self.weight.T + self.bias


@dataclass(frozen=True)
class Norm:
    """Layer normalisation with its gain and bias."""

    gain: Tensor
    bias: Tensor
    eps: float

    def whiten(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise rows to mean 0 and variance 1, and return the standard deviations (rows, 1) as well.

        Args:
            rows: (rows, dim).
        """
        centred = rows - rows.mean(dim=-1, keepdim=True)
        deviation = (centred.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()
        return centred / deviation, deviation

    def __call__(self, rows: Tensor) -> Tensor:
        """Apply the layer to rows (rows, values)."""
        return self.whiten(rows)[0] * self.gain + self.bias


KeysValues = tuple[Tensor, Tensor]  # what tokens attend to: (heads, tokens, dim of a head) each


@dataclass(frozen=True)
class FirstBlock:
    """z -> z2 = z + o(z) -> z2 + MLP(z2), with o the attention and MLP = fc2 GELU fc1 norm2."""

    heads: int
    norm1: Norm
    qkv: Linear
    proj: Linear
    norm2: Norm
    fc1: Linear

    def keys_values(self, tokens: Tensor) -> KeysValues:
        """Compute the keys and values of tokens.

        Args:
            tokens: (tokens, dim), as they enter the block.
        """
        dim = tokens.shape[-1]
        both = self.norm1(tokens) @ self.qkv.weight[dim:].T + self.qkv.bias[dim:]
        keys, values = both.view(len(tokens), 2, self.heads, dim // self.heads).permute(1, 2, 0, 3)
        return keys, values

    def attention(self, tokens: Tensor, keys_values: KeysValues, counts: Tensor | None = None) -> Tensor:
        """Compute the attention output o of tokens.

        Args:
            tokens: (tokens, dim), which give the queries.
            keys_values: What they attend to.
            counts: (keys,), how often each key occurs; once each if None.
        """
        dim = tokens.shape[-1]
        projected = self.norm1(tokens) @ self.qkv.weight[:dim].T + self.qkv.bias[:dim]
        queries = projected.view(len(tokens), self.heads, dim // self.heads).transpose(0, 1)
        keys, values = keys_values
        scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
        weights = (scores if counts is None else scores + counts.log()).softmax(dim=-1)
        return self.proj((weights @ values).transpose(0, 1).reshape(len(tokens), dim))


def gelu_slope(inputs: Tensor) -> Tensor:
    """Compute the derivative of GELU at ``inputs``, of any shape."""
    density = torch.exp(-inputs.square() / 2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(inputs / math.sqrt(2))) + inputs * density


gelu = F.gelu


def linear_of(model: VitClassifier, name: str) -> Linear:
    """Read a linear layer of the blocks in float64.

    Args:
        model: The model.
        name: Such as "0.mlp.fc2".
    """
    return Linear(*_read_wide(model, name))


def norm_of(model: VitClassifier, name: str) -> Norm:
    """Read a layer normalisation of the blocks in float64.

    Args:
        model: The model.
        name: Such as "0.norm1".
    """
    return Norm(*_read_wide(model, name), float(model.backbone.blocks.get_submodule(name).eps))


def _read_wide(model: VitClassifier, name: str) -> tuple[Tensor, Tensor]:
    """Return a layer's weight and bias in float64."""
    layer = model.backbone.blocks.get_submodule(name)
    return layer.weight.detach().double(), layer.bias.detach().double()


def first_block(model: VitClassifier) -> FirstBlock:
    """Read the first block in float64."""
    norms = [norm_of(model, f"0.{name}") for name in ("norm1", "norm2")]
    qkv, proj, fc1 = (linear_of(model, f"0.{name}") for name in ("attn.qkv", "attn.proj", "mlp.fc1"))
    return FirstBlock(int(model.backbone.blocks[0].attn.num_heads), norms[0], qkv, proj, norms[1], fc1)


def refusal(model: VitClassifier) -> str | None:
    """Say why a model's first block is not the one that is written out here; None if it is."""
    block = model.backbone.blocks[0]
    if type(block) is not Block or type(block.attn) is not Attention or type(block.mlp) is not Mlp:
        return f"the first block is a {type(block).__name__}, not timm's pre-norm Block with Attention and Mlp"
    if not isinstance(block.mlp.act, nn.GELU) or block.mlp.act.approximate != "none":
        return f"the first block's MLP has {block.mlp.act}, not the exact GELU"
    for name in ("norm1", "norm2"):
        if not isinstance(getattr(block, name), nn.LayerNorm):
            return f"{name} of the first block is a {type(getattr(block, name)).__name__}, not a LayerNorm"
    extras = (block.ls1, block.ls2, block.attn.q_norm, block.attn.k_norm, block.attn.norm, block.mlp.norm)
    if not all(isinstance(part, nn.Identity) for part in (*extras, model.backbone.norm_pre)):
        return "the first block scales or normalises besides its two norms"
    if block.attn.qkv.bias is None or model.prefix_tokens != 1:
        return "needs biases in the attention and a class token as the only token beside the patches"
    return None
