"""What leaves in clear: everything of a message but real numbers in arrays, counted and held against the policy."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fedmjp.clients.gate.policy import Clear
from fedmjp.clients.gate.reasons import Reason
from fedmjp.clients.replies import Update

SHOWN = 40  # letters of a name that a ledger holds
LEGACY = "fitres."  # how Flower's NumPyClient calls its records
# What Flower itself puts into replies of a NumPyClient.
OF_FLOWER = frozenset({"keep_input", "code", "message"})


def what_leaves(content: RecordDict) -> tuple[str, ...]:
    """Records by kind and name, with their sizes: for the ledger."""
    lines = []
    for name, record in content.array_records.items():
        size = sum(len(array.data) for array in record.values())
        lines.append(f"{name[:SHOWN]}: {len(record)} arrays, {size} bytes")
    for name, values in _plain(content):
        lines.append(f"{name[:SHOWN]}: " + (", ".join(sorted(str(key)[:SHOWN] for key in values)[:16]) or "nothing"))
    return tuple(lines)


def clear_refusal(content: RecordDict, policy: Clear, update: Update | None = None) -> Reason | None:
    """Why what leaves in clear may not; None if it may."""
    numbers, text = 0, 0
    for name, values in _plain(content):
        text += len(name)
        for key, value in values.items():
            text += len(str(key))
            counted, letters = _size(value)
            numbers, text = numbers + counted, text + letters
            if policy.names is not None and key not in (*policy.names, *OF_FLOWER) and not name.startswith(LEGACY):
                return Reason.NAMES
    if update is not None:
        text += sum(len(name) for name in update.tensors if name not in update.base)
        numbers += sum(_counters(tensor, update.base[name]) for name, tensor in update.tensors.items())
    if numbers > policy.values:
        return Reason.NUMBERS
    if text > policy.bytes:
        return Reason.TEXT
    return None


def bounds_refusal(message: Message, bounds: Mapping[str, tuple[float, float]]) -> Reason | None:
    """Why the server's settings are out of the site's bounds; None if they are not."""
    for _, values in _plain(message.content):
        for key, value in values.items():
            if (bound := bounds.get(_dashed(str(key)))) is not None:
                numbers = value if isinstance(value, list) else [value]
                if not all(isinstance(number, int | float) and within(number, bound) for number in numbers):
                    return Reason.BOUNDS
    return None


def within(number: float, bound: tuple[float, float]) -> bool:
    """Whether a number lies between; NaN never does."""
    return bound[0] <= number <= bound[1]


def _dashed(key: str) -> str:
    return key.replace("_", "-")


def _plain(content: RecordDict) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for records in (content.metric_records, content.config_records):
        yield from ((str(name), dict(record)) for name, record in records.items())


def _size(value: object) -> tuple[int, int]:
    """Numbers and letters in a value of a record."""
    if isinstance(value, str):
        return 0, len(value.encode(errors="surrogatepass"))
    if isinstance(value, bytes):
        return 0, len(value)
    if isinstance(value, list):
        sizes = [_size(item) for item in value]
        return sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    return 1, 0


def _counters(tensor: Tensor, base: Tensor) -> int:
    """Whole numbers that are not those that were sent: they leave as they are."""
    if tensor.is_floating_point():
        return 0
    return int(torch.count_nonzero(tensor.to(torch.int64) != base.to(torch.int64)))
