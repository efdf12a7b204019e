"""Least squares on the patch-embedding gradient: no surgery on the model, exact for one picture."""

from collections.abc import Sequence
from dataclasses import replace

from fedmjp.attacks.base import on_device
from fedmjp.attacks.closed_form import ClosedForm, Oracle, Solution, System, stacked
from fedmjp.attacks.linear_systems import NEGLIGIBLE, posterior_mean
from fedmjp.attacks.natural_patches import natural_inputs, prior_refusal
from fedmjp.attacks.token_gradients import count_refusal, solve_patches
from fedmjp.defences.base import Mark
from fedmjp.models import names
from fedmjp.models.entrance import Entrance, count_patches
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel


class PatchEmbeddingAttack(ClosedForm[Entrance]):
    """A closed form that solves G_E = D^T X for the patches X.

    The patch embedding is linear, so its gradient is G_E = D^T X, with D (patches, dim) the gradient
    at the tokens, which the position embedding's gradient shows row by row. With at most ``dim``
    tokens and D of full rank the solution is unique and exact up to rounding. QR in float64. Outside of
    an attack, ``fedmjp.recover`` does the same with the two gradients alone.

    A weight delta of several SGD steps on one picture sums their gradients: sum_k D_k^T X =
    (sum_k D_k)^T X. The same equation holds, for any number of steps and any learning rate.

    Of several pictures only sum_i D_i and sum_i D_i^T X_i are seen: more unknowns than equations.
    The solution is then a mixture of the pictures, given once per picture.

    On an MJP upload it is naive: it solves the wrong system that the option ``reading`` makes of the
    upload. The true rows of the masked tokens are not in it, only their sum is, and the error
    spreads over all patches.

    Example:
        >>> import fedmjp
        >>> scenario = fedmjp.Scenario(model={"name": "deit_tiny", "image_size": 64, "patch_size": 8})
        >>> exchange = scenario.exchange(fedmjp.bundled_pictures(1, size=64))
        >>> result = fedmjp.attack("patch_embedding", exchange.upload, scenario)
        >>> fedmjp.score(result, exchange.private, metrics=("psnr",))["psnr"].item() > 60
        True
    """

    name = "patch_embedding"
    paper = "direct consequence of a linear patch embedding with learned positions; used in fedmjp"
    summary = "least squares on patch-embedding and position-embedding gradients, unmodified model"
    requires = "gradients or deltas of patch and position embedding; no more patches than dimensions"
    exploits = "the position embedding's gradient shows the gradient at every token; the patch embedding is linear"
    right_side = names.PATCH_WEIGHT

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Refuse more patches than it can solve for, besides what every closed form refuses."""
        return super().requirement(model, threat) or self._size_refusal(model)

    def _size_refusal(self, model: Entrance) -> str | None:
        return count_refusal(count_patches(model), len(model.get_parameter(names.PATCH_WEIGHT)))

    def caveat(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Warn that batches are underdetermined."""
        if threat.batch_size == 1:
            return None
        dim = len(model.get_parameter(names.PATCH_WEIGHT))
        return (
            f"{self.name}: {threat.batch_size} pictures of {count_patches(model)} patches share {dim} "
            "equations per pixel: underdetermined; what it gives is a mixture, repeated for every picture"
        )

    def _system(self, upload: Upload, model: Entrance, threat: ThreatModel) -> System:
        tokens = self._seen(upload, model, threat)
        right = on_device(upload, names.PATCH_WEIGHT, model).flatten(1)
        equations = len(right) / (upload.num_examples * len(tokens.mask))
        diagnostics = {"masked_patches": float(tokens.mask.sum()), "equations_per_unknown": equations}
        return System(tokens, tokens.unknowns, right, diagnostics)

    def _solve(self, systems: Sequence[System], model: Entrance, rounding: float) -> list[Solution]:
        del model, rounding
        solved = solve_patches([system.tokens for system in systems], [system.right for system in systems])
        return [(patches, {}) for patches in solved]


class PatchEmbeddingWiener(PatchEmbeddingAttack):
    """The equation of ``patch_embedding`` with noise and a prior of natural patches (Wiener filter).

    For uploads that are noisy, pruned, quantised, in half precision, or a small difference of large
    weights. The noise is estimated from the upload: what is left of G_E outside the span of the token
    gradients. On a clean upload it comes down to rounding, and the solution to that of
    ``patch_embedding``. With more patches than dimensions the prior fills what the equations leave
    open; the noise is then taken to be the rounding of the upload's number format.
    """

    name = "patch_embedding_wiener"
    summary = "patch_embedding with noise estimated from the upload and a prior of natural patches"
    requires = "gradients or deltas of patch and position embedding; an image size that the prior knows"
    uses_natural_patches = True
    handled = frozenset({"scaled", "noisy", "rounded"})

    def handles(self, model: Entrance, threat: ThreatModel) -> frozenset[Mark]:
        """Name noise where equations are left over to estimate it from."""
        del threat
        measurable = count_patches(model) < len(model.get_parameter(names.PATCH_WEIGHT))
        return self.handled if measurable else self.handled - {"noisy"}

    def _size_refusal(self, model: Entrance) -> str | None:
        return prior_refusal(model)

    def _system(self, upload: Upload, model: Entrance, threat: ThreatModel) -> System:
        system = super()._system(upload, model, threat)
        return replace(system, rows=system.tokens.in_place())

    def _solve(self, systems: Sequence[System], model: Entrance, rounding: float) -> list[Solution]:
        prior = natural_inputs(model)
        # A LayerNorm behind the tokens leaves one direction of their gradients empty but for rounding.
        estimate = posterior_mean(*stacked(systems), prior, rounding, cut_off=NEGLIGIBLE)
        patches = estimate.values[:, : count_patches(model)]
        return [
            (values, {"relative_noise": float(noise)}) for values, noise in zip(patches, estimate.noise, strict=True)
        ]


class OraclePatchEmbedding(Oracle[Entrance], PatchEmbeddingWiener):
    """Bound: ``patch_embedding_wiener`` if a server saw every token's gradient, masked or not. None does.

    Equal patches without positions are equal tokens with equal gradients; the prior gives them equal values.
    """

    name = "oracle_patch_embedding"
    summary = "bound: patch_embedding_wiener given the gradient at every token, which no upload holds"
    requires = "direct mode, which adds the tokens' gradients to the upload; an image size that the prior knows"
