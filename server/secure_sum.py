"""Secure aggregation as an ideal functionality: what several clients sent goes on as one mean."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from fedmjp.server.screening import last_line, plausible
from fedmjp.tensors import average_updates
from fedmjp.wire import ARRAYS, BUFFERS, COUNTS, EXAMPLES, METRICS, REFUSED


def sum_groups(
    messages: Sequence[Message], replies: Iterable[Message], clients: int, number: Callable[[int], int]
) -> Iterator[Message]:
    """Keep what a single client sent from everything else of a server.

    Messages of a round that follow each other are of one group of so many clients. Of a group only the mean of the
    updates goes on, weighted by the numbers of pictures, as the answer to its first message. It is the ideal that a
    protocol of secure aggregation aims at, not such a protocol. If one member fails, its group is refused: the reason
    names its number. A group is summed as soon as all of it has answered.

    Args:
        messages: Those of a round, group after group.
        replies: The answers, as they come.
        clients: Members of a group; 1 passes replies on.
        number: Returns a node's client number.
    """
    if clients == 1:
        yield from replies
        return
    groups = [messages[first : first + clients] for first in range(0, len(messages), clients)]
    group_of = {message.metadata.message_id: index for index, group in enumerate(groups) for message in group}
    waiting: dict[int, dict[str, Message]] = {index: {} for index in range(len(groups))}
    for reply in replies:
        message_id = reply.metadata.reply_to_message_id
        if (index := group_of.get(message_id, -1)) in waiting:
            waiting[index][message_id] = reply
            if len(waiting[index]) == len(groups[index]):
                yield _mean(groups[index], waiting.pop(index), number)
    for index, answers in waiting.items():
        yield _mean(groups[index], answers, number)


def _mean(group: Sequence[Message], answers: Mapping[str, Message], number: Callable[[int], int]) -> Message:
    contents = []
    for message in group:
        reply = answers.get(message.metadata.message_id)
        if reply is None or reply.has_error():
            reason = "did not answer" if reply is None else last_line(reply.error.reason or "")
            refusal = f"client {number(message.metadata.dst_node_id)} of its group: {reason}"
            return Message(Error(code=REFUSED, reason=refusal), reply_to=group[0])
        contents.append(reply.content)
    return Message(content=_mean_content(contents), reply_to=group[0])


def _mean_content(contents: Sequence[RecordDict]) -> RecordDict:
    metrics: list[dict[str, Any]] = [dict(content.metric_records[METRICS]) for content in contents]
    examples = [float(reported[EXAMPLES]) for reported in metrics]
    mean = RecordDict({METRICS: MetricRecord({**_mean_metrics(metrics, examples)})})
    for record in (ARRAYS, BUFFERS):
        if record in contents[0].array_records:
            mean[record] = ArrayRecord(average_updates([_tensors(content, record) for content in contents], examples))
    return mean


def _mean_metrics(metrics: Sequence[Mapping[str, Any]], examples: Sequence[float]) -> dict[str, float]:
    """Add counts and average measurements over the pictures; an implausible value counts as 0."""
    combined: dict[str, float] = {}
    for name in metrics[0]:
        values = [float(reported[name]) if plausible(reported[name]) else 0.0 for reported in metrics]
        weighed = sum(count * value for count, value in zip(examples, values, strict=True)) / sum(examples)
        combined[name] = sum(values) if name in COUNTS else weighed
    return combined


def _tensors(content: RecordDict, record: str) -> dict[str, Tensor]:
    return dict(content.array_records[record].to_torch_state_dict())
