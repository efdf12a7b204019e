"""Several pictures of one upload, near enough to begin a search there: from the tokens that the first MLP states.

The gradients of the first MLP single out every token behind the first attention, of whichever picture, as a set
(``fedmjp.attacks.first_block``). Linear algebra sorts the set:

- By place. The linear facts leave the patches of a place open along few directions, and so the token of each picture
  there. A token that lies in that space has that place; the class token, which is known, has its own.
- By picture. The class token of picture b takes home o_b = sum_t a_t v_t from the tokens of that picture. Its query is
  known, and so the weight w_t of every token before the softmax divides: sum_t w_t (v_t - o_b) = 0. These equations are
  linear in which tokens belong to the picture, and are as many as the dimensions of a token.
- By refinement. Tokens that were missed are then found, and the others told better, picture by picture
  (``PlaceEquations``).
- By label. The head's gradient is V^T F with the features F of the pictures, which the network computes, and V shows
  each picture's label.

The refinement searches one picture's tokens at once, on the equations of the first block alone. Loud tokens that are
nearly alike, as of a bright sky, are zeros of the first MLP's equations that lie in one valley, and a search among all
tokens may miss them. But the token of a place enters the block as z = s + Z^T c with few unknowns c, and attention
carries it into every other token of its picture. Together the tokens of a picture have many more equations than
unknowns, and no other picture is in them.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.func import jvp, vmap

from fedmjp.attacks.first_block import block
from fedmjp.attacks.first_block.block import FC1_WEIGHT, FC2_WEIGHT
from fedmjp.attacks.first_block.equations import TokenEquations
from fedmjp.attacks.first_block.search import ROUNDS, STARTS, TRUE, search
from fedmjp.attacks.first_block.tokens import EnteringTokens, centred, class_token, entering
from fedmjp.attacks.gauss_newton.levenberg import StoppingRule, minimise
from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.attacks.mjp.closing import close
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import from_patches


def states_tokens(model: VitClassifier, pictures: int) -> bool:
    """Tell whether gradients of so many pictures state their tokens: fewer than dimensions, in a known block.

    Args:
        model: The model.
        pictures: How many.
    """
    dimensions = model.get_parameter(names.POSITION_EMBEDDING).shape[-1]
    return pictures * (1 + model.grid**2) < dimensions and block.refusal(model) is None


@torch.no_grad()
def by_tokens(
    gradients: Mapping[str, Tensor],
    affine: AffinePatches,
    labels: Sequence[int],
    model: VitClassifier,
    generator: torch.Generator,
) -> Tensor | None:
    """Solve for pictures (pictures, patches, values) float64 in the order of the labels, in the network's input space.

    Args:
        gradients: Of the mean loss, float64: the first block's and the head's.
        affine: What the linear facts leave open of every picture.
        labels: Of the pictures.
        model: To which ``states_tokens`` applies.
        generator: Of the points that the search for tokens starts from, on the CPU.

    Returns:
        None where nothing is open, or where what was met are no different tokens. No promise is made of the others:
        where tokens were missed, or noise moved them, the pictures are wrong.
    """
    if not len(affine.basis):
        return None
    first, fc2, count = block.first_block(model), block.linear_of(model, "0.mlp.fc2"), 1 + model.grid**2
    equations = TokenEquations(first, fc2, gradients[FC1_WEIGHT], gradients[FC2_WEIGHT], len(labels) * count)
    try:
        behind = search(equations, ROUNDS, STARTS, generator)
        solved = entering(model, gradients, behind.whitened)
        if not bool(solved.tokens.isfinite().all() & solved.attended.isfinite().all()):
            return None
        sorted_ = TokenSorter(affine, model)
        members = sorted_.members(solved, sorted_.places(solved.tokens, len(labels)))
        natural = (close(affine, model) - affine.fixed) @ affine.basis.mT
        along = torch.where((members < behind.proven)[..., None], sorted_.along(solved, members), natural)
        places = PlaceEquations(equations, class_token(model), sorted_.still, sorted_.moves)
        refined = torch.stack([places.refined(unknowns) for unknowns in along])
        patches = affine.fixed + refined @ affine.basis
        return patches[_order(patches, gradients[names.HEAD_WEIGHT], labels, model)]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # two rows are one: no solution
        return None


class TokenSorter:
    """Puts tokens into their places and pictures."""

    def __init__(self, affine: AffinePatches, model: VitClassifier) -> None:
        weight, bias, positions = (
            model.get_parameter(name).detach().double()
            for name in (names.PATCH_WEIGHT, names.PATCH_BIAS, names.POSITION_EMBEDDING)
        )
        weight = weight.flatten(1)
        self._block, self._class_token = block.first_block(model), class_token(model)
        self.still = centred(affine.fixed @ weight.mT + bias + positions[0, 1:])  # (patches, dim) tokens of ``known``
        self.moves = centred(affine.basis @ weight.mT)  # (rank, dim)

    def places(self, tokens: Tensor, pictures: int) -> Tensor:
        """Find which tokens stand in each place: (1 + patches, pictures), the class token's first, in no order.

        Args:
            tokens: (tokens, dim) that enter the block.
            pictures: How many.
        """
        inside = torch.linalg.qr(self.moves.mT).Q
        still = torch.cat([centred(self._class_token)[None], self.still])
        offsets = tokens[:, None] - still
        offsets[:, 1:] -= offsets[:, 1:] @ inside @ inside.mT
        costs = offsets.square().mean(-1).clamp_min(torch.finfo(offsets.dtype).tiny).log()
        _, places = linear_sum_assignment(costs.repeat_interleave(pictures, 1).cpu().numpy())
        rows: Tensor = torch.from_numpy(places).to(tokens.device).argsort().view(-1, pictures)
        return rows

    def along(self, solved: EnteringTokens, members: Tensor) -> Tensor:
        """Project tokens onto the moves: (pictures, patches, rank).

        Args:
            solved: All tokens.
            members: (pictures, patches), the tokens of each picture.
        """
        offsets = (solved.tokens[members] - self.still).flatten(0, 1)
        along: Tensor = torch.linalg.lstsq(self.moves.mT, offsets.mT).solution.mT.view(*members.shape, -1)
        return along

    def members(self, solved: EnteringTokens, places: Tensor) -> Tensor:
        """Find the tokens (pictures, patches) that the class token of each picture attends to.

        Args:
            solved: All tokens.
            places: (1 + patches, pictures), which tokens stand in each place.
        """
        class_tokens, candidates = places[0], places[1:].flatten()
        tokens = torch.cat([self._class_token[None], solved.tokens[candidates]])
        keys, values = self._block.keys_values(tokens)
        weights = self._weights(keys)
        patches, pictures = places[1:].shape
        share = torch.eye(patches).to(tokens).repeat_interleave(pictures, 1)  # of each place, one token
        belonging = []
        for home in solved.attended[class_tokens].view(pictures, len(keys), 1, -1):
            terms = (weights[..., None] * (values - home)).transpose(0, 1).flatten(1)  # (1 + candidates, dim)
            size = terms.norm(dim=1).mean()
            matrix = torch.cat([terms[1:].mT / size, share])
            right = torch.cat([-terms[0] / size, share.new_ones(patches)])
            belonging.append(torch.linalg.lstsq(matrix, right[:, None]).solution.view(patches, pictures))
        pictures_of = [_assigned(-rows) for rows in torch.stack(belonging, -1)]
        return torch.stack([place[rows.argsort()] for place, rows in zip(places[1:], pictures_of, strict=True)], 1)

    def _weights(self, keys: Tensor) -> Tensor:
        """Return (heads, tokens) how much the class token attends to each, but for what the softmax divides by."""
        first = self._block
        dim = len(self._class_token)
        query = first.norm1(self._class_token[None]) @ first.qkv.weight[:dim].T + first.qkv.bias[:dim]
        logits = (keys @ query.view(len(keys), -1, 1))[..., 0] / keys.shape[-1] ** 0.5
        weights: Tensor = (logits - logits.amax(1, keepdim=True)).exp()
        return weights


def _order(patches: Tensor, gradient: Tensor, labels: Sequence[int], model: VitClassifier) -> Tensor:
    """Find which picture has each label, (pictures,), by the gradient of the head's weight."""
    backbone: Any = copy.deepcopy(model.backbone).double()
    images = from_patches(patches, model.image_size, model.patch_size)
    features = backbone.forward_head(backbone.forward_features(images), pre_logits=True)
    slopes = torch.linalg.lstsq(features.mT, gradient.mT).solution
    targets = backbone.head(features).softmax(1) - len(labels) * slopes
    return _assigned(-targets[:, list(labels)].mT)


