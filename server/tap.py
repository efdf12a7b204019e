"""A Flower Grid that records what crosses the wire, whatever strategy drives it."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedmjp.config import UpdateKind
from fedmjp.errors import RecordError
from fedmjp.records import Upload
from fedmjp.server.screening import last_line
from fedmjp.server.uploads import UploadFolder
from fedmjp.tensors import are_weights
from fedmjp.wire import BUFFERS, EXAMPLES


class _Sent(NamedTuple):
    server_round: int
    digest: str
    weights: Mapping[str, Tensor]
    node: int


class UploadTap:
    """Wraps a Grid: everything passes through unchanged, replies to training messages are recorded.

    It counts rounds itself: a round is a set of training messages sent together. Replies that lie near the weights
    that were sent are weights, whatever was asked for; of others only who wrote the clients knows what they are.

    Args:
        grid: The Grid that does the work.
        folder: Where uploads go; None records nothing.
        kind: What the clients were asked to send; None where that is not known, as in somebody's own app.
        rounds: Rounds that were played before.
        number: A name for each node that is the same in every run.
    """

    def __init__(
        self,
        grid: Grid,
        folder: UploadFolder | None,
        kind: UpdateKind | None = None,
        *,
        rounds: int = 0,
        number: Callable[[int], int] = lambda node: node,
    ) -> None:
        self._grid, self._kind, self._folder, self._number = grid, kind, folder, number
        self._sent: dict[str, _Sent] = {}
        self._rounds = rounds
        self.failures: list[str] = []  # a line per reply that was an error or could not be an upload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, wait for the replies, record both sides.

        Args:
            messages: Those of a round.
            timeout: Seconds; None waits for all.
        """
        outgoing = list(messages)
        replies = list(self._grid.send_and_receive(outgoing, timeout=timeout))
        self.record_sent(outgoing)
        self.record_replies(replies)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and record the weights in them.

        Args:
            messages: Those of a round.
        """
        outgoing = list(messages)
        identifiers = list(self._grid.push_messages(outgoing))
        self.record_sent(outgoing)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch replies and record them.

        Args:
            message_ids: Of the messages whose replies are fetched.
        """
        replies = list(self._grid.pull_messages(message_ids))
        self.record_replies(replies)
        return replies

    def record_sent(self, messages: Iterable[Message]) -> None:
        """Keep the weights of a round's training messages.

        Args:
            messages: Those of a round; only training messages count.
        """
        training = [message for message in messages if message.metadata.message_type == MessageType.TRAIN]
        if self._folder is None or not training:
            return
        self._rounds += 1
        contents: dict[int, tuple[str, Mapping[str, Tensor]]] = {}  # strategies put one content into all messages
        for message in training:
            try:
                _only_arrays(message.content)
            except RecordError as error:
                self.failures.append(f"server, round {self._rounds}: {error}")
                continue
            content, node = message.content, self._number(message.metadata.dst_node_id)
            if id(content) not in contents:
                records = content.array_records.values()
                weights = {name: value for record in records for name, value in _tensors(record).items()}
                contents[id(content)] = self._folder.keep_weights(weights), weights
            self._sent[message.metadata.message_id] = _Sent(self._rounds, *contents[id(content)], node)

    def record_replies(self, replies: Iterable[Message]) -> None:
        """Keep the uploads among replies to the messages that were recorded.

        Args:
            replies: Of clients; errors are added to ``failures``.
        """
        for reply in replies:
            sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
            if reply.has_error():
                self.failures.append(f"client {reply.metadata.src_node_id}: {last_line(reply.error.reason or '')}")
                continue
            if self._folder is None or sent is None:
                continue
            try:
                self._folder.keep(_upload(reply, sent, self._kind))
            except RecordError as error:
                self.failures.append(f"client {reply.metadata.src_node_id}: {error}")


def _upload(reply: Message, sent: _Sent, stated: UpdateKind | None) -> Upload:
    metrics = next(iter(reply.content.metric_records.values()), MetricRecord())
    examples = metrics.get(EXAMPLES)
    tensors = _tensors(_only_arrays(reply.content))
    return Upload(
        tensors=tensors,
        kind="weights" if are_weights(tensors, sent.weights) else stated or "unknown",
        num_examples=int(examples) if isinstance(examples, int | float) and math.isfinite(examples) else 0,
        server_round=sent.server_round,
        node=sent.node,
        weights=sent.digest,
    )


def _only_arrays(content: RecordDict) -> ArrayRecord:
    records = [record for name, record in content.array_records.items() if name != BUFFERS]
    if len(records) != 1:
        raise RecordError(f"a training message with {len(records)} array records instead of one")
    return records[0]


def _tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    return dict(arrays.to_torch_state_dict())
