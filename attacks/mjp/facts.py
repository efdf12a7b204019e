"""The linear facts: the exact statements of one MJP upload about the private patches.

Notation: n patches of p values; x_t is patch t of the clean picture, d_t the gradient of the loss at
its token. The patch embedding is linear, so its weight gradient is G = sum_t d_t x_t^T. MJP masks M
patches: it shuffles them among their places and gives all of them one shared position embedding.

1. *The mask.* Masked places do not use their own position embedding, so its gradient is zero there.
   The rows of the others are d_t. The shared embedding's gradient is d_unk, the sum of the masked d_t.
2. *The shuffle leaves no trace.* All masked tokens carry the same position embedding, so the network
   treats them as a set: shuffling them changes no tensor of the gradient. Sums over the masked
   patches are all that is said about them.
3. *The span.* Let Q be an orthonormal basis of the vectors orthogonal to every unmasked d_t. Then
   Q^T G = sum over masked t of (Q^T d_t) x_t^T. If the M vectors Q^T d_t are independent, the row space
   of Q^T G is the span of the masked patches; B (M, p) is its orthonormal basis, P = B^T B.
4. *Outside of it.* G (I - P) = sum over unmasked t of d_t ((I - P) x_t)^T is a linear system with as
   many unknowns as unmasked patches: (I - P) x_t is exact for these, and 0 for the masked ones.
5. *The level.* Q^T d_unk = sum over masked t of Q^T d_t. With the singular values Q^T G = U S B and
   l = B^T S^-1 U^T Q^T d_unk, every masked patch satisfies x_t^T l = 1: for the matrix A of the columns
   Q^T d_t and the masked patches X, Q^T G l = A X l = A 1, and A has full column rank.

   Visible patches have a level, too: G l = sum over unmasked t of d_t (x_t^T l) + d_unk is a linear system in
   x_t^T l. Where l is sharp, nothing is open along it.

Facts 4 and 5 hold for the *clean* picture at the *true* places, because a masked patch stays among the
masked places. An upload of the clean picture under a mask says the same. A weight delta of several SGD
steps under one mask sums the steps' gradients and d_t, so everything holds for it too.

Without a mask M is 0, P is 0, and fact 4 is the whole picture: the equation of ``patch_embedding``.

Uploads are rounded, if nothing else. With noise of variance s^2 on every entry of G,

6. *The noise shows.* Q^T G has rank M. The singular values beyond the M-th are noise alone, and
   s^2 is their mean square. It covers all that disturbs the equation, errors in d_t as well. Where masked patches
   repeat themselves, as in flat pictures and drawings, fewer than M singular values exceed what noise alone
   reaches: along the others the patches span nothing, and nothing is open. Their rounding repeats itself as well, so
   that it is no longer alike in all directions, and a gap between the singular values shows where it begins.
7. *What it does to the span.* To first order, row k of B lies outside of the true span by a vector of
   expected square s^2 (p - M) / S_k^2, in random directions.
8. *What it does to the rest.* With D_u^+ the pseudo-inverse that solves fact 4, each value of (I - P) x_t
   has a variance of at least s^2 |row t of D_u^+|^2: up to some ten times that where the span is hardly
   seen. The statement on masked patches has about s^2 / |Q^T d_t|^2, d_t taken to be as long as others'.
   Where noise drowns it, the mean under a prior of patches takes its place. A level is as blurred as the
   span that it comes from: where much of that leaks it is left out.
9. *The mask under noise.* Rows of masked places then hold noise alone, of a variance that the server is told:
   their mean square is below that of the others by many of its standard deviations (``fedmjp.attacks.mask``).
10. *As many patches as dimensions.* All that a patch token does passes through a LayerNorm, which takes no notice of
   the mean over the dimensions: every d_t is orthogonal to the vector of ones, and so is G, but for rounding. That
   tells the noise where nothing else is left over. But d dimensions are only d - 1 equations: with d patches, one
   direction b of the span stays unseen, and what fact 4 states errs by g b^T, with one number g_t for every patch.
   From one upload neither g nor b is known; of a picture without a mask g is, the null vector of the token gradients.
   Two uploads of one picture differ outside of the joint span by two such products, and by nothing else
   (``fedmjp.attacks.mjp.affine``).
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedmjp.attacks.base import on_device
from fedmjp.attacks.linear_systems import NEGLIGIBLE, GaussianPrior, least_squares, posterior_mean
from fedmjp.attacks.mask import mask_refusal, read_mask
from fedmjp.attacks.natural_patches import natural_inputs
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.entrance import Entrance, count_patches
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

PLAIN = ThreatModel()
BLURRED = frozenset({"noisy", "rounded", "pruned", "signs", "reshaped"})  # marks under which no fact is exact
LEAKING = 1e-2  # share of a direction outside of the true span from which on levels do more harm than good
LOUD = 4.0  # square of a singular value, of the largest that noise alone has, from which on it is none
FAINT = 0.1  # of the rounding of an entry: less is not seen but where rounding repeats itself
ACCUMULATED = 4.0  # times the rounding of an entry: what a sum over all tokens has
# Ratio of neighbouring singular values, the smaller one within rounding's reach, that patches which repeat themselves
# leave: 49 and more for print and a drawing on DeiT-S, 8.5 for another; natural pictures had 7.9 at most on DeiT-Ti.
GAP = 12.0
# Per token, of the square of an entry's rounding: less variance shows beyond the span if rounding hides in it. Natural
# pictures had 0.04 to 0.12 with 16, 64 and 196 tokens, dark and flat ones among them; drawings and print 0.03 at most
# where more than one direction hides.
QUIET = 1 / 32
MISSED = 100.0  # mean square of what a level leaves of d_unk, in units of the noise on G, from which on there is none


@dataclass(frozen=True)
class LinearFacts:
    """Facts 1 and 3 to 9 of one upload, in the network's input space.

    ``basis`` holds orthonormal rows B that span the masked patches, and of several pictures their differences: as many
    as these are, unless a patch has fewer values; with a ``contrast`` near the upload's rounding they are not to be
    trusted. ``open`` and ``stated`` are what the upload leaves open of every patch, and states, by all facts together.
    Where no equation is left over to tell the noise by, ``leak`` and ``covariance`` are infinite.
    """

    mask: Tensor  # (patches,) bool, True where the patch was masked
    basis: Tensor  # (rank, values) float64
    outside: Tensor  # (patches, values) float64, (I - P) x_t in true places; zero where masked
    level: Tensor  # (values,) float64, l with x_t^T l = 1 for masked patches; zeros if there is none or noise blurs it
    contrast: float  # smallest singular value that counts over the largest; 1 if none is masked
    open: Tensor  # (unknowns, values) float64, orthonormal rows: the part of the span that no fact speaks of
    stated: Tensor  # (patches, values) float64, the patches in their true places without their part along ``open``
    leak: Tensor  # (unknowns, loud) float64; |c^T leak|^2 is expected of c^T open to lie outside of the true span
    covariance: Tensor  # (patches, patches) float64, of the errors of a value of ``stated``, to an order of magnitude
    variance: Tensor  # (patches,) float64, the same of single patches, without what the span lets pass
    unexplained: Tensor  # (equations, values) float64, noise alone, whose mean square is that of G's noise
    errs: int = 0  # directions of the span that ``open`` lacks; in so many ``stated`` is wrong (fact 10)
    uneven: bool = False  # whether errors of ``stated`` may be far louder in some directions than in others


@dataclass(frozen=True)
class _Span:
    """Singular values and vectors of Q^T G, and the noise in it."""

    left: Tensor  # (equations, rank)
    singular: Tensor  # (rank,)
    basis: Tensor  # (rank, values)
    noise: float  # variance of the noise on each entry
    reach: float  # the largest square of a singular value that noise alone has
    unexplained: Tensor  # (equations, values), what is left beyond the rank
    repeats: bool  # whether rounding repeats itself, and hides in the span

    @property
    def loud(self) -> "_Span":
        """Leave out the singular values that noise alone may reach."""
        count = int((self.singular.square() > LOUD * self.reach).sum()) if math.isfinite(self.noise) else None
        return replace(self, left=self.left[:, :count], singular=self.singular[:count], basis=self.basis[:count])

    @property
    def leak(self) -> Tensor:
        """Return fact 7, (rank,)."""
        return self.noise * max(1, self.basis.shape[1] - len(self.basis)) / self.singular.square()


def linear_facts(upload: Upload, model: Entrance, threat: ThreatModel = PLAIN) -> LinearFacts:
    """Read the facts out of an upload of one picture; ``fedmjp.attacks.mjp.batches`` reads those of several.

    The model gives sizes and device alone; its weights may have moved since. ``refusal`` must be None. Under noise and
    the like fact 4 is read with a prior of patches.

    Args:
        upload: With the tensors that ``required_tensors`` names.
        model: States sizes and device.
        threat: States the defences.

    Raises:
        AttackFailedError: If every patch is masked, or it is in doubt which are.
    """
    prior = natural_inputs(model) if threat.marks & BLURRED else None
    patch_gradient = on_device(upload, names.PATCH_WEIGHT, model).flatten(1)
    tokens = on_device(upload, names.POSITION_EMBEDDING, model)[0, model.prefix_tokens :]
    mask = read_mask(upload, model, threat)
    if mask.all():
        raise AttackFailedError("every patch is masked in an upload: it states none of them")
    visible = tokens[~mask]
    equations = tokens.shape[1] - int(_without_mean(tokens))
    # What is orthogonal to all rows.
    outside = torch.linalg.qr(visible.mT, mode="complete")[0][:, min(len(visible), equations) :]
    hidden = outside.mT @ patch_gradient
    precision = torch.finfo(upload.tensors[names.PATCH_WEIGHT].dtype).eps / 2
    rounding = precision * float(patch_gradient.square().mean().sqrt())
    masked = upload.num_examples * len(mask) - len(visible)
    rank = min(masked, max(0, equations - len(visible)))
    span = _span(hidden, rank, rounding, quiet=QUIET * upload.num_examples * len(mask) * rounding**2)
    whole = torch.eye(visible.shape[1], dtype=visible.dtype, device=visible.device)
    solver = least_squares(visible[None], whole[None])[0]

    unknown = on_device(upload, names.UNKNOWN_EMBEDDING, model) if mask.any() else tokens.new_zeros(tokens.shape[1])

    def solve(open_: Tensor, level: Tensor) -> Tensor:
        """Facts 4 and 5 in place: the patches without their part along the rows of ``open_``."""
        square = level.square().sum()
        along = level / square if square else level
        remainder = patch_gradient - (patch_gradient @ open_.mT) @ open_ - torch.outer(unknown, along)
        patches = along.repeat(len(mask), 1)
        patches[~mask] = solver @ remainder if prior is None else _posterior(visible, remainder, open_, prior)
        return patches

    variance = (visible.square().mean() * outside.shape[1]).reciprocal().repeat(len(mask))
    variance[~mask] = solver.square().sum(dim=1)
    loud = span.loud
    noise = max(span.noise, (ACCUMULATED * precision) ** 2 * float(unknown.square().mean()))
    errs = max(0, upload.num_examples * len(mask) - equations)
    level, turn = _level(outside.mT @ unknown, loud, math.inf if errs else noise)
    open_ = turn @ loud.basis
    return LinearFacts(
        mask=mask,
        basis=span.basis,
        outside=solve(span.basis, torch.zeros_like(level)),
        level=level,
        contrast=float(span.singular[-1] / span.singular[0]) if len(span.singular) else 1.0,
        open=open_,
        stated=solve(open_, level),
        leak=(turn * loud.leak.sqrt()).nan_to_num(nan=0.0, posinf=math.inf),
        covariance=_covariance(mask, solver, solver @ (patch_gradient @ loud.basis.mT) / loud.singular, span.noise),
        variance=variance * span.noise,
        unexplained=span.unexplained,
        errs=errs,
        uneven=prior is not None or span.repeats,
    )


def _without_mean(tokens: Tensor) -> bool:
    """Say whether gradients at tokens (patches, dimensions) have nothing along the vector of ones (fact 10)."""
    return bool(tokens.sum(dim=1).norm() <= NEGLIGIBLE * tokens.shape[1] ** 0.5 * tokens.norm())


def _covariance(mask: Tensor, solver: Tensor, leaked: Tensor, noise: float) -> Tensor:
    """Return fact 8, (patches, patches): of the solution, and of what the span lets pass.

    Row k of B errs by noise over S_k, and takes that times the gradient along it into the equation. Nobody
    sees d_t of masked patches; it is taken to be as others'.
    """
    visible = solver @ solver.mT + leaked @ leaked.mT
    everywhere = torch.diag(visible.diagonal().mean().repeat(len(mask)))
    everywhere[torch.outer(~mask, ~mask)] = visible.flatten()
    return everywhere * noise if math.isfinite(noise) else torch.full_like(everywhere, math.inf)


def _posterior(visible: Tensor, right: Tensor, open_: Tensor, prior: GaussianPrior) -> Tensor:
    """Solve fact 4 under noise: the posterior mean of visible patches without their part along ``open_``."""
    outside = torch.eye(len(prior.mean), dtype=visible.dtype, device=visible.device) - open_.mT @ open_
    projected = GaussianPrior(outside @ prior.mean, outside @ prior.covariance @ outside)
    rounding = torch.finfo(torch.float32).eps / 2
    return posterior_mean(visible[None], right[None], projected, rounding).values[0] @ outside


def _span(hidden: Tensor, rank: int, rounding: float, quiet: float) -> _Span:
    """Find facts 3 and 6 of ``hidden`` = Q^T G.

    Where pixels repeat themselves, rounding does so, too. It then hides in the span instead of showing beyond it, and
    what ``rounding`` an entry has is all that is known. Then less than ``quiet`` is the variance of what is beyond.
    """
    # The singular vectors of a wide matrix by way of its QR: a third of the time.
    orthogonal, triangular = torch.linalg.qr(hidden.mT)
    values, singular, left_vectors = torch.linalg.svd(triangular, full_matrices=False)
    rank = min(rank, len(singular))
    freedom = (hidden.shape[0] - rank) * (hidden.shape[1] - rank)
    # Where nothing is left over, as with as many patches as dimensions, nobody can tell what the noise is.
    # The smallest number keeps exactness from being divided by.
    beyond = float(singular[rank:].square().sum()) / freedom if freedom else math.inf
    basis = (orthogonal @ values[:, :rank]).mT.contiguous()
    unexplained = singular[rank:, None] * (orthogonal @ values[:, rank:]).mT
    unexplained *= (len(unexplained) / max(1, len(hidden) - rank)) ** 0.5  # as if every equation were a row
    rows, columns = hidden.shape
    repeated = (ACCUMULATED * rounding) ** 2
    counted = singular[:rank]
    hides = counted[1:].square() <= LOUD * repeated * rows * columns
    gap = bool((hides & (counted[:-1] > GAP * counted[1:])).any()) and beyond < quiet
    repeats = gap or beyond < (FAINT * rounding) ** 2
    noise = repeated if repeats else beyond
    noise = max(noise, torch.finfo(hidden.dtype).tiny)
    reach = noise * (rows * columns if repeats else (rows**0.5 + columns**0.5) ** 2)
    return _Span(left_vectors[:rank].mT, singular[:rank], basis, noise, reach, unexplained, repeats)


def _level(unknown: Tensor, span: _Span, noise: float) -> tuple[Tensor, Tensor]:
    """Find fact 5 of ``unknown`` = Q^T d_unk, which has noise of that variance.

    It gives l (values,), and orthonormal rows (unknowns, rank) that turn B away from it.
    If there is no level, or noise blurs it, l is zero, and nothing is turned.
    """
    if math.isinf(noise):
        return span.basis.new_zeros(span.basis.shape[1]), torch.eye(len(span.basis)).to(span.basis)
    inside = span.left.mT @ unknown
    along = inside / span.singular
    missed = unknown - span.left @ inside
    square = along.square().sum()
    unclear = missed.square().sum() > MISSED * len(unknown) * noise
    if unclear or not square or float(along.square() @ span.leak) > LEAKING * square:
        return span.basis.new_zeros(span.basis.shape[1]), torch.eye(len(span.basis)).to(span.basis)
    turn = torch.linalg.qr(along[:, None], mode="complete")[0][:, 1:].mT
    return span.basis.mT @ along, turn


def required_tensors(model: Entrance) -> list[str]:
    """Name the tensors that ``linear_facts`` reads.

    Args:
        model: Defended or not.
    """
    unknown = [names.UNKNOWN_EMBEDDING] if model.defended else []
    return [names.PATCH_WEIGHT, names.POSITION_EMBEDDING, *unknown]


def refusal(model: Entrance, threat: ThreatModel) -> str | None:
    """Say why no facts can be read from such uploads of one picture with this model; None if they can.

    Args:
        model: States the sizes.
        threat: States the defences.
    """
    if not model.has_positions:
        return "the model has no position embedding, so that no upload shows the gradients at the tokens"
    patches = count_patches(model)
    dimensions = model.get_parameter(names.POSITION_EMBEDDING).shape[-1]
    if patches > dimensions:
        return f"{patches} patches are more than the {dimensions} dimensions of a token: the equations do not suffice"
    return mask_refusal(model, threat)
