"""``flower-superlink`` that holds SuperNodes apart and loses nothing when it is killed, which Flower 1.41 does not.

- Flower checks who a SuperNode is, and then only that the run is in progress: a node that knows the name of another's
  message, which stands in the logs of both, may read it, have it forgotten, or answer it in the other's name. Here a
  node gets at its own messages alone.
- A message is handed out once. If the SuperLink dies before it arrives, everybody waits for ever. Here whatever was
  handed out and not confirmed is handed out again after a start. Nobody counts twice: a message has one reply.
- A part of a message that is sent again, because the answer was lost, fails the run. Here it is there already.

Started as ``python -m fedmjp.benchmarks.deployment.superlink --database FILE ARGUMENTS``.
"""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.date import now
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.utils import uint64_to_int64
from flwr.superlink.cli import flower_superlink
from flwr.superlink.dependencies.linkstate import get_linkstate
from flwr.superlink.routers.fleet import node_auth
from sqlalchemy import select, update

DATABASE, FORBIDDEN = "--database", 403
# The content of a message is there until its receiver confirms it.
HAND_OUT_AGAIN = """
UPDATE message_ins SET delivered_at = '' WHERE delivered_at <> ''
    AND message_id IN (SELECT object_id FROM objects)
    AND message_id NOT IN (SELECT reply_to_message_id FROM message_res);
UPDATE message_res SET delivered_at = '' WHERE delivered_at <> ''
    AND message_id IN (SELECT object_id FROM objects);
"""
TABLES = {"message_ins", "message_res", "objects"}

_authenticate, _store_object = node_auth.authenticate_node, SqlLinkState.store_object


def main() -> None:
    """Run the SuperLink."""
    changed: Any = SqlLinkState
    changed.store_object = store_object
    node_auth.authenticate_node = authorise
    hand_out_again(Path(sys.argv[sys.argv.index(DATABASE) + 1]))
    sys.argv[0] = "flower-superlink"
    flower_superlink()


def hand_out_again(database: Path) -> None:
    """Have messages handed out again that nobody confirmed, before a SuperLink starts."""
    if not database.exists():
        return
    with closing(sqlite3.connect(database)) as connection:
        # One that was killed at its first start may have left a file without all tables.
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables >= TABLES:
            connection.executescript(HAND_OUT_AGAIN)


def store_object(self: SqlLinkState, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
    """Store a part of a message; it may be there already."""
    stored = _store_object(self, run_id, session_id, object_id, object_content)
    return stored or bool(self.object_store.get(object_id))


def authorise(request: Request) -> None:
    """Authenticate a SuperNode as Flower does, then refuse what concerns the messages of others."""
    _authenticate(request)
    asked: Any = request.state.protobuf_request
    state: Any = get_linkstate(request)
    others = False
    if isinstance(asked, PushMessagesRequest):
        others = any(message.metadata.src_node_id != asked.node.node_id for message in asked.messages_list)
    elif isinstance(asked, PullObjectRequest):
        others = _is_of_others(state, asked.object_id, asked.node.node_id)
    elif isinstance(asked, ConfirmMessageReceivedRequest):
        others = _is_of_others(state, asked.message_object_id, asked.node.node_id)
        if not others:
            _note_delivery(state, asked.message_object_id)
    if others:
        raise HTTPException(FORBIDDEN, "the message is another SuperNode's")


def _is_of_others(state: Any, name: str, node: int) -> bool:
    """Whether an object is a message that is not for a node: for another one, or for the server."""
    with state.session() as session:
        receiver = session.scalar(select(MessageIns.dst_node_id).where(MessageIns.message_id == name))
        reply = session.scalar(select(MessageRes.message_id).where(MessageRes.message_id == name))
    return reply is not None or receiver not in (None, uint64_to_int64(node))


def _note_delivery(state: Any, name: str) -> None:
    """A node that confirms a message has it, also if it was handed out before the SuperLink started anew."""
    waiting = (MessageIns.message_id == name) & (MessageIns.delivered_at == "")
    with state.session() as session:
        session.execute(update(MessageIns).where(waiting).values(delivered_at=now().isoformat()))


if __name__ == "__main__":
    main()
