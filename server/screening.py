"""Which replies of a round are fit to be aggregated, and why the others are not."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

from fedmjp.wire import EXAMPLES, METRICS, REFUSED, REPORTED

LONGEST = 500  # letters of a reason: clients write part of it
LARGEST = 2**31  # of any count or measurement that a client reports
HEADER = 4096  # bytes that NumPy puts before an array's values, at most


def screen(
    messages: Iterable[Message], replies: Iterable[Message], check: Callable[[int, Message], str | None]
) -> Iterator[Message]:
    """Pass replies on as they come; replace each unusable one by an error with the reason.

    Args:
        messages: Those that were sent in the round.
        replies: The answers to them.
        check: Returns the reason why a node's reply cannot be aggregated; None if it can.
    """
    sent = {message.metadata.message_id: message for message in messages}
    for reply in replies:
        # Flower's own error replies come from another node than the message went to.
        message = sent.get(reply.metadata.reply_to_message_id)
        if message and (reason := check(message.metadata.dst_node_id, reply)) is not None:
            yield Message(Error(code=REFUSED, reason=reason), reply_to=message)
        else:
            yield reply


def refusal(
    reply: Message,
    expected: Mapping[str, ArrayRecord],
    most: int = LARGEST,
    reported: Collection[str] = REPORTED,
) -> str | None:
    """Return the reason why a reply cannot be used, in one line; None if it can.

    Args:
        reply: Of one client.
        expected: By record name: the reply must hold tensors of the same names, shapes and types.
        most: Pictures that the client can have; it has that much weight in the mean.
        reported: Names of the metrics that it must report.
    """
    if reply.has_error():
        return last_line(reply.error.reason or "")
    sent = reply.content
    reason = _wrong_layout(sent, expected) or _wrong_tensors(sent, expected) or _wrong_metrics(sent, most, reported)
    return last_line(reason) if reason else None


def last_line(reason: str) -> str:
    """Return the last line of a reason: simulations put the whole traceback into it.

    Args:
        reason: Text of any length, which a client may have written.
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    line = "".join(letter if letter.isprintable() else " " for letter in (lines or ["no reason given"])[-1])
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."


def plausible(value: object) -> bool:
    """Tell whether a client can have counted or measured this: a single number that is not absurd.

    Args:
        value: As the client reports it.
    """
    return isinstance(value, int | float) and 0 <= value <= LARGEST


def _wrong_layout(content: RecordDict, sent: Mapping[str, ArrayRecord]) -> str | None:
    expected = {*sent, METRICS}
    arrays, metrics = content.array_records, content.metric_records
    if set(content) != expected or set(arrays) != set(sent) or METRICS not in metrics:
        return f"sent the records {_listed(set(content))} instead of {_listed(expected)}"
    return None


def _wrong_tensors(content: RecordDict, sent: Mapping[str, ArrayRecord]) -> str | None:
    for record, expected in sent.items():
        arrays = content.array_records[record]
        if missing := expected.keys() - arrays.keys():
            return f"sent no tensor {_listed(set(missing))}"
        if unknown := arrays.keys() - expected.keys():
            return f"sent a tensor that nobody asked for: {_listed(set(unknown))}"
        for name, array in expected.items():
            if problem := _misstated(arrays[name], array) or _wrong_values(arrays[name], array):
                return f"tensor {name!r} {problem}"
    return None


def _misstated(array: Array, expected: Array) -> str | None:
    """Check a tensor before its bytes are read; return the problem, if any."""
    if tuple(array.shape) != tuple(expected.shape):
        return f"has shape {tuple(array.shape)}, the model's has {tuple(expected.shape)}"
    if array.dtype != expected.dtype:
        return f"holds {array.dtype}, the model's holds {expected.dtype}"
    if array.stype != expected.stype:
        return f"is packed as {array.stype!r}, the model's as {expected.stype!r}"
    if len(array.data) > len(expected.data) + HEADER:
        return f"has {len(array.data)} bytes, the model's has {len(expected.data)}"
    return None


def _wrong_values(array: Array, expected: Array) -> str | None:
    try:
        values: object = array.numpy()  # Flower promises an array, an archive of arrays is none
    except Exception as error:  # noqa: BLE001 (a stranger's bytes: whatever reading them raises, they are refused)
        return f"cannot be read: {last_line(str(error))}"
    # What was stated of it may be untrue of the bytes.
    if not isinstance(values, np.ndarray):
        return "holds no single array"
    if values.shape != tuple(expected.shape) or str(values.dtype) != expected.dtype:
        return f"holds {values.dtype} {values.shape}, not what it states"
    if not np.isfinite(values).all():
        return "holds NaN or infinite values"
    return None


def _wrong_metrics(content: RecordDict, most: int, reported: Collection[str]) -> str | None:
    """Check the weight in the mean; other absurd metrics are left out of the history."""
    metrics: MetricRecord = content.metric_records[METRICS]
    if set(metrics) != set(reported):
        return f"reported {_listed(set(metrics))} instead of {_listed(set(reported))}"
    examples = metrics[EXAMPLES]
    if not isinstance(examples, int | float) or not 1 <= examples <= most or examples != int(examples):
        return f"reported {EXAMPLES} = {examples}, not a whole number from 1 to {most}"
    return None


def _listed(names: set[str], most: int = 3) -> str:
    """Write the first names and the count of the omitted ones."""
    listed = sorted(map(repr, names))[:most]
    more = len(names) - len(listed)
    return (", ".join(listed) or "none") + (f" and {more} more" if more else "")
