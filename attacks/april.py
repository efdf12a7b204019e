"""The closed form of APRIL, on the architecture that it needs."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedmjp.attacks.base import on_device
from fedmjp.attacks.closed_form import ClosedForm, Oracle, Solution, System, stacked
from fedmjp.attacks.linear_systems import GaussianPrior, minimum_norm, posterior_mean
from fedmjp.attacks.natural_patches import natural_inputs, prior_refusal
from fedmjp.models import names
from fedmjp.models.april import AprilBlock
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

_REQUIRES = "an *_april model (first block without first norm and residuals); one picture per update"


class AprilMinNorm(ClosedForm):
    """Solve A^T Z = W_q^T dW_q + W_k^T dW_k + W_v^T dW_v for the tokens Z, then invert the embedding.

    A (tokens, dim) is the gradient of the position embedding. It holds for a first block without
    first norm and residuals. The tokens minus their position embedding are the embedded patches;
    the patch embedding (dim x 3 * patch ** 2) is inverted with minimum norm, so where it has fewer
    rows than columns (DeiT-S: 384 x 768) only the part of a patch in its row space comes back.

    This is the published attack and gives what breaching gives. ``april`` is the stronger one. A delta of one
    SGD step scales both sides alike; after several, W has changed. On an MJP upload it is naive in the same way
    as ``patch_embedding``.

    References:
        Lu et al., "APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers", CVPR 2022,
        section 3; same equations and solver as breaching 0.1.2, ``AprilAttacker.closed_form_april``.
    """

    name = "april_min_norm"
    paper = "Lu et al., APRIL, CVPR 2022"
    summary = "APRIL's closed form as published: minimum-norm solutions, equal to breaching's april_analytic"
    requires = _REQUIRES
    exploits = "the position embedding's gradient shows the gradient at every token, which the first attention read"
    right_side = names.FIRST_QKV_WEIGHT

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Refuse all but the APRIL architecture and one gradient of a single picture."""
        if general := super().requirement(model, threat):
            return general
        if not isinstance(model.backbone.blocks[0], AprilBlock):
            return "needs a first block without first norm and residuals; take the model's _april variant"
        if threat.local_steps > 1:
            return f"needs one gradient step: the weights in its equation change over {threat.local_steps} steps"
        if threat.batch_size != 1:
            return "needs the update of a single picture: tokens of several only show their sum"
        return None

    def _system(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> System:
        tokens = self._seen(upload, model, threat)
        # Query, key and value weights are stacked, so that one product is the sum of the three.
        right = _weight(model, names.FIRST_QKV_WEIGHT).T @ on_device(upload, names.FIRST_QKV_WEIGHT, model)
        rows = torch.cat([tokens.prefix, tokens.patches, tokens.unknown])
        return System(tokens, rows, right, {"masked_patches": float(tokens.mask.sum())})

    def _solve(self, systems: Sequence[System], model: VitClassifier, rounding: float) -> list[Solution]:
        del rounding
        embedding, bias = _weight(model, names.PATCH_WEIGHT).flatten(1), _weight(model, names.PATCH_BIAS)
        embedded = []
        for system, tokens in zip(systems, minimum_norm(*stacked(systems)), strict=True):
            in_place = system.tokens.spread(tokens[len(system.tokens.prefix) :])
            embedded.append(in_place - _positions(system, model) - bias)
        patches = minimum_norm(embedding.T[None], torch.cat(embedded).T[None])[0].T
        return [(values, {}) for values in patches.reshape(len(systems), -1, patches.shape[1])]


class April(AprilMinNorm):
    """APRIL's equations with noise and a prior of natural patches: no rank cut-off to choose.

    Two things limit the closed form on DeiT-S: the equations' condition number (1e6 to 1e8, against
    float32 gradients), and an embedding that maps 768 pixels to 384 numbers. Both are met by the
    prior. A natural patch is normal with mean m and covariance C, so an embedded patch is so with E m
    and E C E^T; the tokens are the posterior mean under that, with the noise estimated from what is
    left of the right-hand side outside the span of A. The class token's value is known and moved to
    the right. A patch is then m + C E^T (E C E^T)^+ (embedded - E m), its mean given what it is
    embedded to.
    """

    name = "april"
    summary = "APRIL's closed form at full strength: noise from the upload, prior of natural patches"
    requires = f"{_REQUIRES}; an image size that the prior knows"
    uses_natural_patches = True
    handled = frozenset({"scaled", "noisy", "rounded"})  # how much noise there is, it estimates from the upload

    def requirement(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Refuse as the published attack does, and without a prior."""
        return super().requirement(model, threat) or prior_refusal(model)

    def _solve(self, systems: Sequence[System], model: VitClassifier, rounding: float) -> list[Solution]:
        patch = natural_inputs(model)
        embedding, bias = _weight(model, names.PATCH_WEIGHT).flatten(1), _weight(model, names.PATCH_BIAS)
        embedded = GaussianPrior(embedding @ patch.mean, embedding @ patch.covariance @ embedding.T)
        rows, right = stacked([_without_known(system, bias, model) for system in systems])
        estimate = posterior_mean(rows, right, embedded, rounding)
        back = patch.covariance @ embedding.T @ embedded.precision
        solutions = []
        for values, noise in zip(estimate.values[:, : model.grid**2], estimate.noise, strict=True):
            solutions.append((patch.mean + (values - embedded.mean) @ back.T, {"relative_noise": float(noise)}))
        return solutions


class OracleApril(Oracle[VitClassifier], April):
    """Bound: ``april`` if a server saw every token's gradient, masked or not. None does."""

    name = "oracle_april"
    summary = "bound: april given the gradient at every token, which no upload holds"
    requires = f"direct mode, which adds the tokens' gradients to the upload; {_REQUIRES}"


def _weight(model: VitClassifier, name: str) -> Tensor:
    return model.get_parameter(name).detach().double()


def _positions(system: System, model: VitClassifier) -> Tensor:
    """Return the embedding that was added to each patch's token, (patches, dim)."""
    positions = _weight(model, names.POSITION_EMBEDDING)[0, model.prefix_tokens :]
    if not model.defended:
        return positions
    return torch.where(system.tokens.without_position[:, None], _weight(model, names.UNKNOWN_EMBEDDING), positions)


def _without_known(system: System, bias: Tensor, model: VitClassifier) -> System:
    """Reduce a system to the embedded patches: class token, positions and bias move to the right."""
    prefix = _weight(model, names.CLASS_TOKEN)[0] + _weight(model, names.POSITION_EMBEDDING)[0, : model.prefix_tokens]
    constants = _positions(system, model) + bias
    rows = system.tokens.in_place()
    if len(rows) > len(constants):  # the separate token carries the unknown embedding
        constants = torch.cat([constants, _weight(model, names.UNKNOWN_EMBEDDING)[None] + bias])
    right = system.right - system.tokens.prefix.T @ prefix - rows.T @ constants
    return replace(system, rows=rows, right=right)
