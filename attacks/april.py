"""The closed form of APRIL, on the architecture that it needs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.base import Attack
from attacks.pictures import picture
from attacks.token_gradients import required_tensors, token_gradients
from fedmjp.models import names
from fedmjp.models.april import AprilBlock
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Reconstruction, Upload
from fedmjp.threat import ThreatModel


def _least_squares(matrix: Tensor, right: Tensor) -> Tensor:
    """Minimum-norm solution by singular values, cut off at float64 rounding, as breaching solves it."""
    return torch.linalg.lstsq(matrix, right, driver="gelsd").solution


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
        """Needs the APRIL architecture, batch size 1 and individual updates."""
        if not isinstance(model.backbone.blocks[0], AprilBlock):
            return "needs a first block without first norm and residuals; take the model's _april variant"
        if threat.batch_size != 1 or not threat.individual_updates:
            return "needs the individual update of a single picture"
        return None

    def _reconstruct_one(
        self, upload: Upload, model: VitClassifier, threat: ThreatModel, *, generator: torch.Generator
    ) -> Reconstruction:
        del threat, generator  # closed form
        seen = token_gradients(upload, model)
        weights = {name: parameter.detach().double().cpu() for name, parameter in model.named_parameters()}
        rows = torch.cat([seen.prefix, seen.patches, seen.unknown])
        tokens = _least_squares(rows.T, self._attention_side(upload, weights[names.FIRST_QKV_WEIGHT]))
        visible, unknown = tokens[len(seen.prefix) :].split([len(seen.patches), len(seen.unknown)])

        positions = weights[names.POSITION_EMBEDDING][0, model.prefix_tokens :]
        embedded = seen.spread(visible - positions[~seen.mask], unknown - _unknown_embedding(weights, unknown))
        projection = weights[names.PATCH_WEIGHT].flatten(1)
        patches = _least_squares(projection, (embedded - weights[names.PATCH_BIAS]).T).T
        return Reconstruction(
            images=picture(patches, model), diagnostics={"masked_patches": float(seen.mask.sum())}
        )

    def _attention_side(self, upload: Upload, weight: Tensor) -> Tensor:
        """W_q^T dW_q + W_k^T dW_k + W_v^T dW_v, (dim, dim): one product, as q, k, v are stacked."""
        return weight.T @ upload.tensors[names.FIRST_QKV_WEIGHT].double().cpu()


def _unknown_embedding(weights: dict[str, Tensor], unknown: Tensor) -> Tensor:
    """What to subtract from the unknown token; nothing where there is none."""
    return weights[names.UNKNOWN_EMBEDDING] if len(unknown) else torch.zeros_like(unknown)
