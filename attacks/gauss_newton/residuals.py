"""How far the gradients of candidate pictures are from the uploaded ones, as a vector that Gauss-Newton can use.

Of a weight's gradient G the residuals compare the sketch L G R with fixed random L and R, made of its factors
(``factors``): every entry of G is in it, and nothing larger is ever formed. Each tensor is divided by its norm, for
float32 rounds all of them to about the same share.
"""

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmjp.attacks.gauss_newton.factors import PREFIX, FactoredModel, Factors
from fedmjp.attacks.gauss_newton.levenberg import jacobian
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier

SKETCH = 64  # rows and columns of a weight's gradient that are compared, above twice the tokens of what is feasible


def compared_layers(model: VitClassifier) -> list[str]:
    """List the linear layers of the first two blocks, the middle and the last one, and the head."""
    last = len(model.backbone.blocks) - 1
    blocks = sorted({0, min(1, last), (last + 1) // 2, last})
    prefixes = (*(f"{PREFIX}blocks.{index}." for index in blocks), f"{PREFIX}head")
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in linear if name.startswith(prefixes)]


def compared_tensors(model: VitClassifier) -> list[str]:
    """List the parameters whose gradients are compared."""
    layers = [f"{layer}.{kind}" for layer in compared_layers(model) for kind in ("weight", "bias")]
    parameters = dict(model.named_parameters())
    unknown = [names.UNKNOWN_EMBEDDING] if model.defended else []
    return [names.PATCH_WEIGHT, names.POSITION_EMBEDDING, *unknown, *(name for name in layers if name in parameters)]


def refusal(model: VitClassifier) -> str | None:
    """Say why the gradients of a model's candidates cannot be computed here; None if they can."""
    if not isinstance(getattr(model.backbone.patch_embed, "norm", None), nn.Identity):
        return "the patch embedding is more than one linear map of each patch"
    if model.index_embedding is not None:
        return "the model has an index embedding, whose gradient shows all tokens: patch_embedding is enough"
    return None


class Residuals:
    """The residuals of the candidates for one upload: called with their patches."""

    def __init__(
        self,
        factored: FactoredModel,
        targets: Mapping[str, Tensor],
        labels: Tensor,
        mask: Tensor,
        basis: Tensor,
        *,
        generator: torch.Generator,
        levels: Mapping[str, float] | None = None,
    ) -> None:
        """Sketch what was uploaded.

        Args:
            factored: The model with the weights of the upload, for ``compared_layers``.
            targets: The uploaded gradient of each of ``compared_tensors``, float64.
            labels: (pictures,) int64.
            mask: (patches,) bool, the same for all pictures.
            basis: (rank, values) float64, the directions that are open in a patch: only along them the gradient of the
                patch embedding says more than the facts.
            generator: Draws the sketches; on the CPU.
            levels: Relative distance of each target that counts as 1, where not all count alike.
        """
        self._labels, self._basis, self._levels = labels, basis, levels or {}
        self._masked = F.pad(mask, (factored.network(torch.float64).prefix_tokens, 0))[:, None]
        self._factored = factored
        self._sketches = {
            name: (_sketch(len(target), generator).to(target), _sketch(len(target.T), generator).to(target))
            for name, target in targets.items()
            if target.ndim == 2  # weights of linear layers
        }
        self._targets = {name: self._seen_of(name, target) for name, target in targets.items() if target.any()}

    def __call__(self, patches: Tensor) -> Tensor:
        """Compare candidates (pictures, patches, values), in the network's input space, float32 or float64.

        Returns:
            (residuals,), whose squared norm is the mean over tensors of the squared relative distance, by ``levels``.
        """
        gradients = self._gradients(patches, self._labels)
        return self._relative(
            {name: gradients[name] - target.to(patches.dtype) for name, target in self._targets.items()}
        )

    def share(self, patches: Tensor, number: int) -> Tensor:
        """Compute what a picture of the batch adds to the residuals, (residuals,), but for a constant.

        A batch's gradient is a sum, so the derivative by one picture needs no other.

        Args:
            patches: (1, patches, values) of the picture.
            number: Its place in the batch.
        """
        return self._relative(self._gradients(patches, self._labels[number : number + 1]))

    def _relative(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Divide what is compared of each tensor by the norm of its target and its level."""
        relative = [
            (tensors[name] / (self._levels.get(name, 1.0) * target.norm().to(tensors[name]))).flatten()
            for name, target in self._targets.items()
        ]
        return torch.cat(relative) / math.sqrt(len(relative))

    def _seen_of(self, name: str, target: Tensor) -> Tensor:
        """Return what is compared of an uploaded gradient."""
        if name == names.PATCH_WEIGHT:
            return target.flatten(1) @ self._basis.mT
        if name == names.POSITION_EMBEDDING:
            return target[0]
        if name in self._sketches:
            left_sketch, right_sketch = self._sketches[name]
            return left_sketch.mT @ target @ right_sketch
        return target

    def _gradients(self, patches: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the same of the gradients that candidates with these labels add to a batch's."""
        factors = self._factored(patches, labels, len(self._labels), self._positions(patches.dtype))
        gradients, at_tokens = self._of_layers(factors), factors.at_tokens
        gradients[names.POSITION_EMBEDDING] = at_tokens.sum(dim=0) * ~self._masked
        gradients[names.UNKNOWN_EMBEDDING] = (at_tokens * self._masked).sum(dim=(0, 1))
        at_patches = at_tokens[:, -patches.shape[1] :]
        along = patches @ self._basis.mT.to(patches.dtype)
        gradients[names.PATCH_WEIGHT] = at_patches.flatten(0, 1).mT @ along.flatten(0, 1)
        return gradients

    def _positions(self, dtype: torch.dtype) -> Tensor:
        """Return (1, tokens, dim), as the clients add them."""
        network = self._factored.network(dtype)
        positions = network.get_parameter(names.POSITION_EMBEDDING)
        if network.unknown_embedding is None:
            return positions
        return torch.where(self._masked, network.unknown_embedding, positions)

    def _of_layers(self, factors: Factors) -> dict[str, Tensor]:
        gradients = {}
        for name, rows in factors.outputs.items():
            left_sketch, right_sketch = (sketch.to(rows.dtype) for sketch in self._sketches[f"{name}.weight"])
            gradients[f"{name}.weight"] = (rows @ left_sketch).mT @ (factors.inputs[name] @ right_sketch)
            gradients[f"{name}.bias"] = rows.sum(dim=0)
        return gradients


def slopes_by_picture(residuals: Residuals, space: OpenSpace, unknowns: Tensor) -> Tensor:
    """Compute the Jacobian (unknowns, residuals) picture by picture: no picture's part needs another picture.

    Args:
        residuals: Of one upload.
        space: That is searched.
        unknowns: (pictures * those of one picture,).
    """

    def share(number: int, part: Tensor) -> Tensor:
        return residuals.share(space.patches(part), number)

    by_picture = unknowns.view(-1, space.root.shape[1])
    return torch.cat([jacobian(partial(share, number), part) for number, part in enumerate(by_picture)])


def _sketch(size: int, generator: torch.Generator) -> Tensor:
    """Draw (size, at most SKETCH) columns, which keep lengths on average; return all of a small matrix."""
    if size <= SKETCH:
        return torch.eye(size, dtype=torch.float64)
    return torch.randn(size, SKETCH, generator=generator, dtype=torch.float64) / math.sqrt(SKETCH)
