"""The tap: what crosses the wire in a round is recorded, as the server has it."""

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from flwr.app import Message

from fedmjp.config import UpdateKind
from fedmjp.records import Upload
from fedmjp.wire import ARRAYS, EXAMPLES, METRICS
from server.uploads import UploadFolder


def record_round(
    folder: UploadFolder,
    messages: Sequence[Message],
    replies: Iterable[Message],
    *,
    server_round: int,
    kind: UpdateKind,
    number: Callable[[int], int],
) -> None:
    """Keep the weights that messages hold, and the uploads that answer them; errors among the replies are passed over.

    Args:
        folder: Where they go.
        messages: Of the round.
        replies: That were screened.
        server_round: From 1.
        kind: What the clients were asked to send.
        number: Of the client at each node, which is the same in every run.

    Raises:
        RecordError: If a reply is no upload.
    """
    asked = {message.metadata.message_id: message for message in messages}
    digests: dict[int, str] = {}  # strategies put one content into all messages of a round
    for content in (message.content for message in messages):
        if id(content) not in digests:
            records = content.array_records.values()
            weights = {name: value for each in records for name, value in each.to_torch_state_dict().items()}
            digests[id(content)] = folder.keep_weights(weights)
    for reply in replies:
        message = asked.get(reply.metadata.reply_to_message_id)
        if message is None or reply.has_error():
            continue
        upload = Upload(
            tensors=dict(reply.content.array_records[ARRAYS].to_torch_state_dict()),
            kind=kind,
            num_examples=int(cast(int, reply.content.metric_records[METRICS][EXAMPLES])),
            server_round=server_round,
            node=number(message.metadata.dst_node_id),
            weights=digests[id(message.content)],
        )
        folder.keep(upload)
