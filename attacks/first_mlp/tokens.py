"""From whitened tokens behind the first attention to the tokens that enter it, by linear algebra alone.

With all a_t = GELU(fc1 h_t) the slopes s_t at the MLP's output follow from G2, and with them those at its input. Behind
norm2, at u_t = sigma_t k_t, they are known up to the deviation sigma_t of each token,

    g_t = s_t + c_t / sigma_t,    c_t from f_t through the LayerNorm,

and sum_t g_t, the gradient of the attention's last bias, has more entries than there are tokens: it tells every
sigma_t. The weight's gradient sum_t g_t (heads' output)_t^T then tells the attention's output o_t, and z_t = u_t - o_t.
No LayerNorm sees the mean of a token over its dimensions, and so the network does not either: it stays open.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.attacks.mjp.span.block import PREFIX, first_block, gelu, gelu_slope, linear_of
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier

EMBEDDINGS = (names.PATCH_WEIGHT, names.PATCH_BIAS, names.POSITION_EMBEDDING, names.CLASS_TOKEN)
PROJ_WEIGHT, PROJ_BIAS = PREFIX + "attn.proj.weight", PREFIX + "attn.proj.bias"
FC1_WEIGHT, FC2_WEIGHT = PREFIX + "mlp.fc1.weight", PREFIX + "mlp.fc2.weight"


def body_tensors(model: VitClassifier) -> list[str]:
    """Names of all parameters behind the tokens."""
    return [name for name, _ in model.named_parameters() if name not in EMBEDDINGS]


def centred(rows: Tensor) -> Tensor:
    """Rows less their means: what LayerNorms see of a token."""
    return rows - rows.mean(-1, keepdim=True)


@dataclass(frozen=True)
class Entering:
    """What the first block takes in, and what its attention makes of it."""

    tokens: Tensor  # (tokens, dim), less their means
    attended: Tensor  # (tokens, dim), the heads' outputs, before they are projected


def entering(model: VitClassifier, gradients: Mapping[str, Tensor], whitened: Tensor) -> Entering:
    """From whitened tokens (tokens, dim), all that the gradients are sums over."""
    block, fc2 = first_block(model), linear_of(model, "0.mlp.fc2")
    before = block.fc1(whitened * block.norm2.gain + block.norm2.bias)
    at_outputs = torch.linalg.lstsq(gelu(before).mT, gradients[FC2_WEIGHT].mT).solution
    inner = (at_outputs @ fc2.weight * gelu_slope(before)) @ block.fc1.weight * block.norm2.gain
    through = centred(inner) - whitened * (inner * whitened).mean(1, keepdim=True)
    rest = gradients[PROJ_BIAS] - at_outputs.sum(0)
    inverse = torch.linalg.lstsq(through.mT, rest[:, None]).solution
    slopes = at_outputs + inverse * through
    heads = torch.linalg.lstsq(slopes.mT, gradients[PROJ_WEIGHT]).solution
    return Entering(centred(whitened / inverse - block.proj(heads)), heads)


def class_token(model: VitClassifier) -> Tensor:
    """(dim,) with its position: the one token that everybody knows."""
    token, positions = (model.get_parameter(name).detach() for name in (names.CLASS_TOKEN, names.POSITION_EMBEDDING))
    return (token[0, 0] + positions[0, 0]).double()


@dataclass(frozen=True)
class Passed:
    """What the network makes of tokens."""

    slopes: Tensor  # (tokens, dim), the loss's gradient at each
    residual: float  # largest relative distance of a gradient behind the tokens from the uploaded one


def passed(
    model: VitClassifier, gradients: Mapping[str, Tensor], tokens: Tensor, label: int, smoothing: float
) -> Passed:
    """Pass tokens (1 + patches, dim), the class token first, through the network in float64, and back."""
    network = copy.deepcopy(model).double().requires_grad_(requires_grad=True)
    backbone, leaf = network.backbone, tokens.detach().clone().requires_grad_()
    compared = body_tensors(model)
    with torch.enable_grad():
        logits = backbone.forward_head(backbone.norm(backbone.blocks(leaf[None])))
        target = torch.tensor([label], device=tokens.device)
        loss = F.cross_entropy(logits, target, label_smoothing=smoothing)
        slopes, *made = torch.autograd.grad(loss, [leaf, *(network.get_parameter(name) for name in compared)])
    distances = [
        float((one - gradients[name]).norm() / gradients[name].norm().clamp(min=torch.finfo(one.dtype).tiny))
        for name, one in zip(compared, made, strict=True)
    ]
    return Passed(slopes, max(distances))
