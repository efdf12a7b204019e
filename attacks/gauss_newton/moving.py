"""The factors of a candidate's gradients in a plain transformer, and how they change with the candidate.

Torch finds that by differentiating its backward pass, one elementary operation after another (``factors``,
``levenberg.jacobian``). Where derivatives are written out (``gradient_at_tokens``), a Jacobian takes half the time and
one slope three quarters (``fedmjp.benchmarks.performance.jacobian``). What is made of factors stays torch's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import jvp, vmap

from fedmjp.attacks.gauss_newton.factors import PREFIX, Factors
from fedmjp.attacks.gauss_newton.levenberg import CHUNK
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.attacks.gradient_at_tokens import NOTHING, SOFTMAX_BACKWARD, Layers, PlainTransformer
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier

Of = Callable[[Factors], Tensor]
Parts = tuple[dict[str, Tensor], dict[str, Tensor], Tensor]  # those of Factors


class PlainFactors:
    """The factors of candidates for one picture."""

    def __init__(self, networks: Mapping[torch.dtype, VitClassifier], layers: Sequence[str], target: Tensor) -> None:
        """Prepare for a plain transformer.

        Args:
            networks: That take patches, float32 and float64 (``FactoredModel.network``).
            layers: Of which factors are wanted.
            target: (1, classes) float64, what the loss compares with.
        """
        self._networks, self._layers, self._target = networks, layers, target
        self._plain = {dtype: PlainTransformer(network.backbone) for dtype, network in networks.items()}

    def __call__(self, patches: Tensor) -> Factors:
        """Compute the factors of a candidate (patches, values), float32 or float64; differentiable once."""
        at_tokens, *rows = _Rows.apply(self._tokens(patches[None]), self)
        inputs, outputs = (dict(zip(self._layers, (row[0] for row in rows[side::2]), strict=True)) for side in (0, 1))
        return Factors(inputs, outputs, at_tokens)

    def slopes(self, of: Of, space: OpenSpace, unknowns: Tensor) -> Tensor:
        """Differentiate a function of factors: (unknowns, results) float32, row i by unknown i.

        Args:
            of: The function.
            space: That the unknowns are of.
            unknowns: (unknowns,) of the candidate.
        """
        chunk = min(CHUNK[unknowns.device.type], len(unknowns))
        tokens = self._tokens(space.patches(unknowns.float()))
        moving, network = self.begun(tokens.expand(chunk, -1, -1).contiguous()), self._networks[torch.float32]
        parts = self._parts(moving, moving.at_tokens, 0)

        def along(moved: Parts) -> Tensor:
            slope: Tensor = jvp(lambda *parts: of(Factors(*parts)), parts, moved)[1]
            return slope

        rows = []
        for directions in space.directions(chunk):
            count = len(directions)
            embedded = F.linear(directions, network.backbone.patch_embed.weight)
            entering = F.pad(embedded, (0, 0, network.prefix_tokens, 0, 0, chunk - count))
            rows.append(vmap(along)(self._parts(moving, moving.along(entering), slice(count))))
        return torch.cat(rows)

    def begun(self, tokens: Tensor) -> "_Pass":
        """Run forward and back.

        Args:
            tokens: (candidates, tokens, dim), float32 or float64.
        """
        return _Pass(self._plain[tokens.dtype], tokens, self._target.to(tokens.dtype))

    def named(self, layers: Layers) -> list[tuple[str, tuple[Tensor, Tensor]]]:
        """Select the wanted layers, in their order, by the names that a run has for them."""
        names_of_run = (name.removeprefix(PREFIX) for name in self._layers)
        return [(name, layers[name]) for name in names_of_run]

    def _tokens(self, patches: Tensor) -> Tensor:
        """Embed (pictures, tokens, dim) what enters the first block."""
        network = self._networks[patches.dtype]
        first = network.get_parameter(names.CLASS_TOKEN).expand(len(patches), -1, -1)
        embedded = network.backbone.patch_embed(patches)
        return torch.cat([first, embedded], dim=1) + network.get_parameter(names.POSITION_EMBEDDING)

    def _parts(self, moving: "_Pass", at_tokens: Tensor, which: int | slice) -> Parts:
        """Return the parts of one direction, or of some."""
        pairs = {f"{PREFIX}{name}": pair for name, pair in self.named(moving.layers())}
        inputs, outputs = ({name: pair[side][which] for name, pair in pairs.items()} for side in (0, 1))
        return inputs, outputs, at_tokens[:, None][which]


class _Pass:
    """A run forward and back."""

    def __init__(self, plain: PlainTransformer, tokens: Tensor, target: Tensor) -> None:
        self._run = plain.run(tokens, keeps=True)
        self._probabilities = self._run.logits.softmax(dim=-1)
        self.at_tokens = self._run.back(self._probabilities - target)
        self.layers = self._run.layers

    def along(self, moved: Tensor, added: Layers = NOTHING) -> Tensor:
        """Compute how the gradient at the tokens changes with these, and with what is added layer by layer.

        Args:
            moved: How the tokens change.
            added: By layer.
        """
        logits = self._run.push(moved, added)
        change = SOFTMAX_BACKWARD(logits, self._probabilities, -1, logits.dtype)
        return self._run.pull(change, added)


class _Rows(torch.autograd.Function):
    """The gradient at the tokens, and of each layer what goes in and the slope at what comes out."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, moving: PlainFactors) -> tuple[Tensor, ...]:
        ctx.began = began = moving.begun(tokens)
        layers = moving.named(began.layers())
        ctx.names = [name for name, _ in layers]
        # What is given away is not what is kept, which would keep itself.
        return began.at_tokens.detach(), *(row.detach() for _, pair in layers for row in pair)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, at_tokens: Tensor, *slopes: Tensor) -> tuple[Tensor, None]:
        pairs = zip(slopes[::2], slopes[1::2], strict=True)
        return ctx.began.along(at_tokens, dict(zip(ctx.names, pairs, strict=True))), None
