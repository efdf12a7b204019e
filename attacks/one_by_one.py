"""Attacks that take each upload of a stack by itself."""

from abc import abstractmethod
from collections.abc import Sequence

import torch

from fedmjp.attacks.base import Attack, Made, Model
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel


class OneByOne(Attack[Model, Made]):
    """Base of attacks that gain nothing from several uploads at once."""

    @abstractmethod
    def _one(self, upload: Upload, model: Model, threat: ThreatModel, generator: torch.Generator) -> Made:
        """Attack an upload that was checked."""

    def _reconstruct(
        self, uploads: Sequence[Upload], model: Model, threat: ThreatModel, *, generators: Sequence[torch.Generator]
    ) -> list[Made]:
        pairs = zip(uploads, generators, strict=True)
        return [self._one(upload, model, threat, generator) for upload, generator in pairs]
