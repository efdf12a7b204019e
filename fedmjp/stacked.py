"""Gradients of many independent pictures in one pass, for the tensors at the model's entrance.

What closed forms read are gradients of the embeddings and of the first attention. For those the
parameters' own backward pass is not needed: the gradient at the tokens, picture by picture, is
enough. One forward pass and one backward pass through the activations serve a whole stack.
"""

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch

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
    model: VitClassifier, batches: Sequence[PrivateBatch], tensors: Collection[str]
) -> list[dict[str, Tensor]]:
    """What ``updates.gradient`` gives for each batch, reduced to some tensors at the entrance.

    Args:
        model: The model with the weights that the server sent. It is not changed.
        batches: Independent of each other; all of the same number of pictures.
        tensors: Names, all in ``ENTRANCE``. ``names.ORACLE_TOKEN_GRADIENTS``, (1, tokens, dim), is
            the gradient at every token, masked or not, summed over the batch.

    Returns:
        Per batch, parameter name to gradient of its mean loss, float32, on the model's device.
    """
    images = torch.cat([batch.version(batch.gradient_of) for batch in batches]).to(model.mean.device)
    masks = torch.cat([batch.mask for batch in batches]).to(model.mean.device)
    labels = torch.cat([batch.labels for batch in batches]).to(model.mean.device)
    normalised = (images - model.mean) / model.std
    tokens, attention_inputs, attention_outputs = _token_gradients(model, normalised, masks, labels)
    pictures = len(images) // len(batches)
    parts = _Entrance(
        model=model,
        # The loss was summed over all pictures; an upload's is the mean over its own.
        tokens=(tokens / pictures).unflatten(0, (len(batches), pictures)),
        patches=to_patches(normalised, model.patch_size).unflatten(0, (len(batches), pictures)),
        masks=masks.unflatten(0, (len(batches), pictures)),
        attention=_outer(attention_outputs / pictures, attention_inputs, pictures),
    )
    found = {name: parts.gradient(name) for name in tensors}
    return [{name: values[index] for name, values in found.items()} for index in range(len(batches))]


def _token_gradients(
    model: VitClassifier, normalised: Tensor, masks: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients at the tokens, and input and output gradient of the first qkv layer, picture by picture."""
    with torch.enable_grad():
        positions = _positions(model, masks).detach().requires_grad_()
        seen: dict[str, Tensor] = {}

        def keep(_module: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen.update(inputs=inputs[0].detach(), output=output)

        handle = model.get_submodule(names.FIRST_QKV_WEIGHT.removesuffix(".weight")).register_forward_hook(keep)
        try:
            logits = functional_call(model.backbone, {"pos_embed": positions}, (normalised,))
        finally:
            handle.remove()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        at_tokens, at_output = torch.autograd.grad(loss, (positions, seen["output"]))
    return at_tokens, seen["inputs"], at_output


def _positions(model: VitClassifier, masks: Tensor) -> Tensor:
    """(pictures, tokens, dim): the position embedding of each picture."""
    if model.defended:
        return model.masked_position_embedding(masks)
    return model.get_parameter(names.POSITION_EMBEDDING).expand(len(masks), -1, -1)


def _outer(outputs: Tensor, inputs: Tensor, pictures: int) -> Tensor:
    """(batches, out, in): gradient of a linear layer's weight, summed over each batch's pictures and tokens."""
    per_batch = (-1, pictures * inputs.shape[1])
    return outputs.reshape(*per_batch, outputs.shape[-1]).mT @ inputs.reshape(*per_batch, inputs.shape[-1])


class _Entrance:
    """Turns gradients at the tokens into those of parameters; first dimension: batches."""

    def __init__(self, *, model: VitClassifier, tokens: Tensor, patches: Tensor, masks: Tensor, attention: Tensor):
        self._model, self._tokens, self._patches, self._attention = model, tokens, patches, attention
        prefix = masks.new_zeros(*masks.shape[:2], model.prefix_tokens)
        self._masked = torch.cat([prefix, masks], dim=2)[..., None] & model.defended

    def gradient(self, name: str) -> Tensor:
        """(batches, *shape of the parameter)."""
        prefix, patch_tokens = self._model.prefix_tokens, self._tokens[:, :, self._model.prefix_tokens :]
        match name:
            case names.CLASS_TOKEN:
                return self._tokens[:, :, :prefix].sum(1, keepdim=True)
            case names.FIRST_QKV_WEIGHT:
                return self._attention
            case names.ORACLE_TOKEN_GRADIENTS:
                return self._tokens.sum(1, keepdim=True)
            case names.PATCH_BIAS:
                return patch_tokens.sum((1, 2))
            case names.PATCH_WEIGHT:
                flat = patch_tokens.flatten(1, 2).mT @ self._patches.flatten(1, 2)
                return flat.unflatten(2, (3, self._model.patch_size, self._model.patch_size))
            case names.POSITION_EMBEDDING:
                return self._tokens.masked_fill(self._masked, 0).sum(1, keepdim=True)
            case names.UNKNOWN_EMBEDDING:
                return self._tokens.masked_fill(~self._masked, 0).sum((1, 2))
        raise KeyError(name)
