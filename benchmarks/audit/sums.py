"""Whether a secure sum is one: the next weights against every client's own update, and every message against its own.

The evaluator knows each client's update from hooks. A sum holds several of them; a masked message runs parallel to
none of the numbers that it hides.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmjp.benchmarks.audit.evaluating import read_trained
from fedmjp.benchmarks.audit.network import by_name
from fedmjp.benchmarks.audit.noise import flat
from fedmjp.benchmarks.audit.running import Records
from fedmjp.benchmarks.audit.verbatim import Vector, strongest_window, vectors
from fedmjp.benchmarks.audit.wire import read_arrays

ENTRIES = 2_000_000  # of all updates together that a sum is fitted on
WINDOW = 4096  # numbers of a client's own that are looked for in its messages
TAKES_PART = 0.1  # of the largest share, from which on a client is in a sum
BEYOND_DOUBT = 4.0  # standard errors


@dataclass(frozen=True)
class Sum:
    """What the next weights are of clients' updates."""

    shares: tuple[float, ...]  # factor of each client's update
    errors: tuple[float, ...]  # standard error of each
    deviation: float  # standard deviation, in one number, of what is no multiple of them
    residual: float  # its length, relative to the whole

    @property
    def takes_part(self) -> tuple[float, ...]:
        """List shares of the clients that are in it beyond doubt."""
        largest = max(map(abs, self.shares))
        pairs = zip(self.shares, self.errors, strict=True)
        return tuple(share for share, error in pairs if abs(share) > max(BEYOND_DOUBT * error, TAKES_PART * largest))


@dataclass(frozen=True)
class ClientTraining:
    """One client's training of one round."""

    message: str
    node: int
    weights: Mapping[str, Tensor]


def read_round(records: Records) -> tuple[Mapping[str, Tensor], list[ClientTraining], Mapping[str, Tensor]] | None:
    """Read the first round's weights, clients' trained ones and the next weights; None without a next round.

    Args:
        records: Folders of the watched run.
    """
    questions = [line for line in records.wire() if line["way"] == "down" and _holds_arrays(line)]
    rounds = sorted({int(line["round"]) for line in questions})
    if len(rounds) < 2:
        return None
    files = [
        next((line["file"] for line in questions if line["round"] == number and "file" in line), None)
        for number in rounds
    ]
    if files[0] is None or files[1] is None:
        return None
    first = [line for line in questions if line["round"] == rounds[0]]
    trained = [
        ClientTraining(line["id"], int(line["node"]), read_trained(records.evaluator, line["id"])) for line in first
    ]
    trained = [training for training in trained if training.weights]
    if not trained:
        return None
    first_weights, next_weights = (
        by_name(trained[0].weights, read_arrays(records.server / str(file))) for file in files[:2]
    )
    return first_weights, trained, next_weights


def _holds_arrays(line: Mapping[str, Any]) -> bool:
    described = line.get("records", {}).values()
    return line["type"].partition(".")[0] == "train" and any(
        description["kind"] == "arrays" for description in described
    )


def fit_sum(
    first_weights: Mapping[str, Tensor], trained: Sequence[ClientTraining], next_weights: Mapping[str, Tensor]
) -> Sum | None:
    """Fit the change of the weights as a sum of multiples of clients' updates; None where there is no change.

    Args:
        first_weights: That the round began with.
        trained: What each client trained.
        next_weights: After the round.
    """
    names = [name for name, tensor in first_weights.items() if tensor.is_floating_point() and name in next_weights]
    start = flat(first_weights, names)
    step = max(1, len(start) * len(trained) // ENTRIES)
    updates = torch.stack([flat(training.weights, names)[::step] - start[::step] for training in trained], dim=1)
    change = (flat(next_weights, names) - start)[::step]
    if not bool(change.any()) or not bool(updates.any()):
        return None
    shares = torch.linalg.lstsq(updates, change[:, None], driver="gelsd").solution[:, 0]
    residual = change - updates @ shares
    deviation = float(residual.norm()) / math.sqrt(max(len(residual) - len(shares), 1))
    errors = deviation * torch.linalg.pinv(updates.mT @ updates, hermitian=True).diagonal().clamp_min(0).sqrt()
    return Sum(tuple(shares.tolist()), tuple(errors.tolist()), deviation, float(residual.norm() / change.norm()))


def strongest_correlation(
    records: Records, first_weights: Mapping[str, Tensor], trained: Sequence[ClientTraining]
) -> float:
    """Find the strongest correlation of a client's answers with its own update or weights, whatever the scale.

    Args:
        records: Folders of the watched run.
        first_weights: That the round began with.
        trained: What each client trained.
    """
    by_node = {training.node: training for training in trained}
    strongest = 0.0
    for line in records.wire():
        training = by_node.get(int(line["node"])) if line["way"] == "up" else None
        if training is None:
            continue
        hidden = list(_hidden(first_weights, training.weights))
        for sent in _sent(line):
            strongest = max(
                strongest, *(strongest_window(sent, numbers) for numbers in hidden if len(sent) >= len(numbers)), 0.0
            )
    return strongest


def _hidden(first_weights: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Iterator[Vector]:
    """Yield the first numbers of the largest tensor that was trained: its update, and its weights."""
    name = max(
        (name for name, tensor in weights.items() if tensor.is_floating_point()), key=lambda key: weights[key].numel()
    )
    for tensor in (weights[name].double() - first_weights[name].double(), weights[name].double()):
        yield tensor.flatten()[:WINDOW].numpy()


def _sent(line: Mapping[str, Any]) -> Iterator[Vector]:
    """Yield every value of an answer as numbers; the parts of a list also one after another."""
    for described in line.get("records", {}).values():
        for value in described.get("values", {}).values():
            yield from vectors(value)
            if isinstance(value, list) and value and isinstance(value[0], Mapping):
                firsts = [next(islice(vectors(part), 1), None) for part in value]
                yield np.concatenate([first for first in firsts if first is not None])
