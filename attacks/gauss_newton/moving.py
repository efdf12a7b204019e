"""How the gradients of a candidate change with the candidate: the Jacobian of what is made of their factors.

Torch finds it by differentiating its backward pass, one elementary operation after another (``levenberg.jacobian``). Of
a plain transformer the derivatives are written out (``gradient_at_tokens``), which takes a third of the time. What is
made of factors is little beside that, and torch's.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp, vmap

from attacks.gauss_newton.factors import PREFIX, Factors
from attacks.gauss_newton.levenberg import CHUNK
from attacks.gauss_newton.space import OpenSpace
from attacks.gradient_at_tokens import SOFTMAX_BACKWARD, PlainTransformer, Run
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier

Of = Callable[[Factors], Tensor]
Parts = tuple[dict[str, Tensor], dict[str, Tensor], Tensor]  # those of Factors


class Moving:
    """The factors of one candidate, and how they move with it along many directions."""

    def __init__(self, network: VitClassifier, layers: Sequence[str], target: Tensor) -> None:
        """Of a plain transformer.

        Args:
            network: That takes patches, float32 (``Factored.network``).
            layers: Of which factors are wanted.
            target: (1, classes), what the loss compares with.
        """
        self._network, self._plain = network, PlainTransformer(network.backbone)
        self._layers, self._target = layers, target

    def slopes(self, of: Of, space: OpenSpace, unknowns: Tensor) -> Tensor:
        """(unknowns, results) float32: row i is the derivative of a function of factors by unknown i."""
        chunk = min(CHUNK[unknowns.device.type], len(unknowns))
        tokens = self._tokens(space.patches(unknowns.float()))
        run = self._plain.run(tokens.expand(chunk, -1, -1).contiguous(), keeps=True)
        probabilities = run.logits.softmax(dim=-1)
        here = self._parts(run, run.back(probabilities - self._target), 0)

        def along(moved: Parts) -> Tensor:
            slope: Tensor = jvp(lambda *parts: of(Factors(*parts)), here, moved)[1]
            return slope

        made = []
        for directions in space.directions(chunk):
            count = len(directions)
            embedded = F.linear(directions, self._network.backbone.patch_embed.weight)
            moved = F.pad(embedded, (0, 0, self._network.prefix_tokens, 0, 0, chunk - count))
            change = SOFTMAX_BACKWARD(run.push(moved), probabilities, -1, probabilities.dtype)
            made.append(vmap(along)(self._parts(run, run.pull(change), slice(count))))
        return torch.cat(made)

    def _tokens(self, patches: Tensor) -> Tensor:
        """(pictures, tokens, dim), what enters the first block."""
        embedded = self._network.backbone.patch_embed(patches)
        first = self._network.get_parameter(names.CLASS_TOKEN).expand(len(patches), -1, -1)
        return torch.cat([first, embedded], dim=1) + self._network.get_parameter(names.POSITION_EMBEDDING)

    def _parts(self, run: Run, at_tokens: Tensor, which: int | slice) -> Parts:
        """What is in a run, of one direction or of some."""
        pairs = {name: pair for place, pair in run.layers().items() if (name := f"{PREFIX}{place}") in self._layers}
        inputs, outputs = ({name: pair[side][which] for name, pair in pairs.items()} for side in (0, 1))
        return inputs, outputs, at_tokens[:, None][which]
