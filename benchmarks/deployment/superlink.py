"""``flower-superlink`` that holds SuperNodes apart, which Flower 1.41 does not.

Flower checks who a SuperNode is, and then only that the run is in progress: a node that knows the name of another's
message, which stands in the logs of both, may read it, have it forgotten, or answer it in the other's name. Here a node
gets at its own messages alone. Started as ``python -m benchmarks.deployment.superlink ARGUMENTS``.
"""

import sys
from typing import Any

from fastapi import HTTPException, Request
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.utils import uint64_to_int64
from flwr.superlink.cli import flower_superlink
from flwr.superlink.dependencies.linkstate import get_linkstate
from flwr.superlink.routers.fleet import node_auth
from sqlalchemy import select

FORBIDDEN = 403

authenticate = node_auth.authenticate_node


def authorise(request: Request) -> None:
    """Authenticate a SuperNode as Flower does, then refuse what concerns the messages of others."""
    authenticate(request)
    asked: Any = request.state.protobuf_request
    others = False
    if isinstance(asked, PushMessagesRequest):
        others = any(message.metadata.src_node_id != asked.node.node_id for message in asked.messages_list)
    elif isinstance(asked, PullObjectRequest):
        others = _is_of_others(request, asked.object_id, asked.node.node_id)
    elif isinstance(asked, ConfirmMessageReceivedRequest):
        others = _is_of_others(request, asked.message_object_id, asked.node.node_id)
    if others:
        raise HTTPException(FORBIDDEN, "the message is another SuperNode's")


def _is_of_others(request: Request, name: str, node: int) -> bool:
    """Whether an object is a message that is not for a node: for another one, or for the server."""
    state: Any = get_linkstate(request)
    with state.session() as session:
        receiver = session.scalar(select(MessageIns.dst_node_id).where(MessageIns.message_id == name))
        reply = session.scalar(select(MessageRes.message_id).where(MessageRes.message_id == name))
    return reply is not None or receiver not in (None, uint64_to_int64(node))


if __name__ == "__main__":
    node_auth.authenticate_node = authorise
    sys.argv[0] = "flower-superlink"
    flower_superlink()
