"""What one client's update is held against: the others of its round."""

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple, TypeVar, cast

from flwr.app import ArrayRecord, Message, MetricRecord

from fedmjp.wire import ARRAYS, BUFFERS, EXAMPLES

FEWEST = 3  # updates that are compared: of two, nobody can say which is the odd one
MOST_WEIGHT = 3  # medians of a round's numbers of pictures that a client may count for, where nobody knows its share
Client = TypeVar("Client", bound=Hashable)


class UpdatePart(NamedTuple):
    """An update, one of its tensors, or the change of a buffer."""

    label: str
    length: float  # Euclidean
    share: float  # of the update's values that it holds; 0 of a buffer, which is none of them


def find_long_updates(parts: Mapping[Client, Sequence[UpdatePart]], max_norm: float) -> dict[Client, str]:
    """Find the clients whose update is too long to be honest, with the reason in one line; none in a small round.

    Lengths are held against the lower median of the round, which clients decide that are not hostile while those are
    fewer than half. For a tensor that is short in most of them, as pruned ones are, the length is usual that it would
    have if all values of the median update were alike.

    Args:
        parts: Of the updates of a round, as ``measure_parts`` returns them.
        max_norm: How many times as long as the median an update, and each tensor of it, may be; 0 refuses nobody.
    """
    if not max_norm or len(parts) < FEWEST:
        return {}
    whole, *medians = (median_low(part.length for part in column) for column in zip(*parts.values(), strict=True))
    reasons = {}
    for client, measured in parts.items():
        usual = [whole, *(max(m, whole * math.sqrt(p.share)) for m, p in zip(medians, measured[1:], strict=True))]
        times = [_times(part, reference) for part, reference in zip(measured, usual, strict=True)]
        worst = max(range(len(times)), key=lambda place: (times[place] > max_norm, -place))
        if times[worst] > max_norm:
            reasons[client] = (
                f"{measured[worst].label} is {times[worst]:.3g} times as long as is usual in its round; "
                f"max_norm={max_norm:g} allows {max_norm:g} times"
            )
    return reasons


def bound_examples(metrics: Mapping[Client, MetricRecord]) -> dict[Client, int]:
    """Lower numbers of pictures, which nobody can check, to a few medians of the round's.

    Args:
        metrics: Of the clients of a round; changed in place.

    Returns:
        The number that each lowered client had claimed.
    """
    claimed = {client: int(cast(float, reported[EXAMPLES])) for client, reported in metrics.items()}
    most = MOST_WEIGHT * median_low(claimed.values()) if claimed else 0
    lowered = {client: count for client, count in claimed.items() if count > most}
    for client in lowered:
        metrics[client][EXAMPLES] = most
    return lowered


def _times(part: UpdatePart, usual: float) -> float:
    """Divide a length by the usual one; a buffer that moves where most clients' stay gives infinity."""
    if usual:
        return part.length / usual
    return math.inf if part.length and not part.share else 0.0


def measure_parts(reply: Message, sent: Mapping[str, ArrayRecord]) -> list[UpdatePart]:
    """Measure a screened reply's whole update, then its tensors by name, then the changes of buffers.

    Args:
        reply: Of a client.
        sent: The records of the weights that it answers.
    """
    records = reply.content.array_records
    update = sorted(records[ARRAYS].to_torch_state_dict().items())
    buffers = records.get(BUFFERS, ArrayRecord()).to_torch_state_dict()
    sent_buffers = sent[BUFFERS].to_torch_state_dict() if buffers else {}
    values = sum(tensor.numel() for _, tensor in update)
    tensors = [
        UpdatePart(f"tensor {name!r} of its update", float(tensor.double().norm()), tensor.numel() / values)
        for name, tensor in update
    ]
    moved = [
        UpdatePart(
            f"the change of buffer {name!r}", float((buffers[name].double() - sent_buffers[name].double()).norm()), 0.0
        )
        for name in sorted(buffers)
    ]
    return [UpdatePart("its update", math.hypot(*(part.length for part in tensors)), 1.0), *tensors, *moved]
