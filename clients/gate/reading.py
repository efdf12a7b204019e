"""Read a reply against what came in: arrays of the model as updates, and how much nobody can compare with anything.

Arrays that the server had sent are compared, in whatever record and however few of them came back. Control variates,
trees and other arrays that did not come in, and bytes, are counted. Their names, types and shapes are the reply's form.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from flwr.app import Message
from torch import Tensor

from fedmjp.clients.kinds import read_as_weights
from fedmjp.clients.replies import Kind, SentArrays, Update, count_examples, read_tensors
from fedmjp.config import UpdateKind
from fedmjp.defences.base import require_finite
from fedmjp.errors import DefenceError

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class ReplyReading:
    """What a reply says to a server that knows what it had sent."""

    updates: tuple[tuple[Update, ...], ...]  # of each record that holds some of what came in; the likelier first
    unjudged: Mapping[str, Tensors]  # what cannot be compared, by record
    names: frozenset[str]  # of all arrays that came in
    form: str  # SHA-256 of names, types and shapes
    examples: int | None  # that the reply claims

    @property
    def unjudged_bytes(self) -> int:
        """Count the bytes that nobody can compare with anything."""
        tensors = (tensor for record in self.unjudged.values() for tensor in record.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def letters(self) -> int:
        """Count the letters of names that did not come in."""
        return sum(len(name) for record in self.unjudged.values() for name in record if name not in self.names)

    @cached_property
    def counters(self) -> int:
        """Count whole numbers that differ from those that were sent; counters that all grew alike are one number."""
        steps = [
            tensor.to(torch.int64) - update.base[name].to(torch.int64)
            for update, *_ in self.updates
            for name, tensor in update.tensors.items()
            if not tensor.is_floating_point()
        ]
        if all(step.numel() == 1 for step in steps) and len({int(step) for step in steps}) == 1:
            return int(bool(steps[0]))
        return sum(int(torch.count_nonzero(step)) for step in steps)

    def only_update(self) -> Update:
        """Return the update that a defence can protect.

        Raises:
            DefenceError: If the reply is not one update and nothing else, or nobody can tell what it holds.
        """
        if len(self.updates) != 1 or self.unjudged_bytes:
            raise DefenceError(
                f"a defence needs one record of arrays that came in; {len(self.updates)} records came back, and "
                f"{self.unjudged_bytes} bytes that did not come in"
            )
        (readings,) = self.updates
        if len(readings) != 1:
            raise DefenceError("the reply may hold weights or their change: set kind to weights, gradient or change")
        return readings[0]


def read_reply(reply: Message, sent: SentArrays, kind: Kind | None, who: str) -> ReplyReading:
    """Read the arrays of a reply.

    Args:
        reply: Of the app.
        sent: What the server had sent.
        kind: What the reply holds, "change" that of the weights; None tells it by what came in.
        who: Begins messages.

    Raises:
        DefenceError: If arrays hold other than finite real numbers.
    """
    records = {str(name): read_tensors(record) for name, record in reply.content.array_records.items()}
    for tensors in records.values():
        require_finite(tensors, who)
    examples, updates, unjudged = count_examples(reply), [], {}
    free = dict(sent.named)
    for name, tensors in sorted(records.items(), key=lambda pair: pair[0] not in free):
        base = _take_base(name, tensors, free)
        judged = {key: tensor for key, tensor in tensors.items() if key in base}
        if any(tensor.is_floating_point() for tensor in judged.values()):
            updates.append(tuple(_read(name, judged, base, kind, examples)))
        else:
            judged = {}
        if further := {key: tensor for key, tensor in tensors.items() if key not in judged}:
            unjudged[name] = further
    names = frozenset(key for weights in sent.weights for key in weights)
    return ReplyReading(tuple(updates), unjudged, names, _digest_form(records), examples)


def _read(name: str, tensors: Tensors, base: Tensors, kind: Kind | None, examples: int | None) -> Iterator[Update]:
    """Yield what a record may say, the likelier first."""
    readings = read_as_weights(tensors, base) if kind is None else (kind == "weights",)
    zeros = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    kind_of_update: UpdateKind = "gradient" if kind == "gradient" else "delta"
    for is_weights in readings:
        yield Update(name, tensors, base if is_weights else zeros, base, kind_of_update, examples)


def _take_base(name: str, tensors: Tensors, free: dict[str, dict[str, Tensor]]) -> Tensors:
    """Take what came in for the arrays of a record: the record of its name, or that of which most arrays fit."""
    fitting = {key: _fitting(tensors, weights) for key, weights in free.items() if name not in free or key == name}
    key = max(fitting, key=lambda source: len(fitting[source]), default=None)
    if key is None or not fitting[key]:
        return {}
    del free[key]
    return fitting[key]


def _fitting(tensors: Tensors, weights: Tensors) -> Tensors:
    return {
        name: weights[name]
        for name, tensor in tensors.items()
        if name in weights
        and tensor.shape == weights[name].shape
        and (weights[name].is_floating_point() or not tensor.is_floating_point())  # servers average counters, too
        and tensor.dtype != torch.uint8
    }


def _digest_form(records: Mapping[str, Tensors]) -> str:
    """Digest names, types and shapes; bytes may have any length, as trees that grow have."""
    form = [
        (name, key, str(tensor.dtype), None if _are_bytes(tensor) else list(tensor.shape))
        for name, tensors in sorted(records.items())
        for key, tensor in tensors.items()
    ]
    return hashlib.sha256(json.dumps(form).encode()).hexdigest()


def _are_bytes(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.ndim == 1
