"""Where the tokens belong that the first MLP states one by one, and with them the patches of one upload.

The gradients of the first MLP single out every token behind the first attention, masked or not, without any other fact
(``fedmjp.attacks.first_block``): each z_t + o_t, but for the scale and the shift that norm2 hides. Here z_t = s_t + Z
c_t with
few unknowns c_t, and o_t is nearly the same for all. So what of a token lies outside of Z tells its place: one of the
visible ones, the hole, where all masked ones are alike, or the class token's. Its coefficients follow by least squares,
and then the attention, from all of them.
"""

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedmjp.attacks.base import on_device
from fedmjp.attacks.first_block.block import FC1_WEIGHT, FC2_WEIGHT, linear_of
from fedmjp.attacks.first_block.equations import TokenEquations
from fedmjp.attacks.first_block.search import ROUNDS, STARTS, find_tokens
from fedmjp.attacks.first_block.tokens import centred
from fedmjp.attacks.mjp.span.equations import Attended, PatchEquations, PatchSet, attended
from fedmjp.attacks.mjp.span.free import coefficients_of
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload

DRY = 2  # rounds without a new token: what is left is nearly equal to others, and found better from these
MOST = 0.5  # of all tokens: with more of them a search begins there
PASSES = 3  # in which coefficients and attention follow from each other


def stated_tokens(
    upload: Upload, equations: PatchEquations, model: VitClassifier, until: float, generator: torch.Generator
) -> Tensor:
    """Find whitened tokens (tokens, dim) behind the first attention, in no order, before the time is up.

    Args:
        upload: Of one picture.
        equations: Of the upload.
        model: With the weights of the upload.
        until: Of ``time.thread_time()``.
        generator: On the CPU.
    """
    first, second = (on_device(upload, name, model) for name in (FC1_WEIGHT, FC2_WEIGHT))
    count = 1 + len(equations.mask)
    of_mlp = TokenEquations(equations.block, linear_of(model, "0.mlp.fc2"), first, second, count, until)
    return find_tokens(of_mlp, ROUNDS, STARTS, generator, dry_rounds=DRY)


def suffice(equations: PatchEquations, tokens: Tensor) -> bool:
    """Tell whether a search can begin at so many tokens: each proves itself, but attention needs most of them.

    Args:
        equations: Of the upload.
        tokens: (tokens, dim).
    """
    return len(tokens) > MOST * (1 + len(equations.mask))


@dataclass(frozen=True)
class PlacedPatches:
    """Tokens in their places."""

    known: PatchSet  # visible patches that have a token, and masked ones
    rows: Tensor  # (visible with a token,) which these are of ``Equations.visible``
    attended: Attended  # what these patches make of the attention


def settle(equations: PatchEquations, whitened: Tensor) -> PlacedPatches:
    """Solve for the patches of tokens, each in a place of its own.

    Args:
        equations: Of the upload.
        whitened: (tokens, dim).
    """
    visible, hidden, hole = equations.visible, equations.unknowns, equations.hole[:1]
    mean = equations.mean_attention / equations.shares.sum()
    costs = _costs(equations, whitened, mean)
    costs = torch.cat([costs[:, :-2], costs[:, -2:-1].expand(-1, hidden), costs[:, -1:]], dim=1)
    tokens, slots = (torch.from_numpy(places) for places in linear_sum_assignment(costs.cpu().numpy()))
    is_visible, masked = slots < len(visible), (slots >= len(visible)) & (slots < len(visible) + hidden)
    rows = slots[is_visible].to(visible.device)
    placed_tokens = whitened[torch.cat([tokens[is_visible], tokens[masked]]).to(whitened.device)]
    places = torch.cat([visible[rows], hole.expand(int(masked.sum()))])
    coefficients = coefficients_of(equations, places, placed_tokens, mean.expand(len(placed_tokens), -1))
    for _ in range(PASSES):
        patches = PatchSet(visible[rows], coefficients[: len(rows)], coefficients[len(rows) :])
        with_attention, entering = attended(equations, patches), equations.tokens(coefficients, places)
        coefficients = coefficients_of(equations, places, placed_tokens, with_attention(entering) - entering)
    patches = patches.moved(coefficients)
    return PlacedPatches(patches, rows, attended(equations, patches))


def _costs(equations: PatchEquations, whitened: Tensor, attention: Tensor) -> Tensor:
    """Return (tokens, visible + 2) log distances of tokens from each visible place, the hole and the class token.

    The squared distance of z + o from the multiples of the token, outside of what coefficients and a shift reach.
    """
    starts = torch.cat([equations.start[equations.visible], equations.start[equations.hole[:1]]]) + attention
    constant = torch.ones_like(attention)[:, None]
    reached, _ = torch.linalg.qr(torch.cat([equations.directions, constant], dim=1))
    starts, outside = (rows - rows @ reached @ reached.mT for rows in (starts, whitened))
    class_token, whole = centred(equations.class_token + attention), centred(whitened)
    squares = torch.cat([_apart(outside, starts), _apart(whole, class_token)], dim=1)
    return squares.clamp(min=torch.finfo(squares.dtype).tiny).log()


def _apart(rows: Tensor, points: Tensor) -> Tensor:
    """Return (rows, points) squared distances of points from the lines along the rows."""
    shadows = (rows @ points.mT).square() / rows.square().sum(dim=1, keepdim=True)
    return points.square().sum(dim=1) - shadows
