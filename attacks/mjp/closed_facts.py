"""What attacks share that read the linear facts of MJP uploads and close them by a prior of pictures."""

from collections.abc import Sequence
from typing import ClassVar

from attacks.base import Attack
from attacks.mjp.facts import refusal, required_tensors
from attacks.natural_patches import size_refusal
from fedmjp.defences.base import Mark
from fedmjp.models.entrance import Entrance
from fedmjp.threat import ThreatModel

MJP: frozenset[Mark] = frozenset({"masked", "shuffled"})
HANDLED: frozenset[Mark] = MJP | {"noisy", "rounded", "scaled"}  # what is pruned away is no noise


class ClosedFacts(Attack[Entrance]):
    """An attack by ``attacks.mjp.facts`` and ``attacks.mjp.closing``, without a pass through the network."""

    requires: ClassVar[str] = (
        "updates with patch, position and unknown embedding; no more patches in an upload than dimensions; "
        "an image size that the prior knows"
    )
    stack = 1
    needs_network = False
    uses_natural_patches = True

    def tensors(self, model: Entrance) -> Sequence[str]:
        """Gradients of patch, position and, of a defended model, unknown embedding."""
        return required_tensors(model)

    def requirement(self, model: Entrance, threat: ThreatModel) -> str | None:
        """Needs enough dimensions, a mask that can be read, and statistics of such pictures."""
        return refusal(model, threat) or size_refusal(model.image_size)

    def handles(self, model: Entrance, threat: ThreatModel) -> frozenset[Mark]:
        """Takes into account what MJP does, a factor of the whole update, and what disturbs equations like noise."""
        del threat
        return HANDLED if model.defended else HANDLED - MJP
