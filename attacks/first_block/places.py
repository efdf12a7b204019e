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
        """Read the embedding out of a model, in float64."""
        weight, bias, positions = (
            model.get_parameter(name).detach().double()
            for name in (names.PATCH_WEIGHT, names.PATCH_BIAS, names.POSITION_EMBEDDING)
        )
        prior = natural_inputs(model)
        return TokenEmbedding(centred(weight.flatten(1).mT).mT, centred(bias), centred(positions[0, 1:]), prior)

    @property
    def shows_all(self) -> bool:
        """Tell whether a token without its mean determines its patch."""
        singular = torch.linalg.svdvals(self.weight)
        return self.weight.shape[1] < self.weight.shape[0] and bool(singular[-1] > NEGLIGIBLE * singular[0])

    def by_prior(self, tokens: Tensor, model: VitClassifier) -> Tensor:
        """Find places (tokens,): where the offsets from positions make the most natural patches and picture.

        Args:
            tokens: (tokens, dim), less their means.
            model: With an image size that the prior knows.
        """
        root = torch.linalg.cholesky(self._covariance(tokens))

        def whitened(rows: Tensor) -> Tensor:
            solved: Tensor = torch.linalg.solve_triangular(root, rows.mT, upper=False)
            return solved.mT

        offsets = tokens - self.shift - self.weight @ self.prior.mean
        costs = torch.cdist(whitened(offsets), whitened(self.positions)).square().log()
        places = assigned(costs)
        settled = self.shows_all or len(tokens) < len(self.positions)
        return places if settled else self._swapped(tokens, places, costs, model)

    def _swapped(self, tokens: Tensor, places: Tensor, costs: Tensor, model: VitClassifier) -> Tensor:
        """Swap pairs of tokens, cheapest first, as long as the whole picture gets more natural."""
        prior = NaturalPictures.for_model(model)
        gain = torch.linalg.solve(self._covariance(tokens), self.weight @ self.prior.covariance)
        offset = self.shift + self.weight @ self.prior.mean

        def energy(candidate: Tensor) -> float:
            likely = in_place((tokens - offset - self.positions[candidate]) @ gain + self.prior.mean, candidate)
            image = from_patches(likely[None].float(), model.image_size, model.patch_size)[0]
            moved = image - prior.mean[:, None, None]
            fit = len(gain) * costs[torch.arange(len(candidate)), candidate].sum()
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
            swapped_energy, failed = energy(swapped), failed + 1
            if swapped_energy < least:
                places, least, failed = swapped, swapped_energy, 0
                tries = iter(_cheapest(costs[:, places], pairs))
        return places

    def _covariance(self, tokens: Tensor) -> Tensor:
        """Return (dim, dim) of tokens less their positions, from the prior of patches and errors."""
        covariance = self.weight @ self.prior.covariance @ self.weight.mT
        return covariance + (UNSURE**2 * tokens.square().mean()) * torch.eye(len(covariance)).to(covariance)

    def by_patches(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """Find places (tokens,) of tokens whose patches are known.

        Args:
            tokens: (tokens, dim), less their means.
            patches: (tokens, values).
        """
        return assigned(torch.cdist(tokens - self.shift - patches @ self.weight.mT, self.positions).square())

    def patches(self, tokens: Tensor, places: Tensor, model: VitClassifier) -> Tensor:
        """Solve for the patches (patches, values) behind tokens, in their places. The prior fills what no token shows.

        Args:
            tokens: (tokens, dim) in any order, less their means.
            places: (tokens,); places without a token are filled altogether.
            model: With an image size that the prior knows.
        """
        columns, singular, right = torch.linalg.svd(self.weight)
        rank = int((singular > NEGLIGIBLE * singular[0]).sum())
        stated = (tokens - self.shift - self.positions[places]) @ columns[:, :rank] / singular[:rank] @ right[:rank]
        placed = torch.zeros_like(stated[:1]).repeat(len(self.positions), 1)
        missing = torch.ones_like(placed[:, 0], dtype=torch.bool)
        placed[places], missing[places] = stated, False
        return fill(AffinePatches(placed, right[rank:]), missing, model)

    def shifts(self, directions: Tensor) -> Tensor:
        """Return (places, rank) by how much the patches of one and the same token differ from place to place.

        Args:
            directions: (rank, values) the directions along which they are measured.
        """
        inverse: Tensor = torch.linalg.pinv(self.weight @ directions.mT).mT
        return self.positions @ inverse

    def tokens(self, patches: Tensor) -> Tensor:
        """Embed patches in their places: (patches, dim) tokens, less their means.

        Args:
            patches: (patches, values) in the network's input space.
        """
        return centred(patches @ self.weight.mT) + self.shift + self.positions


def _cheapest(costs: Tensor, pairs: Tensor) -> Tensor:
    """Sort pairs (pairs, 2) by what a swap costs; ``costs`` (tokens, tokens) are of each in every other's place."""
    first, second = pairs.mT
    own_costs = costs.diagonal()
    swapped = costs[first, second] + costs[second, first] - own_costs[first] - own_costs[second]
    return pairs[swapped.argsort()]


def by_slopes(slopes: Tensor, rows: Tensor) -> Tensor:
    """Find places (tokens,) by the gradient of the position embedding, which has a row per place.

    Args:
        slopes: (tokens, dim), the loss's gradient at each token.
        rows: (patches, dim) of the position embedding's gradient.
    """
    return assigned(torch.cdist(slopes, rows) / (slopes.norm(dim=1)[:, None] + rows.norm(dim=1)))


def assigned(costs: Tensor) -> Tensor:
    """Assign each token a place of its own at the least sum of costs; return places (tokens,).

    Args:
        costs: (tokens, places).
    """
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 (takes a quarter of a second to import)

    _, places = linear_sum_assignment(costs.cpu().numpy())
    return torch.from_numpy(places).to(costs.device)


def in_place(rows: Tensor, places: Tensor) -> Tensor:
    """Sort rows into the places that they belong to.

    Args:
        rows: (tokens, values).
        places: (tokens,), each once.
    """
    ordered = torch.empty_like(rows)
    ordered[places] = rows
    return ordered


def fill(affine: AffinePatches, missing: Tensor, model: Entrance) -> Tensor:
    """Return the most natural picture (patches, values) where some patches are open altogether.

    The other patches are open along the basis alone, as for ``close``. The preconditioner solves these on a torus and
    each missing patch by itself.

    Args:
        affine: What is known of the patches; those that are not missing are open along its basis alone.
        missing: (patches,) bool, those that are open altogether.
        model: With an image size that the prior knows.
    """
    if not missing.any():
        return close(affine, model)
    prior = NaturalPictures.for_model(model)
    basis = affine.basis.float()
    strengths, axes = torch.linalg.eigh(prior.between_patches(model.patch_size, 0, 0).double())
    alone = ((axes / strengths.clamp(min=RIDGE * strengths[-1])) @ axes.mT).float()
    on_torus = solver_on_torus(prior, basis, model) if len(basis) else None

    def slope(patches: Tensor) -> Tensor:
        image = from_patches(patches[None], model.pixels, model.patch_size)[0]
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
