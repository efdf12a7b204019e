"""Gradients of many independent pictures in one pass, for the tensors at the model's entrance.

What closed forms read are gradients of the embeddings and of the first attention. For those the
parameters' own backward pass is not needed: the gradient at the tokens, picture by picture, is
enough. One forward pass and one backward pass through the activations serve a whole stack.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedmjp.errors import BadInputError
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

    Raises:
        BadInputError: If the model has no position embedding, where the gradients at the tokens are read.
    """
    if not model.has_positions:
        raise BadInputError("a model without a position embedding has no gradients at its entrance: take whole updates")
    images = torch.cat([batch.version(batch.gradient_of) for batch in batches]).to(model.mean.device)
    masks = torch.cat([batch.mask for batch in batches]).to(model.mean.device)
    labels = torch.cat([batch.labels for batch in batches]).to(model.mean.device)
    normalised = (images - model.mean) / model.std
    tokens, attention_inputs, attention_outputs = _token_gradients(model, normalised, masks, labels)
    by_batch = (len(batches), len(images) // len(batches))
    entrance = _Entrance(
        model=model,
        # The loss was summed over all pictures; an upload's is the mean over its own.
        tokens=(tokens / by_batch[1]).reshape(*by_batch, *tokens.shape[1:]),
        patches=to_patches(normalised, model.patch_size).reshape(len(batches), -1, 3 * model.patch_size**2),
        masks=masks.reshape(*by_batch, -1),
        attention_inputs=attention_inputs.reshape(len(batches), -1, attention_inputs.shape[-1]),
        attention_outputs=(attention_outputs / by_batch[1]).reshape(len(batches), -1, attention_outputs.shape[-1]),
    )
    found = {name: entrance.gradient(name) for name in tensors}
    return [{name: values[index] for name, values in found.items()} for index in range(len(batches))]


def _token_gradients(
    model: VitClassifier, normalised: Tensor, masks: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients at the tokens, and input and output gradient of the first qkv layer, picture by picture."""
    seen: dict[str, Tensor] = {}

    def keep(_module: object, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.update(inputs=inputs[0].detach(), output=output)

    # Detached weights: nothing of the backward pass is spent on them.
    frozen = {name: weight.detach() for name, weight in model.backbone.named_parameters()}
    with torch.enable_grad(), ExitStack() as hooks:
        first_attention = model.get_submodule(names.FIRST_QKV_WEIGHT.removesuffix(".weight"))
        hooks.callback(first_attention.register_forward_hook(keep).remove)
        _shorten_last_block(model, hooks)
        positions = _positions(model, masks).detach().requires_grad_()
        logits = functional_call(model.backbone, {**frozen, "pos_embed": positions}, (normalised,))
        loss = F.cross_entropy(logits, labels, reduction="sum")
        at_tokens, at_output = torch.autograd.grad(loss, (positions, seen["output"]))
    return at_tokens, seen["inputs"], at_output


def _shorten_last_block(model: VitClassifier, hooks: ExitStack) -> None:
    """Where the classifier reads the first token alone, spare the last block's MLP the other tokens."""
    if model.backbone.global_pool != "token":
        return

    def first(_module: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0][:, :1],)

    def pad(_module: object, _inputs: object, output: Tensor) -> Tensor:
        return F.pad(output, (0, 0, 0, tokens - 1))

    tokens = model.get_parameter(names.POSITION_EMBEDDING).shape[1]
    mlp = model.get_submodule(f"backbone.blocks.{len(model.backbone.blocks) - 1}.mlp")
    hooks.callback(mlp.register_forward_pre_hook(first).remove)
    hooks.callback(mlp.register_forward_hook(pad).remove)


def _positions(model: VitClassifier, masks: Tensor) -> Tensor:
    """(pictures, tokens, dim): the position embedding of each picture."""
    if model.defended:
        return model.masked_position_embedding(masks)
    return model.get_parameter(names.POSITION_EMBEDDING).expand(len(masks), -1, -1)


@dataclass(frozen=True)
class _Entrance:
    """Turns gradients at the tokens into those of parameters.

    Attributes:
        model: Its sizes.
        tokens: (batches, pictures, tokens, dim), gradient at every token.
        patches: (batches, pictures * patches, 3 * patch_size ** 2), what was embedded.
        masks: (batches, pictures, patches).
        attention_inputs: (batches, pictures * tokens, dim), of the first qkv layer.
        attention_outputs: (batches, pictures * tokens, 3 * dim), gradient at its output.
    """

    model: VitClassifier
    tokens: Tensor
    patches: Tensor
    masks: Tensor
    attention_inputs: Tensor
    attention_outputs: Tensor

    def gradient(self, name: str) -> Tensor:
        """(batches, *shape of the parameter)."""
        shape = (-1, *self._shape(name))
        patch_tokens = self.tokens[:, :, self.model.prefix_tokens :].flatten(1, 2)
        match name:
            case names.CLASS_TOKEN:
                return self.tokens[:, :, : self.model.prefix_tokens].sum(1).reshape(shape)
            case names.FIRST_QKV_WEIGHT:
                return self.attention_outputs.mT @ self.attention_inputs
            case names.ORACLE_TOKEN_GRADIENTS:
                return self.tokens.sum(1).reshape(shape)
            case names.PATCH_BIAS:
                return patch_tokens.sum(1)
            case names.PATCH_WEIGHT:
                return (patch_tokens.mT @ self.patches).reshape(shape)
            case names.POSITION_EMBEDDING:
                return self.tokens.masked_fill(self._masked(), 0).sum(1).reshape(shape)
            case names.UNKNOWN_EMBEDDING:
                return self.tokens.masked_fill(~self._masked(), 0).sum((1, 2))
        raise KeyError(name)

    def _shape(self, name: str) -> torch.Size:
        like = names.POSITION_EMBEDDING if name == names.ORACLE_TOKEN_GRADIENTS else name
        return self.model.get_parameter(like).shape

    def _masked(self) -> Tensor:
        """(batches, pictures, tokens, 1): where the unknown embedding stood instead of the own position."""
        prefix = self.masks.new_zeros(*self.masks.shape[:2], self.model.prefix_tokens)
        return torch.cat([prefix, self.masks], dim=2)[..., None] & self.model.defended
