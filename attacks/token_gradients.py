"""What the position-embedding gradient says about each token, and about MJP's mask.

The position embedding is added to the tokens, so row i of its gradient is the gradient of the loss
with respect to token i. With MJP, masked tokens use the shared unknown embedding instead: their own
rows are exactly zero, which gives the mask away, and the unknown embedding's gradient is the sum of
theirs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmjp.errors import AttackNotApplicableError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload


@dataclass(frozen=True)
class TokenGradients:
    """Gradients with respect to the tokens, as far as one upload shows them.

    Attributes:
        prefix: (prefix tokens, dim) float64, the class token's.
        patches: (visible patches, dim) float64, those of the patches that kept their position.
        mask: (patches,) bool, True where the row is exactly zero: the masked patches.
        unknown: (0 or 1, dim) float64, the sum over the masked patches; empty if none is masked.
    """

    prefix: Tensor
    patches: Tensor
    mask: Tensor
    unknown: Tensor

    def spread(self, visible: Tensor, unknown: Tensor) -> Tensor:
        """Put a value per patch in place: its own where visible, the unknown token's where masked.

        Args:
            visible: (visible patches, values).
            unknown: (0 or 1, values).

        Returns:
            (patches, values). Where masked patches have no unknown token, zeros.
        """
        everywhere = visible.new_zeros(len(self.mask), visible.shape[1])
        everywhere[~self.mask] = visible
        if len(unknown):
            everywhere[self.mask] = unknown
        return everywhere


def required_tensors(model: VitClassifier) -> list[str]:
    """Names of the tensors that ``token_gradients`` reads."""
    return [names.POSITION_EMBEDDING, *([names.UNKNOWN_EMBEDDING] if model.defended else [])]


def token_gradients(upload: Upload, model: VitClassifier) -> TokenGradients:
    """Read token gradients and mask out of an upload of one picture.

    This is the naive reading of a masked upload: the unknown embedding's gradient is taken for that
    of a single token that stands at every masked place. Attackers who know better come elsewhere.

    Raises:
        AttackNotApplicableError: If an undefended model's upload has no gradient at any patch.
    """
    rows = upload.tensors[names.POSITION_EMBEDDING].double().cpu()[0]
    prefix, patches = rows[: model.prefix_tokens], rows[model.prefix_tokens :]
    mask = (patches == 0).all(dim=1)
    if mask.all() and not model.defended:
        raise AttackNotApplicableError("the position-embedding gradient is zero for every patch: nothing to solve for")
    unknown = torch.empty(0, rows.shape[1], dtype=torch.float64)
    if model.defended and mask.any():
        unknown = upload.tensors[names.UNKNOWN_EMBEDDING].double().cpu()[None]
    return TokenGradients(prefix, patches[~mask], mask, unknown)
