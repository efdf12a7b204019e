"""Remove from the last layer's gradient the features that say most about the picture (Soteria)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.defences.base import Client, Defence, require_finite
from fedmjp.errors import DefenceError
from fedmjp.randomness import Randomness

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.models.classifier import Classifier

TOGETHER = 128  # derivatives, of one feature of one picture each, that are computed at once
PICTURES = 64  # of those at a time, so that memory does not grow with a client's pictures


class SoteriaOptions(Config):
    """Options of the pruning."""

    pruned: float = Field(0.1, gt=0, lt=1, description="share of the features whose gradient is removed")


class Soteria(Defence):
    """Soteria: features are pruned from the gradient of the layer that reads them, the head.

    A feature r of a picture x is the more telling the larger ``|r| / ||dr/dx||`` is. The share of the features
    with the largest values is pruned: the columns of the head's weight that read them become zero. For several
    pictures ``||dr/dx|| / |r|`` is summed, and the smallest sums are pruned.

    The official code (jeremy313/Soteria) divides by r with its sign, and in one of its two versions by r + 0.1,
    where the paper has the norm; features of its networks are positive, those of transformers are not.
    Derivatives are with respect to pixels in [0, 1]. In a weight delta after several steps, the same columns become
    zero, chosen at the weights before the first.

    Example:
        >>> Soteria({"pruned": 0.2}).needs_model
        True
    """

    name = "soteria"
    paper = "Sun et al., Soteria, CVPR 2021, section 4"
    summary = "removes the most telling features from the gradient of the head's weight"
    told = "the share of the features that is removed, not which"
    stages = ("update",)
    scope = "update"
    marks: ClassVar = frozenset({"pruned"})
    draws = False
    needs_model = True
    options_type = SoteriaOptions

    @override
    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        import torch

        require_finite(update, self.name)
        if client.model is None or client.images is None:
            raise DefenceError(f"{self.name}: computes with model and pictures, which a mod does not see")
        heads = [name for name in client.roles.get("head", ()) if name in update and update[name].dim() == 2]
        if not heads:
            raise DefenceError(f"{self.name}: the update has no weight of a last layer, whose features it prunes")
        telling = telling_features(client.model, client.images, client.mask, share=self.options.pruned)
        return {
            name: torch.where(telling.to(tensor.device), 0, tensor) if name in heads else tensor
            for name, tensor in update.items()
        }

    def refusal(self, earlier: Sequence[Defence]) -> str | None:
        """Refuse to follow what it would spoil: its choice depends on the pictures and on the head's own gradient.

        Args:
            earlier: The defences that act before it, in order.
        """
        guaranteed = next((defence for defence in earlier if defence.spent(1) is not None), None)
        if guaranteed is not None:
            return (
                f"what {self.name} removes depends on the pictures, so after {guaranteed.name} its guarantee of "
                f"differential privacy is lost; name {self.name} first"
            )
        for defence in earlier:
            if "update" in defence.stages and defence.marks - {"withheld"}:
                return (
                    f"{self.name} needs the head's own gradient, which {defence.name} changes; name {self.name} first"
                )
        return None


def telling_features(model: Any, images: Tensor, mask: Tensor | None, *, share: float) -> Tensor:
    """Choose the share of the features that say most about pictures.

    Args:
        model: A ``fedmjp.models.classifier.Classifier`` with the weights that the server sent.
        images: (batch, 3, size, size) in [0, 1].
        mask: (batch or 1, patches) bool, as the model takes it; None without one.
        share: Of the features, in (0, 1).

    Returns:
        (features,) bool, True where a feature is chosen.

    Raises:
        DefenceError: If the model does not say what its head reads.
    """
    import torch

    from fedmjp.models.classifier import Classifier

    if not isinstance(model, Classifier):
        raise DefenceError(f"soteria: a {type(model).__name__} does not say what its head reads")
    device = next(model.parameters()).device
    masked = None if mask is None or not model.defended else mask.to(device).expand(len(images), -1)
    masks = itertools.repeat(None) if masked is None else torch.split(masked, PICTURES)
    parts = zip(torch.split(images.detach(), PICTURES), masks, strict=False)
    ratios = torch.stack([_ratios(model, some.to(device), of_them) for some, of_them in parts]).sum(dim=0)
    # numpy.percentile's threshold, below which the official code prunes, without its interpolation.
    threshold = ratios.sort().values[math.ceil(share * (len(ratios) - 1))]
    return ratios < threshold


def _ratios(model: Classifier, images: Tensor, masked: Tensor | None) -> Tensor:
    """Compute ``||dr/dx|| / |r|`` of each feature (features,), summed over the images."""
    import torch

    def slopes(feature: Tensor) -> Tensor:
        """Compute (batch,) norms of the derivatives of a feature, (features,) one-hot; pictures do not meet."""
        norms: Tensor = torch.linalg.vector_norm(pull_back(feature.expand_as(features))[0].flatten(1), dim=1)
        return norms

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the others cannot be vectorised
        features, pull_back = torch.func.vjp(lambda pixels: model.features(pixels, masked), images)[:2]
        units = torch.eye(features.shape[1], dtype=features.dtype, device=images.device)
        norms = torch.cat(
            [torch.func.vmap(slopes)(some) for some in torch.split(units, max(1, TOGETHER // len(images)))]
        )
    # A feature that is zero has an infinite ratio and stays.
    ratios: Tensor = torch.where(norms > 0, norms / features.detach().T.abs(), 0).sum(dim=1)
    return ratios
