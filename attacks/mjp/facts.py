"""What one MJP upload states exactly about the private patches: the linear facts.

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

Facts 4 and 5 hold for the *clean* picture at the *true* places, because a masked patch stays among the
masked places. An upload of the clean picture under a mask says the same. A weight delta of several SGD
steps under one mask sums the steps' gradients and d_t, so everything holds for it too.

Without a mask M is 0, P is 0, and fact 4 is the whole picture: the equation of ``patch_embedding``.

Uploads are rounded, if nothing else. With noise of variance s^2 on every entry of G,

6. *The noise shows.* Q^T G has rank M. The singular values beyond the M-th are noise alone, and
   s^2 is their mean square. It covers all that disturbs the equation, errors in d_t as well.
7. *What it does to the span.* To first order, row k of B lies outside of the true span by a vector of
   expected square s^2 (p - M) / S_k^2, in random directions.
8. *What it does to the rest.* With D_u^+ the pseudo-inverse that solves fact 4, each value of (I - P) x_t
   has a variance of at least s^2 |row t of D_u^+|^2: up to some ten times that where the span is hardly
   seen. What is stated of masked patches has about s^2 / |Q^T d_t|^2, d_t taken to be as long as others'.
   Where noise drowns it, the mean under a prior of patches takes its place. A level is as blurred as the
   span that it comes from: where much of that leaks it is left out.
9. *The mask under noise.* Rows of masked places then hold noise alone, of a variance that the server is told:
   their mean square is below that of the others by many of its standard deviations (``attacks.mask``).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.base import on_device
from attacks.linear_systems import Gaussian, least_squares, posterior_mean
from attacks.mask import mask_refusal, read_mask
from attacks.natural_patches import NaturalPatches
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.entrance import Entrance
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

PLAIN = ThreatModel()
BLURRED = frozenset({"noisy", "rounded", "pruned", "signs", "reshaped"})  # marks under which no fact is exact
LEAKING = 1e-2  # share of a direction outside of the true span from which on levels do more harm than good


@dataclass(frozen=True)
class LinearFacts:
    """Facts 1 and 3 to 9 of one upload, in the network's input space.

    ``basis`` holds orthonormal rows B that span the masked patches, and of several pictures their differences: as many
    as these are, unless a patch has fewer values; with a ``contrast`` near the upload's rounding they are not to be
    trusted. Where no equation is left over to tell the noise by, ``leak`` and ``variance`` are infinite.
    """

    mask: Tensor  # (patches,) bool, True where the patch was masked
    basis: Tensor  # (rank, values) float64
    known: Tensor  # (patches, values) float64, (I - P) x_t in true places; zero where masked
    level: Tensor  # (values,) float64, l with x_t^T l = 1 for masked patches; zeros if there is none or noise blurs it
    contrast: float  # smallest singular value that counts over the largest; 1 if none is masked
    leak: Tensor  # (rank,) float64, expected square of what of each row of the basis lies outside the true span
    variance: Tensor  # (patches,) float64, of the error of each value of ``known``, to an order of magnitude


@dataclass(frozen=True)
class _Span:
    """Singular values and vectors of Q^T G, and the variance of the noise on each of its entries."""

    left: Tensor
    singular: Tensor
    basis: Tensor
    noise: float


def linear_facts(upload: Upload, model: Entrance, threat: ThreatModel = PLAIN) -> LinearFacts:
    """Read the facts out of an upload of one picture, or what ``attacks.mjp.batches`` has in their place of several.

    The model gives sizes and device alone; its weights may have moved since. ``refusal`` must be None. Under noise and
    the like fact 4 is read with a prior of patches.

    Raises:
        AttackFailedError: If every patch is masked, or it is in doubt which are.
    """
    prior = NaturalPatches.for_model(model).normalised(model) if threat.marks & BLURRED else None
    patch_gradient = on_device(upload, names.PATCH_WEIGHT, model).flatten(1)
    tokens = on_device(upload, names.POSITION_EMBEDDING, model)[0, model.prefix_tokens :]
    mask = read_mask(upload, model, threat)
    if mask.all():
        raise AttackFailedError("every patch is masked in an upload: it states none of them")
    visible = tokens[~mask]
    outside = torch.linalg.qr(visible.mT, mode="complete")[0][:, len(visible) :]  # what is orthogonal to all rows
    span = _span(outside.mT @ patch_gradient, upload.num_examples * len(mask) - len(visible))
    solver = least_squares(visible[None], torch.eye(visible.shape[1], dtype=visible.dtype, device=visible.device)[None])
    without_span = patch_gradient - (patch_gradient @ span.basis.mT) @ span.basis
    known = patch_gradient.new_zeros(len(mask), patch_gradient.shape[1])
    known[~mask] = solver[0] @ without_span if prior is None else _posterior(visible, without_span, span, prior)
    variance = (visible.square().mean() * outside.shape[1]).reciprocal().repeat(len(mask))
    variance[~mask] = solver[0].square().sum(dim=1)
    leak = span.noise * max(1, len(span.basis.mT) - len(span.basis)) / span.singular.square()
    sharp = bool(mask.any()) and float(leak.max()) < LEAKING
    return LinearFacts(
        mask=mask,
        basis=span.basis,
        known=known,
        level=_level(upload, model, outside, span) if sharp else torch.zeros_like(known[0]),
        contrast=float(span.singular[-1] / span.singular[0]) if len(span.singular) else 1.0,
        leak=leak,
        variance=span.noise * variance,
    )


def _posterior(visible: Tensor, without_span: Tensor, span: _Span, prior: Gaussian) -> Tensor:
    """Fact 4 under noise: the mean of (I - P) x_t if the patches are drawn from ``prior``."""
    outside = torch.eye(len(prior.mean), dtype=visible.dtype, device=visible.device) - span.basis.mT @ span.basis
    projected = Gaussian(outside @ prior.mean, outside @ prior.covariance @ outside)
    rounding = torch.finfo(torch.float32).eps / 2
    return posterior_mean(visible[None], without_span[None], projected, rounding).values[0] @ outside


def _span(hidden: Tensor, unseen: int) -> _Span:
    """Facts 3 and 6 of ``hidden`` = Q^T G."""
    # The singular vectors of a wide matrix by way of its QR: a third of the time.
    orthogonal, triangular = torch.linalg.qr(hidden.mT)
    values, singular, left = torch.linalg.svd(triangular, full_matrices=False)
    rank = min(unseen, len(singular))
    freedom = (hidden.shape[0] - rank) * (hidden.shape[1] - rank)
    # Where nothing is left over, as with as many patches as dimensions, nobody can tell what the noise is.
    # The smallest number keeps exactness from being divided by.
    beyond = float(singular[rank:].square().sum()) / freedom if freedom else math.inf
    basis = (orthogonal @ values[:, :rank]).mT.contiguous()
    return _Span(left[:rank].mT, singular[:rank], basis, max(beyond, torch.finfo(hidden.dtype).tiny))


def _level(upload: Upload, model: Entrance, outside: Tensor, span: _Span) -> Tensor:
    unknown = outside.mT @ on_device(upload, names.UNKNOWN_EMBEDDING, model)
    level: Tensor = span.basis.mT @ ((span.left.mT @ unknown) / span.singular)
    return level


def required_tensors(model: Entrance) -> list[str]:
    """Names of the tensors that ``linear_facts`` reads."""
    unknown = [names.UNKNOWN_EMBEDDING] if model.defended else []
    return [names.PATCH_WEIGHT, names.POSITION_EMBEDDING, *unknown]


def refusal(model: Entrance, threat: ThreatModel) -> str | None:
    """Say why no facts can be read from such uploads of one picture with this model; None if they can."""
    if not model.has_positions:
        return "the model has no position embedding, so that no upload shows the gradients at the tokens"
    patches = model.grid**2
    dimensions = model.get_parameter(names.POSITION_EMBEDDING).shape[-1]
    if patches > dimensions:
        return f"{patches} patches are more than the {dimensions} dimensions of a token: the equations do not suffice"
    return mask_refusal(model, threat)
