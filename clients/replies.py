"""Replies of Flower apps as updates: what a reply's arrays are relative to, and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedmjp.config import UpdateKind
from fedmjp.defences.base import Client, require_finite
from fedmjp.defences.clipping import global_norm
from fedmjp.errors import DefenceError
from fedmjp.models.roles import roles_of_tensors
from fedmjp.tensors import FARTHEST

Kind = Literal["weights", "gradient", "change"]


@dataclass(frozen=True)
class Update:
    """What a reply's only array record says to a server that knows what it had sent."""

    key: str  # of the record
    tensors: Mapping[str, Tensor]  # as they would leave
    base: Mapping[str, Tensor]  # weights that were sent, or zeros of a gradient
    weights: Mapping[str, Tensor]  # weights that were sent, by the same names; zeros where they are not known
    kind: UpdateKind
    examples: int | None  # that the reply claims

    @cached_property
    def change(self) -> dict[str, Tensor]:
        """Compute the gradient or change of the weights, in float32 at least; whole numbers stay as they are."""
        return {name: _minus(tensor, self.base[name]) for name, tensor in self.tensors.items()}

    @property
    def client(self) -> Client:
        """Describe the client to a defence."""
        return Client(self.kind, roles_of_tensors(self.tensors), self.examples or 1)

    def record(self, protected: Mapping[str, Tensor]) -> ArrayRecord:
        """Build what leaves in place of the record; withheld tensors leave as they were sent.

        Args:
            protected: Protected gradients or changes, by name.
        """
        return ArrayRecord(
            {
                name: _plus(self.base[name], protected[name]).to(tensor.dtype) if name in protected else self.base[name]
                for name, tensor in self.tensors.items()
            }
        )


class SentArrays:
    """The arrays of a message as they are now: an app may change the message."""

    def __init__(self, message: Message) -> None:
        records = message.content.array_records
        self._records = {str(name): ArrayRecord(dict(record)) for name, record in records.items()}

    @cached_property
    def named(self) -> dict[str, dict[str, Tensor]]:
        """Read the tensors of each record, by its name.

        Raises:
            DefenceError: If one is complex.
        """
        return {name: read_tensors(record) for name, record in self._records.items()}

    @property
    def weights(self) -> list[dict[str, Tensor]]:
        """Read the tensors of each record.

        Raises:
            DefenceError: If one is complex.
        """
        return list(self.named.values())


def read_update(reply: Message, sent: SentArrays, kind: Kind | None, who: str) -> Update:
    """Read the update in a reply.

    Args:
        reply: Of the app.
        sent: What the server had sent.
        kind: What the reply holds, "change" that of the weights; None takes it for weights where they are near enough
            to those sent.
        who: Begins messages.

    Raises:
        DefenceError: If it has not one array record of finite real numbers, or nobody can tell what it is.
    """
    records = dict(reply.content.array_records)
    if len(records) != 1:
        raise DefenceError(f"{who}: the reply has {len(records)} array records, it must have one")
    ((key, record),) = records.items()
    tensors = read_tensors(record)
    require_finite(tensors, who)
    if not any(tensor.is_floating_point() for tensor in tensors.values()):
        raise DefenceError(f"{who}: the reply has no tensors of real numbers to protect")
    base = _base(tensors, sent, kind, who)
    kind_of_update: UpdateKind = "gradient" if kind == "gradient" else "delta"
    return Update(key, tensors, base, _weights(base, sent), kind_of_update, count_examples(reply))


def read_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Read the tensors of a record.

    Args:
        record: Of a message.

    Raises:
        DefenceError: If one is complex.
    """
    tensors = dict(record.to_torch_state_dict())
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise DefenceError(f"tensor {name!r} holds complex numbers, which no defence protects")
    return tensors


def _base(tensors: Mapping[str, Tensor], sent: SentArrays, kind: Kind | None, who: str) -> dict[str, Tensor]:
    """Find what the reply is relative to: the weights that were sent, or zeros."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    if kind in ("gradient", "change"):
        return zeros
    fitting = [weights for weights in sent.weights if _layout(weights) == _layout(tensors)]
    if len(fitting) != 1:
        raise DefenceError(
            f"{who}: the reply has not the names and shapes of the weights that were sent; "
            'if it holds gradients, set kind="gradient"'
        )
    base = fitting[0]
    if kind is None:
        moved = {name: _minus(tensor, base[name]) for name, tensor in tensors.items()}
        length = global_norm(base)
        # From weights of zeros both kinds are the same numbers.
        if length and not global_norm(moved) <= FARTHEST * length:
            raise DefenceError(
                f"{who}: the reply is so far from the weights that were sent that it may be a "
                'gradient; set kind="weights" or kind="gradient"'
            )
    return base


def _weights(base: Mapping[str, Tensor], sent: SentArrays) -> Mapping[str, Tensor]:
    for weights in sent.weights:
        if all(name in weights and weights[name].shape == tensor.shape for name, tensor in base.items()):
            return {name: weights[name] for name in base}
    return base


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, bool]]:
    return {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in tensors.items()}


def _minus(tensor: Tensor, base: Tensor) -> Tensor:
    """Subtract in float32 at least; of whole numbers and truth values, the bits that differ."""
    if not tensor.is_floating_point():
        return tensor ^ base.to(tensor.dtype)
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.to(wide) - base.to(wide)


def _plus(base: Tensor, change: Tensor) -> Tensor:
    return base.to(change.dtype) + change if change.is_floating_point() else base.to(change.dtype) ^ change


def count_examples(reply: Message) -> int | None:
    """Return the number of examples that a reply claims; None where it claims none.

    Args:
        reply: Of the app.
    """
    for record in reply.content.metric_records.values():
        for name in ("num-examples", "num_examples"):
            if isinstance(count := record.get(name), int) and count > 0:
                return count
    return None
