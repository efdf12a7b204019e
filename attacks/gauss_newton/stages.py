"""Which entries of an upload a search compares, stage by stage."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.entries import Entries
from attacks.gauss_newton.picked import Known, said_of
from fedmjp.defences.base import Mark
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

FEW, SOME, MANY = 400, 1600, 4096  # entries of a tensor that noise is on: at the beginning of a search, and later
REFINED = 12  # Jacobians at most with more than few
ENOUGH = 2.0  # times the unknowns: exact entries, the largest, of all tensors together. With more a search gets stuck.
NOISE: frozenset[Mark] = frozenset({"noisy", "rounded"})


@dataclass(frozen=True)
class Stage:
    """A search of several.

    Attributes:
        entries: By tensor.
        steps: Jacobians at most.
        placed: Whether tokens have places. Without, all patches are as natural everywhere, so that a token is found
            wherever it is, and none stands between another and its place.
    """

    entries: Mapping[str, Known]
    steps: int
    placed: bool = True


@dataclass(frozen=True)
class Sent:
    """Tensors of an upload on the model's device, and what makes gradients of them.

    Attributes:
        tensors: (rows,) or (rows, columns) each.
        factor: Of a gradient over what was sent.
        threat: What was done to the entries.
    """

    tensors: Mapping[str, Tensor]
    factor: float
    threat: ThreatModel

    @staticmethod
    def of(upload: Upload, names: Sequence[str], threat: ThreatModel, model: VitClassifier) -> "Sent":
        """Some of an upload's tensors."""
        factor = 1.0 if upload.kind == "gradient" else -1 / threat.local_learning_rate
        tensors = {name: upload.tensors[name].to(model.mean.device).squeeze(0) for name in names}
        return Sent(tensors, factor, threat)

    def gradients(self) -> dict[str, Tensor]:
        """As they were sent."""
        return {name: tensor * self.factor for name, tensor in self.tensors.items()}

    def said_of(self, name: str, scaled: float) -> Entries:
        """What is said of a gradient (rows, columns) that is ``scaled`` times what clients sent."""
        matrix = self.tensors[name].flatten(1) * math.copysign(1.0, self.factor)
        return said_of(matrix, self.threat).scaled(abs(self.factor) * scaled)

    def known(self) -> dict[str, Known]:
        """What is known of gradients but for noise, entry by entry."""
        return {name: Known.read(tensor, self.threat).scaled(self.factor) for name, tensor in self.tensors.items()}


def stages(
    sent: Sent, known: Mapping[str, Known], unknowns: int, steps: int, generator: torch.Generator
) -> Iterator[Stage]:
    """In their order.

    Args:
        sent: Of one picture.
        known: What of it is known but for noise.
        unknowns: That are searched.
        steps: Jacobians of a search that starts far off.
        generator: Draws entries.
    """
    if sent.threat.marks & NOISE:
        few, some, many = (
            {name: entries.some(most, generator) for name, entries in known.items()} for most in (FEW, SOME, MANY)
        )
        yield Stage(_anywhere(few), steps, placed=False)
        yield Stage(_anywhere(some), REFINED, placed=False)
        yield Stage(some, REFINED)
        yield Stage(many, REFINED)
    else:
        share = ENOUGH * unknowns / sum(entries.of for entries in known.values())
        yield Stage({name: entries.largest(math.ceil(share * entries.of)) for name, entries in known.items()}, steps)


def _anywhere(entries: Mapping[str, Known]) -> dict[str, Known]:
    """Those that do not tell where a token stands."""
    return {name: each for name, each in entries.items() if name != names.POSITION_EMBEDDING}
