"""Secure aggregation as an ideal functionality: what several clients sent goes on as one mean."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedmjp.errors import FederationError
from fedmjp.wire import ARRAYS, BUFFERS, COUNTS, EXAMPLES, METRICS, REFUSED, mean_of
from server.between import Between
from server.screening import last_line, plausible


class SecureSum(Between):
    """Stands between the clients and everything else of a server, which never sees what a single client sent.

    Training messages that follow each other are of one group, as many as are summed. Of a group only the mean of the
    updates goes on, weighted by the numbers of pictures, as the answer to its first message. It is the ideal that a
    protocol of secure aggregation aims at, not such a protocol. If one member fails, its group is refused.

    Args:
        grid: That reaches the clients, and hands on what is fit to be summed, and errors.
        clients: Of a group.
        number: The client that a node is, for who reads reasons.
    """

    def __init__(self, grid: Grid, clients: int, number: Callable[[int], int]) -> None:
        super().__init__(grid)
        self._clients, self._number = clients, number

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, wait for the replies, hand their means on."""
        outgoing = list(messages)
        replies = list(super().send_and_receive(outgoing, timeout=timeout))
        training = [each for each in outgoing if each.metadata.message_type == MessageType.TRAIN]
        if self._clients == 1 or not training:
            return replies
        answers = {reply.metadata.reply_to_message_id: reply for reply in replies}
        starts = range(0, len(training), self._clients)
        return [self._mean(training[first : first + self._clients], answers) for first in starts]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refused: who fetches replies one by one could see them.

        Raises:
            FederationError: Always, where updates are summed.
        """
        if self._clients > 1:
            raise FederationError("updates are summed: send and receive the messages of a round together")
        return super().push_messages(messages)

    def _mean(self, group: Sequence[Message], answers: Mapping[str, Message]) -> Message:
        replies = []
        for message in group:
            reply = answers.get(message.metadata.message_id)
            if reply is None or reply.has_error():
                reason = "did not answer" if reply is None else last_line(reply.error.reason or "")
                told = f"client {self._number(message.metadata.dst_node_id)} of its group: {reason}"
                return Message(Error(code=REFUSED, reason=told), reply_to=group[0])
            replies.append(reply)
        return Message(content=_mean_content([reply.content for reply in replies]), reply_to=group[0])


def _mean_content(contents: Sequence[RecordDict]) -> RecordDict:
    metrics = [dict(content.metric_records[METRICS]) for content in contents]
    examples = [_number(each[EXAMPLES]) for each in metrics]
    found = RecordDict({METRICS: MetricRecord({**_mean_metrics(metrics, examples)})})
    for record in (ARRAYS, BUFFERS):
        if record in contents[0].array_records:
            found[record] = ArrayRecord(mean_of([_tensors(each, record) for each in contents], examples))
    return found


def _mean_metrics(metrics: Sequence[Mapping[str, Any]], examples: Sequence[float]) -> dict[str, float]:
    """Counts are added, what was measured is averaged over the pictures; what one reports that cannot be is left 0."""
    found: dict[str, float] = {}
    for name in metrics[0]:
        values = [float(each[name]) if plausible(each[name]) else 0.0 for each in metrics]
        weighed = sum(count * value for count, value in zip(examples, values, strict=True)) / sum(examples)
        found[name] = sum(values) if name in COUNTS else weighed
    return found


def _number(value: Any) -> float:
    return float(value)


def _tensors(content: RecordDict, record: str) -> dict[str, Tensor]:
    return dict(content.array_records[record].to_torch_state_dict())
