"""Which entries of an upload a search compares, stage by stage."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from attacks.gauss_newton.picked import Known, Sides
from fedmjp.defences.base import Mark
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel

FEW, MANY = 400, 4096  # entries of a tensor that noise is on: in a search, and at its end
REFINED = 3  # Jacobians with many
ENOUGH = 2.0  # times the unknowns: exact entries, the largest, of all tensors together. With more a search gets stuck.
NOISE: frozenset[Mark] = frozenset({"noisy", "rounded"})
# Of the mean magnitude: where a candidate's entry may still be on the other side. In so many Jacobians each.
WIDTHS, PER_WIDTH, SIDES = (0.5, 0.1, 0.03, 0.01, 0.003), 6, 1600


@dataclass(frozen=True)
class Stage:
    """Entries by tensor, and the Jacobians of a search with them at most."""

    entries: Mapping[str, Known | Sides]
    steps: int


def known_entries(
    upload: Upload, tensors: Sequence[str], threat: ThreatModel, model: VitClassifier
) -> dict[str, Known]:
    """What is known of gradients but for noise, entry by entry: of signs only zeros."""
    factor = 1.0 if upload.kind == "gradient" else -1 / threat.local_learning_rate
    tensor = {name: upload.tensors[name].to(model.mean.device).squeeze(0) for name in tensors}
    return {name: Known.read(tensor[name], threat).scaled(factor) for name in tensors}


def stages(
    upload: Upload,
    known: Mapping[str, Known],
    unknowns: int,
    steps: int,
    threat: ThreatModel,
    generator: torch.Generator,
) -> Iterator[Stage]:
    """In their order.

    Args:
        upload: Of one picture.
        known: Its entries that are known but for noise.
        unknowns: That are searched.
        steps: Jacobians of a search that starts far off.
        threat: What was done to the entries.
        generator: Draws entries.
    """
    if "signs" in threat.marks:
        away = upload.kind == "delta"  # a weight moves against its gradient
        for width in WIDTHS:
            tensors = {name: upload.tensors[name].squeeze(0) * (-1 if away else 1) for name in known}
            yield Stage({name: Sides.read(tensors[name], width, SIDES, generator) for name in known}, PER_WIDTH)
    elif threat.marks & NOISE:
        yield Stage({name: entries.some(FEW, generator) for name, entries in known.items()}, steps)
        yield Stage({name: entries.some(MANY, generator) for name, entries in known.items()}, REFINED)
    else:
        share = ENOUGH * unknowns / sum(entries.of for entries in known.values())
        yield Stage({name: entries.largest(math.ceil(share * entries.of)) for name, entries in known.items()}, steps)
