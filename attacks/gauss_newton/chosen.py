"""Which of the entries that are known of gradients a search compares."""

import math
from collections.abc import Mapping

import torch

from fedmjp.attacks.gauss_newton.picked import KnownEntries
from fedmjp.models import names

SOME = 0.4  # times the unknowns: entries of a tensor that noise is on
ENOUGH = 2.0  # times the unknowns: exact entries, the largest, of all tensors together. With more a search gets stuck.


def some(known: Mapping[str, KnownEntries], unknowns: int, generator: torch.Generator) -> dict[str, KnownEntries]:
    """So many of each tensor that a search for so many unknowns can begin with them, drawn alike."""
    most = math.ceil(SOME * unknowns)
    return {
        name: entries.crossed(most, generator) if name.endswith(".weight") else entries.some(most, generator)
        for name, entries in known.items()
    }


def largest(known: Mapping[str, KnownEntries], unknowns: int) -> dict[str, KnownEntries]:
    """The largest, as many as a search for so many unknowns needs."""
    share = ENOUGH * unknowns / sum(entries.of for entries in known.values())
    return {name: entries.largest(math.ceil(share * entries.of)) for name, entries in known.items()}


def anywhere(known: Mapping[str, KnownEntries]) -> dict[str, KnownEntries]:
    """Those that do not tell where a token stands."""
    return {name: entries for name, entries in known.items() if name != names.POSITION_EMBEDDING}
