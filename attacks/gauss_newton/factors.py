"""The gradients of candidate pictures as the factors that they are products of.

A forward and a backward pass give, for every linear layer, its inputs A and the gradients B at its outputs, a row per
token. The gradient of its weight is B^T A, that of its bias the sum of B's rows: whatever of them is compared, nothing
larger than the factors has to be formed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

from fedmjp.attacks.matching_gradients import twice_differentiable
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier

PREFIX = "backbone."


@dataclass(frozen=True)
class Factors:
    """Of candidates: by layer the rows (tokens of all pictures, features), and the gradients at the tokens.

    Attributes:
        inputs: A of each layer.
        outputs: B of each layer.
        at_tokens: (pictures, tokens, dim), where they enter the first block.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    at_tokens: Tensor

    def gradient(self, name: str) -> Tensor:
        """Form the gradient of the position embedding (tokens, dim), or of a layer's weight (rows, columns) or bias."""
        if name == names.POSITION_EMBEDDING:
            return self.at_tokens.sum(dim=0)
        layer, kind = name.rsplit(".", maxsplit=1)
        outputs = self.outputs[layer]
        return outputs.sum(dim=0) if kind == "bias" else outputs.mT @ self.inputs[layer]


class FactoredModel:
    """A model that takes patches and gives factors, differentiable forwards."""

    def __init__(self, model: VitClassifier, layers: Sequence[str], label_smoothing: float) -> None:
        """Copy a model, with the weights of the upload, for these linear layers of it and the clients' loss."""
        self._label_smoothing = label_smoothing
        self._networks = {dtype: _network(model, dtype) for dtype in (torch.float32, torch.float64)}
        self._taps: Mapping[str, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        self._shapes: dict[str, torch.Size] = {}
        for network in self._networks.values():
            for name in layers:
                network.get_submodule(name).register_forward_hook(partial(self._tap, name))

    def network(self, dtype: torch.dtype) -> VitClassifier:
        """Return the copy of float32 or float64."""
        return self._networks[dtype]

    def __call__(self, patches: Tensor, labels: Tensor, batch: int, positions: Tensor) -> Factors:
        """Compute the factors of candidates, with what they add to the loss of a batch.

        Args:
            patches: (pictures, patches, values) in the network's input space, float32 or float64.
            labels: (pictures,) int64.
            batch: Pictures behind the upload.
            positions: (pictures or 1, tokens, dim), as the clients add them.
        """
        network = self._networks[patches.dtype]
        positions = positions.expand(len(labels), -1, -1)
        if not self._shapes:
            self._loss(network, labels, batch, {}, positions, torch.zeros_like(patches))
        taps = {name: patches.new_zeros(len(labels), *shape) for name, shape in self._shapes.items()}
        loss = partial(self._loss, network, labels, batch)
        slopes, inputs = grad(loss, argnums=(0, 1), has_aux=True)(taps, positions, patches)
        outputs, at_tokens = slopes
        return Factors(_rows(inputs), _rows(outputs), at_tokens)

    def _loss(
        self,
        network: VitClassifier,
        labels: Tensor,
        batch: int,
        taps: Mapping[str, Tensor],
        positions: Tensor,
        patches: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute a share of the clients' loss with ``taps`` added to the outputs of layers, and the layers' inputs."""
        self._taps, self._inputs = taps, {}
        replaced = {names.POSITION_EMBEDDING.removeprefix(PREFIX): positions}
        logits = functional_call(network.backbone, replaced, (patches,))
        inputs, self._inputs = self._inputs, {}
        loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._label_smoothing)
        return loss / batch, inputs

    def _tap(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self._inputs[name] = inputs[0]
        if name not in self._taps:
            self._shapes[name] = output.shape[1:]
            return output
        return output + self._taps[name]


def _rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Flatten the tokens of all pictures into rows."""
    return {name: tensor.flatten(0, -2) for name, tensor in tensors.items()}


def _network(model: VitClassifier, dtype: torch.dtype) -> VitClassifier:
    """Return a frozen copy whose backbone takes patches (pictures, patches, values) in place of pictures."""
    network = twice_differentiable(model).to(dtype)
    projection: Any = network.backbone.patch_embed.proj
    linear = nn.Linear(projection.weight[0].numel(), len(projection.weight), device="meta")  # nothing is drawn
    linear.weight, linear.bias = nn.Parameter(projection.weight.flatten(1), requires_grad=False), projection.bias
    network.backbone.patch_embed = linear
    return network
