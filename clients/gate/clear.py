"""What leaves in clear: everything of a message but real numbers in arrays, counted and held against the policy."""

from collections.abc import Iterator, Mapping
from typing import Any

from flwr.app import Message, RecordDict

from fedmjp.clients.gate.policy import Clear
from fedmjp.clients.gate.reading import ReplyReading
from fedmjp.clients.gate.reasons import Reason
from fedmjp.texts import printable

SHOWN = 40  # letters of a name that a ledger holds


def list_leaving(content: RecordDict) -> tuple[str, ...]:
    """List the records of a reply by name, with their sizes, for the ledger.

    Args:
        content: Of the reply.
    """
    lines = []
    for name, record in content.array_records.items():
        size = sum(len(array.data) for array in record.values())
        lines.append(f"{printable(name)[:SHOWN]}: {len(record)} arrays, {size} bytes")
    for name, values in _plain(content):
        keys = sorted(printable(str(key))[:SHOWN] for key in values)[:16]
        lines.append(f"{printable(name)[:SHOWN]}: {', '.join(keys) or 'nothing'}")
    return tuple(lines)


def find_clear_refusal(content: RecordDict, policy: Clear, reading: ReplyReading | None = None) -> Reason | None:
    """Find why what leaves in clear may not leave.

    Args:
        content: Of the reply.
        policy: What may leave in clear.
        reading: Of the reply, whose whole numbers and new names leave in clear as well.

    Returns:
        The reason; None if all may leave.
    """
    numbers, text = 0, 0
    for name, values in _plain(content):
        text += len(name)
        for key, value in values.items():
            text += len(str(key))
            counted, letters = _size(value)
            numbers, text = numbers + counted, text + letters
    if reading is not None:
        text, numbers = text + reading.letters, numbers + reading.counters
    if numbers > policy.values:
        return Reason.NUMBERS
    if text > policy.bytes:
        return Reason.TEXT
    return None


def find_bounds_refusal(message: Message, bounds: Mapping[str, tuple[float, float]]) -> Reason | None:
    """Find a setting of the server's that is out of the site's bounds.

    Args:
        message: From the server.
        bounds: Least and greatest value by name, with dashes.

    Returns:
        The reason; None if all are within.
    """
    for _, values in _plain(message.content):
        for key, value in values.items():
            if (bound := bounds.get(_dashed(str(key)))) is not None:
                numbers = value if isinstance(value, list) else [value]
                if not all(isinstance(number, int | float) and is_within(number, bound) for number in numbers):
                    return Reason.BOUNDS
    return None


def is_within(number: float, bound: tuple[float, float]) -> bool:
    """Tell whether a number lies between two bounds; NaN never does.

    Args:
        number: The number.
        bound: Least and greatest value.
    """
    return bound[0] <= number <= bound[1]


def _dashed(key: str) -> str:
    return key.replace("_", "-")


def _plain(content: RecordDict) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for records in (content.metric_records, content.config_records):
        yield from ((str(name), dict(record)) for name, record in records.items())


def _size(value: object) -> tuple[int, int]:
    """Count numbers and letters in a value of a record."""
    if isinstance(value, str):
        return 0, len(value.encode(errors="surrogatepass"))
    if isinstance(value, bytes):
        return 0, len(value)
    if isinstance(value, list):
        sizes = [_size(item) for item in value]
        return sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    return 1, 0
