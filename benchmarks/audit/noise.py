"""What is done to an upload between the last step and the wire, from what hooks saw and from repeats of a message."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmjp.benchmarks.audit.evaluating import read_trained
from fedmjp.benchmarks.audit.network import by_name
from fedmjp.benchmarks.audit.running import Records, lines
from fedmjp.benchmarks.audit.wire import Answer

EQUAL = 1e-6  # relative difference that rounding leaves
DROWNED = 0.9  # share of an answer from which on noise hides what one example did
SMALL = 1e-3  # share of an update's length from which on something was added to it


@dataclass(frozen=True)
class Repeats:
    """Two answers of one client to the same message."""

    is_alike: bool  # whether they began with the same weights, batches and draws
    deviation: float  # standard deviation of the noise in one number of one answer
    share: float  # of the length of an answer's update that is noise

    @property
    def is_noisy(self) -> bool:
        """Whether the answers differ by more than rounding."""
        return self.share > SMALL

    @property
    def drowns(self) -> bool:
        """Tell whether fresh noise is all but all of what a client says."""
        return self.is_alike and self.share >= DROWNED


@dataclass(frozen=True)
class Change:
    """An update as it left, beside what was trained: a multiple of it, and something added."""

    length: float  # of the update as it was trained
    factor: float
    added: float  # length of what was added
    entries: int
    rounding: float  # length of what rounding alone may add

    @property
    def deviation(self) -> float:
        """Return the standard deviation of what was added to one number."""
        return self.added / math.sqrt(self.entries)

    @property
    def is_noisy(self) -> bool:
        """Whether more was added than rounding does."""
        return self.added > max(self.rounding, SMALL * abs(self.factor) * self.length)

    @property
    def drowns(self) -> bool:
        """Tell whether what was added is all but all of the update that left."""
        return self.added >= DROWNED * math.hypot(self.added, self.factor * self.length)

    @property
    def is_scaled(self) -> bool:
        """Tell whether the update is longer or shorter than it was trained, by more than noise explains."""
        return abs(self.factor - 1) > SMALL + 3 * self.deviation / self.length

    def departure(self, repeats: Repeats | None) -> str | None:
        """Explain that other weights were mixed in, where what was added is no noise; None if it may be noise.

        Args:
            repeats: Two answers to one message, which show whether noise is drawn.
        """
        if not self.is_noisy or repeats is None or not repeats.is_alike or repeats.is_noisy:
            return None
        return (
            "the update is no gradient of this round: what left is what was trained and something besides, "
            f"{self.added / self.length:.2g} times as long and the same in every repeat, as an average with earlier "
            "weights or a change from another base is"
        )


def measure_change(answer: Answer, folder: Path) -> Change | None:
    """Compare an answer with the weights at the end of training; None where nothing was seen or trained.

    Args:
        answer: Of which arrays were kept.
        folder: The evaluator's.
    """
    trained = read_trained(folder, answer.message)
    answered, sent = (by_name(trained, arrays) for arrays in (answer.arrays, answer.sent))
    names = [name for name in answered if name in trained and name in sent and answered[name].is_floating_point()]
    if not names:
        return None
    start = flat(sent, names)
    update, reply = (flat(state, names) - start for state in (trained, answered))
    if not bool(update.any()):
        return None
    factor = float((reply @ update) / (update @ update))
    added = reply - factor * update
    rounding = EQUAL * max(float(reply.norm()), float(start.norm()))
    return Change(float(update.norm()), factor, float(added.norm()), len(added), rounding)


def measure_repeats(records: Records, answers: Sequence[Answer]) -> Repeats | None:
    """Compare two answers to the same message, which drew the same but for noise; None where nobody repeated one.

    Args:
        records: Of the run.
        answers: Of which arrays were kept, to find the message that was repeated.
    """
    noted = lines(records.server / "repeats.jsonl")
    original = next((answer for answer in answers if noted and answer.message == noted[0]["of"]), None)
    if len(noted) < 2 or original is None:
        return None
    first, second = (
        replace(original, message=line["id"], file=records.server / line["file"]).update for line in noted[:2]
    )
    names = [name for name in first if name in second]
    first_update, second_update = (flat(update, names) for update in (first, second))
    noise, length = (
        float((first_update - second_update).norm()) / math.sqrt(2),
        max(float(first_update.norm()), float(second_update.norm())),
    )
    deviation = noise / math.sqrt(max(len(first_update), 1))
    return Repeats(_began_alike(records, noted), deviation, noise / length if length else 0.0)


def flat(state: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Join tensors of these names, flattened, one after another.

    Args:
        state: Tensors by name.
        names: In the order of the result.
    """
    return torch.cat([state[name].double().flatten() for name in names])


def _began_alike(records: Records, noted: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether both repeats saw the same batches, and had the same loss before any noise."""
    watched = {line["id"]: line for line in lines(records.evaluator / "seen.jsonl")}
    losses = [watched[line["id"]]["first_loss"] for line in noted[:2] if line["id"] in watched]
    first_batches, second_batches = (_batches(records.evaluator / f"{line['id']}.npz") for line in noted[:2])
    equal = first_batches.keys() == second_batches.keys() and all(
        np.array_equal(first_batches[name], second_batches[name]) for name in first_batches
    )
    return bool(first_batches) and equal and len(losses) == 2 and math.isclose(*losses, rel_tol=EQUAL)


def _batches(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    if not path.exists():
        return {}
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
