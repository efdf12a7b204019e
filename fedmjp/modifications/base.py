"""The contract of a server that changes weights: what it sends, and what its uploads then show.

It stands here, below all parties: scenarios name such a server, attackers read its uploads, planning asks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fedmjp.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.models.classifier import VitClassifier
    from fedmjp.models.entrance import Entrance
    from fedmjp.records import Upload
    from fedmjp.scenario import Scenario
    from fedmjp.threat import ThreatModel


class Modification(ABC):
    """Base of all servers that change weights.

    Class attributes state what `fedmjp list servers NAME` prints: ``name``; ``paper``, the source; ``summary``, one
    line; ``options_type``, the configuration model of its options, given as by ``NAME:key=value``.

    It is pure: it changes nothing that it is given, and the same input gives the same weights, to the last bit. It
    knows no private data, only what an attacker knows.

    Raises:
        ConfigError: On an unknown option or a value out of range.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    options_type: ClassVar[type[Config]] = Config

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options: Any = self.options_type.parse(options or {})

    @property
    def probes(self) -> int:
        """Rounds of every batch that come first, to learn something of the pictures behind it."""
        return 0

    @abstractmethod
    def refusal(self, model: VitClassifier, scenario: Scenario) -> str | None:
        """Say why it cannot be played in this scenario, whose model may be without weights; None if it can."""

    def probe(self, model: VitClassifier, threat: ThreatModel) -> Mapping[str, Tensor]:
        """What it sends to all clients in place of a model's honest weights in such a round: nothing is honest."""
        del model, threat
        return {}

    def learn(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> object:
        """What an upload of such a round tells, for ``weights`` to make use of; ``model`` has honest weights."""
        del upload, model, threat
        return None

    @abstractmethod
    def weights(self, model: VitClassifier, threat: ThreatModel, known: object) -> Sequence[Mapping[str, Tensor]]:
        """What it sends instead of weights of a model, to each client behind one upload, in their order.

        Args:
            model: With honest weights.
            threat: What the server sees.
            known: Learnt from the last probe of the same clients and batch; None if there was none.

        Returns:
            By client, the tensors that are others than the model's. Clients that get the same may share an object.
        """

    @abstractmethod
    def view(self, threat: ThreatModel) -> ThreatModel:
        """What an attack is told that is given an isolated upload."""

    @abstractmethod
    def isolate(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> Upload:
        """The part of an upload that its weights, which ``model`` holds, separate from the rest; as ``view`` has it.

        Raises:
            AttackFailedError: If the model holds no such weights.
        """

    def reads(self, model: VitClassifier, threat: ThreatModel) -> Sequence[str]:
        """Names of the tensors that ``isolate`` reads, besides those that an attack does."""
        del model, threat
        return ()

    def mixed(self, model: Entrance) -> frozenset[str]:
        """Names of the tensors that are of all pictures even so: isolated uploads are without them."""
        del model
        return frozenset()

    def wanted(self, labels: Sequence[int], threat: ThreatModel) -> list[int]:
        """The evaluator's question: places of the pictures that it is after, among those behind one upload."""
        del threat
        return list(range(len(labels)))
