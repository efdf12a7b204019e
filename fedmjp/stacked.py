"""Gradients of many independent pictures in one pass, for the tensors at the model's entrance.

Closed forms read the gradients of the embeddings and of the first attention. For those the gradient at the tokens,
picture by picture, is enough: one forward and one backward pass through the activations serve a whole stack.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedmjp.arithmetic import Arithmetic, computing, rounded
from fedmjp.errors import BadInputError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.tensors import to_device

ENTRANCE = frozenset(
    {
        names.CLASS_TOKEN,
        names.FIRST_QKV_WEIGHT,
        names.ORACLE_TOKEN_GRADIENTS,
        names.PATCH_BIAS,
        names.PATCH_WEIGHT,
        names.POSITION_EMBEDDING,
        names.UNKNOWN_EMBEDDING,
    }
)


def entrance_gradients(
    model: VitClassifier,
    batches: Sequence[PrivateBatch],
    tensors: Collection[str],
    *,
    label_smoothing: float = 0.0,
    arithmetic: Arithmetic = "float32",
) -> list[dict[str, Tensor]]:
    """Compute the gradient of each batch as ``updates.gradient`` does, for some tensors at the entrance alone.

    Args:
        model: With the weights that the server sent, and with a position embedding.
        batches: Independent of each other; all of the same number of pictures.
        tensors: Names, all in ``ENTRANCE``. ``names.ORACLE_TOKEN_GRADIENTS``, (1, tokens, dim), is
            the gradient at every token, masked or not, summed over the batch.
        label_smoothing: Of the loss.
        arithmetic: Of the network.

    Raises:
        BadInputError: If the model has no position embedding.
    """
    if not model.has_positions:
        raise BadInputError("a model without a position embedding has no gradients at its entrance: take whole updates")
    with computing(arithmetic, model.mean.device, repeats=True):
        parts = zip(*((batch.version(batch.gradient_of), batch.mask, batch.targets) for batch in batches), strict=True)
        images, masks, targets = (to_device(torch.cat(part), model.mean.device) for part in parts)
        normalised = (images - model.mean) / model.std
        with rounded(arithmetic, images.device):
            forward = _forward(model, normalised, masks, targets, label_smoothing)
        tokens, attention_outputs = torch.autograd.grad(forward.loss, (forward.positions, forward.attention_outputs))
        factor = torch.bfloat16 if arithmetic == "bfloat16" else tokens.dtype  # of products, as autocast rounds them
        # The loss was summed over all pictures; an upload's is the mean over its own.
        by_batch = (len(batches), len(images) // len(batches))
        tokens = (tokens / by_batch[1]).reshape(*by_batch, *tokens.shape[1:])
        outputs = (attention_outputs / by_batch[1]).reshape(len(batches), -1, attention_outputs.shape[-1])
        inputs = forward.attention_inputs.reshape(*outputs.shape[:2], -1).to(factor)
        prefix, patch_tokens = model.prefix_tokens, tokens[:, :, model.prefix_tokens :].flatten(1, 2).to(factor)

        # (batches, pictures * patches, 3 * patch_size ** 2), as they were embedded.
        patches = to_patches(normalised, model.patch_size).reshape(len(batches), -1, 3 * model.patch_size**2)
        # (batches, pictures, tokens, 1), True where the unknown embedding stood instead of the own position.
        replaced = torch.cat([masks.new_zeros(len(masks), prefix), masks], dim=1) & model.defended
        masked = replaced.reshape(*by_batch, -1, 1)

        formulas: dict[str, Callable[[], Tensor]] = {
            names.CLASS_TOKEN: lambda: tokens[:, :, :prefix].sum(1),
            names.FIRST_QKV_WEIGHT: lambda: outputs.mT @ inputs,
            names.ORACLE_TOKEN_GRADIENTS: lambda: tokens.sum(1),
            names.PATCH_BIAS: lambda: patch_tokens.sum(1),
            names.PATCH_WEIGHT: lambda: patch_tokens.mT @ patches.to(factor),
            names.POSITION_EMBEDDING: lambda: tokens.masked_fill(masked, 0).sum(1),
            names.UNKNOWN_EMBEDDING: lambda: tokens.masked_fill(~masked, 0).sum((1, 2)),
        }
        gradients = {}
        for name in tensors:
            like = names.POSITION_EMBEDDING if name == names.ORACLE_TOKEN_GRADIENTS else name
            parameter = model.get_parameter(like)
            gradients[name] = formulas[name]().reshape(-1, *parameter.shape).to(parameter.dtype)
        return [{name: values[index] for name, values in gradients.items()} for index in range(len(batches))]


class _Forward(NamedTuple):
    """A forward pass, picture by picture: its loss, where gradients are taken, and input of the first qkv layer."""

    loss: Tensor
    positions: Tensor
    attention_inputs: Tensor
    attention_outputs: Tensor


def _forward(
    model: VitClassifier, normalised: Tensor, masks: Tensor, targets: Tensor, label_smoothing: float
) -> _Forward:
    layer: dict[str, Tensor] = {}

    # Detached weights: nothing of the backward pass is spent on them.
    frozen = {name: weight.detach() for name, weight in model.backbone.named_parameters()}
    with torch.enable_grad(), ExitStack() as hooks:
        first_attention = model.get_submodule(names.FIRST_QKV_WEIGHT.removesuffix(".weight"))
        hooks.callback(
            first_attention.register_forward_hook(
                lambda _module, inputs, output: layer.update(inputs=inputs[0].detach(), output=output)
            ).remove
        )
        _shorten_last_block(model, hooks)
        embedding = model.get_parameter(names.POSITION_EMBEDDING).expand(len(masks), -1, -1)
        positions = (model.masked_position_embedding(masks) if model.defended else embedding).detach().requires_grad_()
        logits = functional_call(model.backbone, {**frozen, "pos_embed": positions}, (normalised,))
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
    return _Forward(loss, positions, layer["inputs"], layer["output"])


def _shorten_last_block(model: VitClassifier, hooks: ExitStack) -> None:
    """Spare the last block's MLP all tokens but the first where the classifier reads that one alone."""
    if model.backbone.global_pool != "token":
        return

    tokens = model.get_parameter(names.POSITION_EMBEDDING).shape[1]
    mlp = model.get_submodule(f"backbone.blocks.{len(model.backbone.blocks) - 1}.mlp")
    hooks.callback(mlp.register_forward_pre_hook(lambda _module, inputs: (inputs[0][:, :1],)).remove)
    padding = (0, 0, 0, tokens - 1)
    hooks.callback(mlp.register_forward_hook(lambda _module, _inputs, output: F.pad(output, padding)).remove)
