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


class Part(NamedTuple):
    """An update, one of its tensors, or the change of a buffer."""

    said: str
    length: float  # Euclidean
    share: float  # of the update's values that it holds; 0 of a buffer, which is none of them


def too_long(parts: Mapping[Client, Sequence[Part]], max_norm: float) -> dict[Client, str]:
    """Clients whose update is too long to be an honest one, with the reason in one line; nobody in a small round.

    Lengths are held against the lower median of the round, which clients decide that are not hostile while those are
    fewer than half. For a tensor that is short in most of them, as pruned ones are, the length is usual that it would
    have if all values of the median update were alike.

    Args:
        parts: Of the updates of a round, as ``parts_of`` measures them.
        max_norm: How many times as long as the median an update, and each tensor of it, may be; 0 refuses nobody.
    """
    if not max_norm or len(parts) < FEWEST:
        return {}
    whole, *others = (median_low(part.length for part in column) for column in zip(*parts.values(), strict=True))
    reasons = {}
    for client, measured in parts.items():
        usual = [whole, *(max(m, whole * math.sqrt(p.share)) for m, p in zip(others, measured[1:], strict=True))]
        times = [_times(part, reference) for part, reference in zip(measured, usual, strict=True)]
        worst = max(range(len(times)), key=lambda place: (times[place] > max_norm, -place))
        if times[worst] > max_norm:
            reasons[client] = (
                f"{measured[worst].said} is {times[worst]:.3g} times as long as is usual in its round; "
                f"max_norm={max_norm:g} allows {max_norm:g} times"
            )
    return reasons


def bound_examples(metrics: Mapping[Client, MetricRecord]) -> dict[Client, int]:
    """Lower numbers of pictures, which nobody can check, to a few medians of the round's; who had said how many."""
    said = {client: int(cast(float, reported[EXAMPLES])) for client, reported in metrics.items()}
    most = MOST_WEIGHT * median_low(said.values()) if said else 0
    lowered = {client: count for client, count in said.items() if count > most}
    for client in lowered:
        metrics[client][EXAMPLES] = most
    return lowered


def _times(part: Part, usual: float) -> float:
    """How many times as long as usual; a buffer that moves where most clients' stay is beyond all bounds."""
    if usual:
        return part.length / usual
    return math.inf if part.length and not part.share else 0.0


def parts_of(reply: Message, sent: Mapping[str, ArrayRecord]) -> list[Part]:
    """How long a screened reply's whole update is, then its tensors by name, then what became of the buffers sent."""
    records = reply.content.array_records
    update = sorted(records[ARRAYS].to_torch_state_dict().items())
    buffers = records.get(BUFFERS, ArrayRecord()).to_torch_state_dict()
    before = sent[BUFFERS].to_torch_state_dict() if buffers else {}
    values = sum(tensor.numel() for _, tensor in update)
    tensors = [
        Part(f"tensor {name!r} of its update", float(tensor.double().norm()), tensor.numel() / values)
        for name, tensor in update
    ]
    moved = [
        Part(f"the change of buffer {name!r}", float((buffers[name].double() - before[name].double()).norm()), 0.0)
        for name in sorted(buffers)
    ]
    return [Part("its update", math.hypot(*(part.length for part in tensors)), 1.0), *tensors, *moved]
