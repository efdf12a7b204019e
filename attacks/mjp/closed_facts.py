"""What attacks share that read the linear facts of MJP uploads and close them by a prior of pictures."""

from collections.abc import Sequence
from typing import ClassVar

from attacks.base import Attack
from attacks.mjp.facts import refusal, required_tensors
from attacks.natural_patches import size_refusal
from fedmjp.config import Defence
from fedmjp.models.entrance import Entrance
from fedmjp.threat import ThreatModel


class ClosedFacts(Attack[Entrance]):
    """An attack by ``attacks.mjp.facts`` and ``attacks.mjp.closing``, without a pass through the network."""

    requires: ClassVar[str] = (
        "updates with patch, position and unknown embedding; no more patches in an upload than dimensions; "
        "an image size that the prior knows"
    )
    stack = 1
    needs_network = False

    def tensors(self, model: Entrance) -> Sequence[str]:
        """Gradients of patch, position and, of a defended model, unknown embedding."""
        return required_tensors(model)

    def refusal(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Needs each client's own uploads, enough dimensions, and statistics of such pictures."""
        if not threat.individual_updates:
            return "needs each client's own update: a sum over clients only shows the sum of their tokens"
        return refusal(model) or size_refusal(model.image_size)

    def adapted_to(self, threat: ThreatModel) -> frozenset[Defence]:
        """MJP."""
        del threat
        return frozenset({"mjp"})

    @property
    def uses_natural_patches(self) -> bool:
        """For what stays open."""
        return True
