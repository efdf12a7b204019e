"""Least squares on the patch-embedding gradient: no surgery on the model, exact for one picture."""

from collections.abc import Sequence

import torch

from attacks.base import Attack, single_picture_gradient_refusal
from attacks.pictures import picture
from attacks.token_gradients import required_tensors, token_gradients
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel


class PatchEmbedding(Attack):
    """Solve G_E = D^T X for the patches X.

    The patch embedding is linear, so its gradient is G_E = D^T X, with D (patches, dim) the gradient
    at the tokens, which the position embedding's gradient shows row by row. With at most ``dim``
    tokens and D of full rank the solution is unique and exact up to rounding. QR in float64.

    On an MJP upload it is naive: it takes the unknown embedding's row for one token, whose patch it
    puts at all masked places. The true rows of the masked tokens are not in the upload, only their
    sum is, so the system is wrong and the error spreads over all patches.
    """

    name = "patch_embedding"
    paper = "direct consequence of a linear patch embedding with learned positions; used in fedmjp"
    summary = "least squares on patch-embedding and position-embedding gradients, unmodified model"
    requires = "one picture per update; gradients of patch and position embedding; no more tokens than dimensions"

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Position-embedding (and unknown-embedding) gradient, patch-embedding weight gradient."""
        return [*required_tensors(model), names.PATCH_WEIGHT]

    def refusal(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Needs patches <= dim and the gradient of a single picture."""
        patches, dim = (model.image_size // model.patch_size) ** 2, model.backbone.embed_dim
        if patches > dim:
            return f"{patches} patches are more unknowns than the {dim} equations per pixel: underdetermined"
        return single_picture_gradient_refusal(threat)

    def _reconstruct_one(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, *, generator: torch.Generator
    ) -> Reconstruction:
        del threat, generator  # closed form
        seen = token_gradients(upload, model)
        tokens = torch.cat([seen.patches, seen.unknown])
        patch_gradient = upload.tensors[names.PATCH_WEIGHT].double().cpu().flatten(1)
        solved = torch.linalg.lstsq(tokens.T, patch_gradient, driver="gels").solution
        visible, unknown = solved[: len(seen.patches)], solved[len(seen.patches) :]
        return Reconstruction(
            images=picture(seen.spread(visible, unknown), model),
            diagnostics={"masked_patches": float(seen.mask.sum())},
        )
