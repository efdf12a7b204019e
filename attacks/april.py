"""The closed form of APRIL, on the architecture that it needs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.base import Attack, single_picture_gradient_refusal
from attacks.pictures import picture
from attacks.token_gradients import required_tensors, token_gradients
from fedmjp.models import names
from fedmjp.models.april import AprilBlock
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel


def _least_squares(matrix: Tensor, right: Tensor) -> Tensor:
    """Minimum-norm solution by singular values, cut off at float64 rounding, as breaching solves it."""
    solution: Tensor = torch.linalg.lstsq(matrix, right, driver="gelsd").solution
    return solution


class April(Attack):
    """Solve A^T Z = W_q^T dW_q + W_k^T dW_k + W_v^T dW_v for the tokens Z, then invert the embedding.

    A (tokens, dim) is the gradient of the position embedding. It holds for a first block without
    first norm and residuals. The tokens minus their position embedding are the embedded patches;
    the patch embedding (dim x 3 * patch ** 2) is inverted with minimum norm, so where it has fewer
    rows than columns (DeiT-S: 384 x 768) only the part of a patch in its row space comes back.

    On an MJP upload it is naive in the same way as ``patch_embedding``: the unknown embedding's row
    is taken for one token that stands at all masked places.

    References:
        Lu et al., "APRIL: Finding the Achilles' Heel on Privacy for Vision Transformers", CVPR 2022,
        section 3; same equations and solver as breaching 0.1.2, ``AprilAttacker.closed_form_april``.
    """

    name = "april"
    paper = "Lu et al., APRIL, CVPR 2022"
    summary = "closed form on attention and position-embedding gradients of a modified first block"
    requires = "an *_april model (first block without first norm and residuals); one picture per update"

    def tensors(self, model: VitClassifier) -> Sequence[str]:
        """Position-embedding (and unknown-embedding) gradient, first qkv weight gradient."""
        return [*required_tensors(model), names.FIRST_QKV_WEIGHT]

    def refusal(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        """Needs the APRIL architecture and the gradient of a single picture."""
        if not isinstance(model.backbone.blocks[0], AprilBlock):
            return "needs a first block without first norm and residuals; take the model's _april variant"
        return single_picture_gradient_refusal(threat)

    def _reconstruct_one(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, *, generator: torch.Generator
    ) -> Reconstruction:
        del threat, generator  # closed form
        seen = token_gradients(upload, model)
        rows = torch.cat([seen.prefix, seen.patches, seen.unknown])
        qkv_gradient = upload.tensors[names.FIRST_QKV_WEIGHT].double().cpu()
        # Query, key and value weights are stacked, so that one product is the sum of the three.
        tokens = _least_squares(rows.T, _weight(model, names.FIRST_QKV_WEIGHT).T @ qkv_gradient)
        first_unknown = len(seen.prefix) + len(seen.patches)
        visible, unknown = tokens[len(seen.prefix) : first_unknown], tokens[first_unknown:]

        positions = _weight(model, names.POSITION_EMBEDDING)[0, model.prefix_tokens :]
        if len(unknown):
            unknown = unknown - _weight(model, names.UNKNOWN_EMBEDDING)
        embedded = seen.spread(visible - positions[~seen.mask], unknown) - _weight(model, names.PATCH_BIAS)
        patches = _least_squares(_weight(model, names.PATCH_WEIGHT).flatten(1), embedded.T).T
        return Reconstruction(images=picture(patches, model), diagnostics={"masked_patches": float(seen.mask.sum())})


def _weight(model: VitClassifier, name: str) -> Tensor:
    return model.get_parameter(name).detach().double().cpu()
