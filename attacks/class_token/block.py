"""What the last block's gradients state of each picture, once the head's have come apart.

The loss reads the class token alone, so behind the last attention one token per picture has a gradient, and the
gradients of fc2, proj and, head by head, v are sums of one outer product per picture.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedmjp.models.classifier import VitClassifier

GRID = torch.logspace(-3, 3, 600, dtype=torch.float64)  # standard deviations of a class token that are tried
NARROWING = 60  # steps of the golden section
GOLDEN = (5**0.5 - 1) / 2


def last_block(model: VitClassifier) -> str:
    """Return the name of the last block."""
    return f"backbone.blocks.{len(model.backbone.blocks) - 1}"


def tensors_of_block(model: VitClassifier) -> list[str]:
    """Return the names of the gradients that are read."""
    return [f"{last_block(model)}.{layer}.weight" for layer in ("attn.qkv", "attn.proj", "mlp.fc2")]


def block_refusal(model: VitClassifier) -> str | None:
    """Say why the last block does not come apart; None if it does."""
    block: Any = model.get_submodule(last_block(model))
    expected = ("norm1", "attn", "norm2", "mlp")
    if not all(hasattr(block, name) for name in expected) or not isinstance(block.mlp.act, nn.GELU):
        return "last_block needs a block of two LayerNorms, one attention and an MLP with GELU: leave the option out"
    between = (block.ls1, block.ls2, block.mlp.norm, block.attn.q_norm, block.attn.k_norm)
    if any(not isinstance(module, nn.Identity) for module in between) or not isinstance(block.norm2, nn.LayerNorm):
        return "last_block needs a block without layer scale and norms inside of attention or MLP: leave the option out"
    return None


def block_facts(
    model: VitClassifier, gradients: Mapping[str, Tensor], features: Tensor, slopes: Tensor
) -> dict[str, Tensor]:
    """Compute the last block's values for each picture's class token.

    Args:
        model: With the weights that the server sent.
        gradients: Of ``tensors_of_block``, float64, of the mean loss.
        features: (pictures, dim) that the head reads.
        slopes: (pictures, classes) gradients of the mean loss at each picture's logits.

    Returns:
        ``class_token_after`` and ``class_token_before`` the last block and ``class_token_between`` attention and MLP,
        each (pictures, dim) and less its mean over the dimensions; ``attention_output`` (pictures, dim), what the
        projection reads; with no more pictures than dimensions of a head ``token_means`` (pictures, heads, dim), the
        normalised tokens weighted by the class token's attention.
    """
    block: Any = copy.deepcopy(model.get_submodule(last_block(model))).double().requires_grad_(requires_grad=False)
    norm, weight = model.backbone.norm, model.backbone.head.weight.detach().double()
    qkv, proj, fc2 = (gradients[name] for name in tensors_of_block(model))
    scale, shift = norm.weight.detach().double(), norm.bias.detach().double()
    inner = (features - shift) / scale
    at_inner = slopes @ weight * scale
    turned = at_inner - at_inner.mean(1, keepdim=True) - inner * (at_inner * inner).mean(1, keepdim=True)
    activations = _apart(turned, fc2)  # over the deviation of the class token
    deviations = torch.stack([_deviation(block, *pair) for pair in zip(inner, activations, strict=True)])[:, None]
    token_after = deviations * inner
    between = token_after - deviations * activations @ block.mlp.fc2.weight.mT - block.mlp.fc2.bias
    with torch.enable_grad():
        leaf = between.clone().requires_grad_()
        (at_between,) = torch.autograd.grad(leaf + block.mlp(block.norm2(leaf)), leaf, turned / deviations)
    output = _apart(at_between, proj)
    token_before = between - output @ block.attn.proj.weight.mT - block.attn.proj.bias
    facts = {
        "class_token_after": _centred(token_after),
        "class_token_between": _centred(between),
        "class_token_before": _centred(token_before),
        "attention_output": output,
    }
    heads, dim = int(block.attn.num_heads), features.shape[1]
    if len(features) <= dim // heads:
        at_output = (at_between @ block.attn.proj.weight).view(len(features), heads, -1)
        values = qkv[2 * dim :].view(heads, -1, dim)
        facts["token_means"] = torch.stack([_apart(at_output[:, head], values[head]) for head in range(heads)], 1)
    return facts


def _apart(slopes: Tensor, gradient: Tensor) -> Tensor:
    """Solve for a layer's inputs (pictures, in), from its gradient (out, in) and the slopes (pictures, out)."""
    inputs: Tensor = torch.linalg.lstsq(slopes.mT, gradient).solution
    return inputs


def _centred(tokens: Tensor) -> Tensor:
    centred: Tensor = tokens - tokens.mean(1, keepdim=True)
    return centred


def _deviation(block: Any, inner: Tensor, activations: Tensor) -> Tensor:
    """Find a class token's standard deviation: with it the token makes the activations that the gradient shows."""
    moved = inner - activations @ block.mlp.fc2.weight.mT

    def misfit(deviations: Tensor) -> Tensor:
        between = deviations[:, None] * moved - block.mlp.fc2.bias
        activated = block.mlp.act(block.mlp.fc1(block.norm2(between)))
        squares: Tensor = (activated / deviations[:, None] - activations).square().sum(1)
        return squares

    grid = GRID.to(inner)
    best = int(misfit(grid).argmin())
    low, high = (grid[min(max(best + step, 0), len(grid) - 1)].log() for step in (-1, 1))
    for _ in range(NARROWING):
        lower, upper = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        at_lower, at_upper = misfit(torch.stack([lower, upper]).exp())
        low, high = (low, upper) if at_lower < at_upper else (lower, high)
    return ((low + high) / 2).exp()
