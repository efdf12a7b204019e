"""A Flower Grid that records what crosses the wire, whatever strategy drives it."""

from collections.abc import Iterable
from typing import NamedTuple

from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from torch import Tensor

from fedmjp.config import UpdateKind
from fedmjp.errors import RecordError
from fedmjp.records import Upload
from server.screening import last_line
from server.uploads import UploadFolder


class _Sent(NamedTuple):
    server_round: int
    weights: str


class UploadTap(Grid):
    """Wraps a Grid: everything passes through unchanged, replies to training messages are recorded.

    It counts rounds itself: a round is a set of training messages sent together.

    Args:
        grid: The Grid that does the work.
        folder: Where uploads go; None records nothing.
        kind: What the clients were asked to send.

    Attributes:
        failures: One line per reply that was an error or could not be an upload.
    """

    def __init__(self, grid: Grid, folder: UploadFolder | None, kind: UpdateKind) -> None:
        self._grid = grid
        self._kind = kind
        self._folder = folder
        self._sent: dict[str, _Sent] = {}
        self._rounds = 0
        self.failures: list[str] = []

    def set_run(self, run: Run) -> None:
        """Hand through."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """Hand through."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Hand through."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Hand through."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Hand through."""
        return self._grid.get_nodes()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send, wait for the replies, record both sides."""
        outgoing = list(messages)
        replies = list(self._grid.send_and_receive(outgoing, timeout=timeout))
        self._record_sent(outgoing)
        self._record_replies(replies)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send and record what was sent."""
        outgoing = list(messages)
        identifiers = list(self._grid.push_messages(outgoing))
        self._record_sent(outgoing)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch replies and record them."""
        replies = list(self._grid.pull_messages(message_ids))
        self._record_replies(replies)
        return replies

    def unanswered(self) -> list[str]:
        """One line per training message that no client has answered."""
        return [f"round {sent.server_round}: a client did not answer" for sent in self._sent.values()]

    def _record_sent(self, messages: list[Message]) -> None:
        training = [message for message in messages if message.metadata.message_type == MessageType.TRAIN]
        if self._folder is None or not training:
            return
        self._rounds += 1
        digests: dict[int, str] = {}  # strategies put one array record into all messages of a round
        for message in training:
            try:
                arrays = _only_arrays(message.content)
            except RecordError as error:
                self.failures.append(f"server, round {self._rounds}: {error}")
                continue
            if id(arrays) not in digests:
                digests[id(arrays)] = self._folder.keep_weights(_tensors(arrays))
            self._sent[message.metadata.message_id] = _Sent(self._rounds, digests[id(arrays)])

    def _record_replies(self, replies: list[Message]) -> None:
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


def _upload(reply: Message, sent: _Sent, kind: UpdateKind) -> Upload:
    metrics = next(iter(reply.content.metric_records.values()), MetricRecord())
    return Upload(
        tensors=_tensors(_only_arrays(reply.content)),
        kind=kind,
        num_examples=int(metrics.get("num-examples", 0)),  # type: ignore[arg-type]
        server_round=sent.server_round,
        node=reply.metadata.src_node_id,
        weights=sent.weights,
    )


def _only_arrays(content: RecordDict) -> ArrayRecord:
    if len(content.array_records) != 1:
        raise RecordError(f"a training message with {len(content.array_records)} array records instead of one")
    return next(iter(content.array_records.values()))


def _tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    return dict(arrays.to_torch_state_dict())
