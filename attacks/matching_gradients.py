"""How far the updates of candidate pictures agree with those that were uploaded.

Gradient matching needs nothing of a candidate's update but, for every tensor, its inner product with the
uploaded one and its own squared norm, both differentiable in the pictures. Two ways to get them:
``PerCandidateGradients`` for one gradient, ``SimulatedSteps`` for a weight delta of several steps. Targets are
given by name, (candidates, *parameter shape), as mean gradients.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedmjp.attacks.gradient_at_tokens import PlainTransformer, is_plain
from fedmjp.attacks.weight_products import compare, weight_products
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches

Network = TypeVar("Network", bound=nn.Module)
Layers = dict[str, tuple[Tensor, Tensor]]  # (A, B) of each
TOKEN_PARAMETERS = (names.POSITION_EMBEDDING, names.CLASS_TOKEN, names.UNKNOWN_EMBEDDING)
PATCH_EMBEDDING = names.PATCH_WEIGHT.removesuffix(".weight")


@dataclass(frozen=True)
class Candidates:
    """Pictures that are tried at the same time, with what is assumed about them.

    Attributes:
        images: (candidates, batch, 3, size, size) in [0, 1]; a candidate is all pictures of one upload.
        labels: (candidates, batch) int64.
        mask: (candidates, batch, patches) bool, the patches without position; None for no mask.
    """

    images: Tensor
    labels: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Agreement:
    """Products and norms of candidates' updates that a search needs, differentiable.

    Attributes:
        scale: (candidates,), constants that the updates were multiplied with, so that they can be squared.
        products: (candidates, matched tensors), inner products of their tensors with the targets.
        squares: (candidates, matched tensors), squared norms of their tensors.
        positions: (candidates, tokens, dim), gradients of the position embedding.
    """

    scale: Tensor
    products: Tensor
    squares: Tensor
    positions: Tensor


def twice_differentiable(network: Network) -> Network:
    """Copy and freeze a network so that its attention has a second derivative: timm's fused attention has none.

    Args:
        network: With or without attention.
    """
    twin = copy.deepcopy(network).requires_grad_(requires_grad=False)
    for module in twin.modules():
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010 (no type checker knows it)
    return twin


def unmatchable(model: VitClassifier, matched: Sequence[str]) -> list[str]:
    """Name the parameters that ``PerCandidateGradients`` cannot compute.

    Args:
        model: The model that the server had sent.
        matched: Names of parameters that are to be compared.
    """
    layers, modules = (nn.Linear, nn.LayerNorm, nn.Conv2d), dict(model.named_modules())
    in_layers = [name for name in matched if name not in TOKEN_PARAMETERS]
    return [name for name in in_layers if not isinstance(modules[name.rpartition(".")[0]], layers)]


class PerCandidateGradients:
    """The gradients of many candidates in one forward and one backward pass.

    The pass yields, for every layer, its inputs A and the gradients B at its outputs, one row per token.
    The weight gradient of a candidate is B^T A over its own rows, so no pass per candidate is needed,
    and the weights' gradients need no graph: what the search differentiates is A and B.

    Where all that is compared belongs to the embedding of patches and tokens, and the transformer is plain
    (``fedmjp.attacks.gradient_at_tokens.is_plain``), derivatives that are written out serve; else torch finds them.

    Args:
        model: Copied, not changed.
        matched: Names of the parameters whose gradients are compared.
        label_smoothing: The loss's label smoothing.
    """

    def __init__(self, model: VitClassifier, matched: Sequence[str], *, label_smoothing: float = 0.0) -> None:
        self._model, self._matched = twice_differentiable(model), list(matched)
        self._label_smoothing = label_smoothing
        self._seen: Layers = {}
        owners = dict.fromkeys(name.rpartition(".")[0] for name in matched if name not in TOKEN_PARAMETERS)
        plain = set(owners) <= {PATCH_EMBEDDING} and is_plain(model.backbone)
        self._plain = PlainTransformer(model.backbone) if plain else None
        self._layers = {owner: self._model.get_submodule(owner) for owner in owners}
        for owner, module in self._layers.items():
            module.register_forward_hook(partial(self._remember, owner))

    def agreement(self, candidates: Candidates, targets: Mapping[str, Tensor]) -> Agreement:
        """Compare the gradients of the mean cross-entropy of each candidate with its targets.

        Args:
            candidates: Pictures, labels and masks.
            targets: Name to (candidates, *parameter shape).
        """
        terms: Layers = {}
        passes = self._passes if self._plain is None else partial(self._plain_passes, self._plain)
        scale, tokens, layers = passes(candidates)
        for name in self._matched:
            if name in tokens:
                terms[name] = compare(tokens[name].flatten(1), targets[name].flatten(1))
        for owner, (inputs, outputs) in layers.items():
            weight, bias = f"{owner}.weight", f"{owner}.bias"
            if weight in targets:
                terms[weight] = self._weight_terms(self._layers[owner], inputs, outputs, targets[weight])
            if bias in targets:
                terms[bias] = compare(outputs.sum(dim=1), targets[bias])
        products, squares = zip(*(terms[name] for name in self._matched), strict=True)
        positions = tokens[names.POSITION_EMBEDDING]
        return Agreement(scale, torch.stack(products, dim=1), torch.stack(squares, dim=1), positions)

    def _passes(self, candidates: Candidates) -> tuple[Tensor, dict[str, Tensor], Layers]:
        """Return scale, gradients of the token parameters, and (A, B) of each layer, all per candidate."""
        images = candidates.images.flatten(0, 1)
        mask = None if candidates.mask is None else candidates.mask.flatten(0, 1)
        leaves = {}  # (pictures, tokens, dim), so that every picture's gradient is its own
        for name in TOKEN_PARAMETERS:
            if name == names.UNKNOWN_EMBEDDING and mask is None:
                continue
            parameter = self._model.get_parameter(name).detach()
            repeated = parameter.view(1, -1, parameter.shape[-1]).expand(len(images), -1, -1)
            leaves[name] = repeated.requires_grad_()
        logits = _logits(self._model, leaves, images, mask)
        count, batch = candidates.labels.shape
        smoothing = self._label_smoothing
        losses = F.cross_entropy(logits, candidates.labels.flatten(), reduction="none", label_smoothing=smoothing).view(
            count, batch
        )
        scale = 1 / _slopes_at(logits.detach(), candidates.labels, smoothing)
        loss = (losses.mean(dim=1) * scale).sum()
        passed, self._seen = self._seen, {}
        points = [*leaves.values(), *(output for _, output in passed.values())]
        gradients = torch.autograd.grad(loss, points, create_graph=True)
        tokens, layers = {}, {}
        for name, gradient in zip(leaves, gradients, strict=False):
            tokens[name] = gradient.view(count, batch, *gradient.shape[1:]).sum(dim=1)
        for (owner, (inputs, _)), gradient in zip(passed.items(), gradients[len(leaves) :], strict=True):
            layer = self._layers[owner]
            layers[owner] = _rows(inputs, layer, count), _rows(gradient, layer, count, is_output=True)
        return scale, tokens, layers

    def _plain_passes(
        self, plain: PlainTransformer, candidates: Candidates
    ) -> tuple[Tensor, dict[str, Tensor], Layers]:
        """Return the same for the embedding alone."""
        model, (count, batch) = self._model, candidates.labels.shape
        embedding = self._model.backbone.patch_embed.proj
        patches = to_patches((candidates.images.flatten(0, 1) - model.mean) / model.std, model.patch_size)
        embedded = F.linear(patches, embedding.weight.flatten(1), embedding.bias)
        class_token = model.get_parameter(names.CLASS_TOKEN).expand(len(patches), -1, -1)
        positions: Tensor = model.get_parameter(names.POSITION_EMBEDDING)
        masked = None
        if candidates.mask is not None:
            masked = F.pad(candidates.mask.flatten(0, 1), (model.prefix_tokens, 0))[:, :, None]
            positions = torch.where(masked, model.get_parameter(names.UNKNOWN_EMBEDDING), positions)
        entering = torch.cat([class_token, embedded], dim=1) + positions
        classes = model.backbone.num_classes
        targets = soft_targets(candidates.labels, classes, self._label_smoothing, entering.dtype)
        slopes, scale = plain.gradient(entering.view(count, batch, *entering.shape[1:]), targets)
        at_positions = slopes if masked is None else slopes.masked_fill(masked.view(*slopes.shape[:3], 1), 0)
        prefix = model.prefix_tokens
        tokens = {
            names.POSITION_EMBEDDING: at_positions.sum(dim=1),
            names.CLASS_TOKEN: slopes[:, :, :prefix].sum(dim=1),
            names.UNKNOWN_EMBEDDING: (slopes - at_positions).sum(dim=(1, 2)),
        }
        rows = patches.reshape(count, -1, patches.shape[-1]), slopes[:, :, prefix:].flatten(1, 2)
        return scale, tokens, {PATCH_EMBEDDING: rows} if self._layers else {}

    def _remember(self, owner: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._seen[owner] = (inputs[0], output)

    @staticmethod
    def _weight_terms(layer: nn.Module, inputs: Tensor, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(layer, nn.LayerNorm):
            normal = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
            return compare((normal * outputs).sum(dim=1), target)
        return weight_products(inputs, outputs, target.flatten(2))


class SimulatedSteps:
    """The weight deltas of candidates, by taking the local steps and differentiating through them.

    Candidate after candidate: each has weights of its own from the second step on. The steps are of plain SGD on the
    whole batch.

    Args:
        model: Copied, not changed.
        matched: Names of the parameters whose changes are compared.
        steps: Local steps.
        learning_rate: The steps' learning rate.
        label_smoothing: The loss's label smoothing.
    """

    def __init__(
        self,
        model: VitClassifier,
        matched: Sequence[str],
        *,
        steps: int,
        learning_rate: float,
        label_smoothing: float = 0.0,
    ) -> None:
        self._model, self._matched = twice_differentiable(model), list(matched)
        self._label_smoothing = label_smoothing
        self._steps, self._learning_rate = steps, learning_rate

    def agreement(self, candidates: Candidates, targets: Mapping[str, Tensor]) -> Agreement:
        """Compare the mean gradients over the steps of each candidate with its targets.

        Args:
            candidates: Pictures, labels and masks.
            targets: Name to (candidates, *parameter shape).
        """
        terms, positions = [], []
        for index, images in enumerate(candidates.images):
            mask = None if candidates.mask is None else candidates.mask[index]
            gradients = self._mean_gradients(images, candidates.labels[index], mask)
            pairs = [compare(gradients[name].flatten(), targets[name][index].flatten()) for name in self._matched]
            terms.append(torch.stack([torch.stack(pair) for pair in pairs], dim=1))
            positions.append(gradients[names.POSITION_EMBEDDING][0])
        products, squares = torch.stack(terms, dim=1)
        return Agreement(torch.ones_like(products[:, 0]).detach(), products, squares, torch.stack(positions))

    def _mean_gradients(self, images: Tensor, labels: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        weights = {name: weight.clone().requires_grad_() for name, weight in self._model.named_parameters()}
        summed = [*self._matched, names.POSITION_EMBEDDING]
        total = {name: torch.zeros_like(weights[name]) for name in summed}
        for _ in range(self._steps):
            logits = _logits(self._model, weights, images, mask)
            loss = F.cross_entropy(logits, labels, label_smoothing=self._label_smoothing)
            slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)
            gradients = dict(zip(weights, slopes, strict=True))
            total = {name: total[name] + gradients[name] for name in total}
            weights = {name: weight - self._learning_rate * gradients[name] for name, weight in weights.items()}
        return {name: total[name] / self._steps for name in total}


Comparison = PerCandidateGradients | SimulatedSteps


def _logits(model: VitClassifier, weights: Mapping[str, Tensor], images: Tensor, mask: Tensor | None) -> Tensor:
    """Run the model with some or all of its parameters replaced.

    The position embedding must be among them, with a mask the unknown embedding too; both may differ
    from picture to picture.
    """
    prefix = "backbone."
    replaced = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    if mask is not None:
        masked = F.pad(mask, (model.prefix_tokens, 0))[:, :, None]
        positions = torch.where(masked, weights[names.UNKNOWN_EMBEDDING], weights[names.POSITION_EMBEDDING])
        replaced[names.POSITION_EMBEDDING.removeprefix(prefix)] = positions
    logits: Tensor = functional_call(model.backbone, replaced, ((images - model.mean) / model.std,))
    return logits


def _slopes_at(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """(candidates,) norm of the loss's gradient at the logits, which every parameter's gradient is proportional to."""
    targets = soft_targets(labels.flatten(), logits.shape[1], smoothing, logits.dtype)
    slopes = (logits.softmax(dim=1) - targets).view(len(labels), -1)
    norms: Tensor = slopes.norm(dim=1)
    return norms.clamp(min=torch.finfo(logits.dtype).tiny)


def soft_targets(labels: Tensor, classes: int, smoothing: float, kind: torch.dtype) -> Tensor:
    """Return the distributions that smoothed labels stand for, (..., classes).

    Args:
        labels: (...) int64.
        classes: Their number.
        smoothing: Share of a label that goes to all classes.
        kind: Type of the result.
    """
    return (1 - smoothing) * F.one_hot(labels, classes).to(kind) + smoothing / classes


def _rows(values: Tensor, layer: nn.Module, count: int, *, is_output: bool = False) -> Tensor:
    """Return the values at a layer's input or output as (candidates, tokens of all its pictures, width)."""
    if isinstance(layer, nn.Conv2d):
        values = values.flatten(2).transpose(1, 2) if is_output else to_patches(values, int(layer.kernel_size[0]))
    return values.reshape(count, -1, values.shape[-1])
