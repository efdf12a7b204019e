"""Which token stands where, and what patches are behind tokens.

A token is z = E x + b + e, with e the position embedding of its place. The server knows E, b and all e.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.attacks.first_block.tokens import centred
from fedmjp.attacks.linear_systems import NEGLIGIBLE, GaussianPrior
from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.attacks.mjp.closing import close, conjugate_gradients, solver_on_torus
from fedmjp.attacks.natural_patches import natural_inputs
from fedmjp.attacks.natural_pictures import NaturalPictures
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.entrance import Entrance
from fedmjp.patches import from_patches, to_patches

RIDGE = 1e-6  # of the largest strength: the preconditioner of a whole patch need not resolve less
UNSURE = 3e-3  # of a token's values: errors that the places must bear
WIDTH, SWAPS = 160, 1500  # pairs that are tried before the order counts as settled, and in all


@dataclass(frozen=True)
class TokenEmbedding:
    """How patches become tokens, less what LayerNorms do not see: means over the dimensions."""

    weight: Tensor  # (dim, values)
    shift: Tensor  # (dim,)
    positions: Tensor  # (patches, dim)
    prior: GaussianPrior

    @staticmethod
    def of(model: VitClassifier) -> "TokenEmbedding":
        """Read it out of a model, in float64."""
        weight, bias, positions = (
            model.get_parameter(name).detach().double()
            for name in (names.PATCH_WEIGHT, names.PATCH_BIAS, names.POSITION_EMBEDDING)
        )
        prior = natural_inputs(model)
        return TokenEmbedding(centred(weight.flatten(1).mT).mT, centred(bias), centred(positions[0, 1:]), prior)

    @property
    def shows_all(self) -> bool:
        """Whether a token without its mean determines its patch."""
        singular = torch.linalg.svdvals(self.weight)
        return self.weight.shape[1] < self.weight.shape[0] and bool(singular[-1] > NEGLIGIBLE * singular[0])

    def by_prior(self, tokens: Tensor, model: VitClassifier) -> Tensor:
        """Places (tokens,) of tokens (tokens, dim): where what is left makes the most natural patches and picture."""
        root = torch.linalg.cholesky(self._covariance(tokens))

        def whitened(rows: Tensor) -> Tensor:
            solved: Tensor = torch.linalg.solve_triangular(root, rows.mT, upper=False)
            return solved.mT

        left = tokens - self.shift - self.weight @ self.prior.mean
        costs = torch.cdist(whitened(left), whitened(self.positions)).square().log()
        places = assigned(costs)
        settled = self.shows_all or len(tokens) < len(self.positions)
        return places if settled else self._swapped(tokens, places, costs, model)

    def _swapped(self, tokens: Tensor, places: Tensor, costs: Tensor, model: VitClassifier) -> Tensor:
        """Swap two tokens, those first that cost least, as long as the whole picture gets more natural by it."""
        prior = NaturalPictures.for_model(model)
        gain = torch.linalg.solve(self._covariance(tokens), self.weight @ self.prior.covariance)
        offset = self.shift + self.weight @ self.prior.mean

        def energy(tried: Tensor) -> float:
            likely = in_place((tokens - offset - self.positions[tried]) @ gain + self.prior.mean, tried)
            image = from_patches(likely[None].float(), model.image_size, model.patch_size)[0]
            moved = image - prior.mean[:, None, None]
            fit = len(gain) * costs[torch.arange(len(tried)), tried].sum()
            return float((moved * prior.slope(moved)).sum() + fit)

        least, failed = energy(places), 0
        pairs = torch.triu_indices(len(places), len(places), 1, device=places.device).mT
        tries = iter(_cheapest(costs[:, places], pairs))
        for _ in range(SWAPS):
            pair = next(tries, None)
            if pair is None or failed == WIDTH:
                break
            swapped = places.clone()
            swapped[pair] = places[pair.flip(0)]
            made, failed = energy(swapped), failed + 1
            if made < least:
                places, least, failed = swapped, made, 0
                tries = iter(_cheapest(costs[:, places], pairs))
        return places

    def _covariance(self, tokens: Tensor) -> Tensor:
        """(dim, dim) of tokens less their positions, as patches of the prior and errors make them."""
        covariance = self.weight @ self.prior.covariance @ self.weight.mT
        return covariance + (UNSURE**2 * tokens.square().mean()) * torch.eye(len(covariance)).to(covariance)

    def by_patches(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """Places of tokens whose patches (tokens, values) are known."""
        return assigned(torch.cdist(tokens - self.shift - patches @ self.weight.mT, self.positions).square())

    def patches(self, tokens: Tensor, places: Tensor, model: VitClassifier) -> Tensor:
        """Patches (patches, values) behind tokens in any order, in their places; the prior fills what is not seen.

        Places that no token has are filled altogether.
        """
        left, singular, right = torch.linalg.svd(self.weight)
        seen = int((singular > NEGLIGIBLE * singular[0]).sum())
        stated = (tokens - self.shift - self.positions[places]) @ left[:, :seen] / singular[:seen] @ right[:seen]
        known = torch.zeros_like(stated[:1]).repeat(len(self.positions), 1)
        missing = torch.ones_like(known[:, 0], dtype=torch.bool)
        known[places], missing[places] = stated, False
        return fill(AffinePatches(known, right[seen:]), missing, model)

    def shifts(self, shown: Tensor) -> Tensor:
        """(places, rank) by which patches along directions (rank, values) differ whose token is the same."""
        inverse: Tensor = torch.linalg.pinv(self.weight @ shown.mT).mT
        return self.positions @ inverse

    def tokens(self, patches: Tensor) -> Tensor:
        """(patches, dim) that patches (patches, values) become in their places, less their means."""
        return centred(patches @ self.weight.mT) + self.shift + self.positions


def _cheapest(costs: Tensor, pairs: Tensor) -> Tensor:
    """Pairs (pairs, 2) by what it costs to swap them; ``costs`` (tokens, tokens) of one in the place of the other."""
    first, second = pairs.mT
    own_costs = costs.diagonal()
    swapped = costs[first, second] + costs[second, first] - own_costs[first] - own_costs[second]
    return pairs[swapped.argsort()]


def by_slopes(slopes: Tensor, rows: Tensor) -> Tensor:
    """Places of tokens with slopes (tokens, dim), where the position embedding has the gradients (patches, dim)."""
    return assigned(torch.cdist(slopes, rows) / (slopes.norm(dim=1)[:, None] + rows.norm(dim=1)))


def assigned(costs: Tensor) -> Tensor:
    """(tokens,) places, each once, of the least sum of costs (tokens, places)."""
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 (takes a quarter of a second to import)

    _, places = linear_sum_assignment(costs.cpu().numpy())
    return torch.from_numpy(places).to(costs.device)


def in_place(rows: Tensor, places: Tensor) -> Tensor:
    """Rows (tokens, values) in the order of the places that they belong to."""
    ordered = torch.empty_like(rows)
    ordered[places] = rows
    return ordered


def fill(affine: AffinePatches, missing: Tensor, model: Entrance) -> Tensor:
    """The most natural picture (patches, values) of which patches ``missing`` (patches,) bool are open altogether.

    The other patches are open along the basis alone, as for ``close``. The preconditioner solves these on a torus and
    each missing patch by itself.
    """
    if not missing.any():
        return close(affine, model)
    prior = NaturalPictures.for_model(model)
    basis = affine.basis.float()
    strengths, axes = torch.linalg.eigh(prior.between_patches(model.patch_size, 0, 0).double())
    alone = ((axes / strengths.clamp(min=RIDGE * strengths[-1])) @ axes.mT).float()
    on_torus = solver_on_torus(prior, basis, model) if len(basis) else None

    def slope(patches: Tensor) -> Tensor:
        image = from_patches(patches[None], model.image_size, model.patch_size)[0]
        return open_part(to_patches(prior.slope(image)[None], model.patch_size)[0])

    def open_part(patches: Tensor) -> Tensor:
        return torch.where(missing[:, None], patches, patches @ basis.mT @ basis)

    def precondition(residual: Tensor) -> Tensor:
        solved = torch.zeros_like(residual)
        if on_torus is not None:
            solved = open_part(on_torus(torch.where(missing[:, None], 0, residual) @ basis.mT) @ basis)
        solved[missing] = residual[missing] @ alone
        return solved

    mean = prior.mean.repeat_interleave(model.patch_size**2)
    start = torch.where(missing[:, None], mean, affine.fixed.float())
    return (start + conjugate_gradients(slope, -slope(start - mean), precondition)).double()