def _assigned(costs: Tensor) -> Tensor:
    """Return (rows,) columns, each once, of the least sum of costs."""
    _, columns = linear_sum_assignment(costs.cpu().numpy())
    return torch.from_numpy(columns).to(costs.device)


STEPS = 15
CHUNK = 64  # directions that are differentiated at a time


@dataclass(frozen=True)
class PlaceEquations:
    """What the linear facts leave open of the tokens that enter the first block."""

    equations: TokenEquations
    class_token: Tensor  # (dim,) with its position
    still: Tensor  # (patches, dim), s
    moves: Tensor  # (rank, dim), Z

    def refined(self, along: Tensor) -> Tensor:
        """Refine the unknowns of a picture; they stay as they are where the equations explain them.

        Args:
            along: C (patches, rank), near the picture.
        """
        weights = self._weights(along)
        errors = weights[:, None] * self._remainders(along)
        if bool((errors.square().sum(1) <= TRUE**2).all()):
            return along

        def function(unknowns: Tensor) -> Tensor:
            return (weights[:, None] * self._remainders(unknowns.view_as(along))).flatten()

        def slopes(unknowns: Tensor) -> Tensor:
            whole = torch.eye(len(unknowns)).to(unknowns)
            parts = [
                vmap(lambda one: jvp(function, (unknowns,), (one,))[1])(some) for some in torch.split(whole, CHUNK)
            ]
            return torch.cat(parts)

        ended = minimise(
            function, along.flatten(), steps=STEPS, slopes=slopes, ends=StoppingRule(enough=float(len(along)))
        )
        return ended.point.view_as(along)

    def _behind(self, along: Tensor) -> Tensor:
        """Return (patches, dim) whitened tokens behind the attention."""
        first = self.equations.block
        whole = torch.cat([self.class_token[None], self.still + along @ self.moves])
        behind = whole + first.attention(whole, first.keys_values(whole))
        return first.norm2.whiten(behind[1:])[0]

    def _remainders(self, along: Tensor) -> Tensor:
        """Return (patches, equations), zero for true tokens."""
        return self.equations.at(self._behind(along)).remainders

    def _weights(self, along: Tensor) -> Tensor:
        """Return (patches,) one over the length that rounding leaves of each token's equations."""
        return self.equations.expected(self.equations.at(self._behind(along))).rsqrt()
