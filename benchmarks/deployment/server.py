"""The server's two programs of Flower: a SuperLink that holds SuperNodes apart and loses nothing, and its SuperExec.

Flower 1.41's SuperLink differs from ours in three points:

- Flower checks who a SuperNode is, and then only that the run is in progress: a node that knows the name of another's
  message, which stands in the logs of both, may read it, have it forgotten, or answer it in the other's name. Here a
  node gets at its own messages alone.
- A message is handed out once. If the SuperLink dies before it arrives, everybody waits for ever. Here whatever was
  handed out and not confirmed is handed out again after a start. Nobody counts twice: a message has one reply.
- A part of a message that is sent again, because the answer was lost, fails the run. Here it is there already.

Under load a connection to the database waits longer for another one than Flower lets it: "database is locked" is an
answer of HTTP 500, which ends a SuperNode.
"""

import os
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.supercore.cli import flower_superexec
from flwr.supercore.date import now
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.utils import uint64_to_int64
from flwr.superlink.cli import flower_superlink
from flwr.superlink.dependencies.linkstate import get_linkstate
from flwr.superlink.routers.fleet import node_auth
from sqlalchemy import select, update

from fedmjp.benchmarks.deployment.access import read_public_key
from fedmjp.benchmarks.deployment.flower import public_bytes
from fedmjp.benchmarks.deployment.layout import LOOPBACK, Deployment, DeploymentConfig
from fedmjp.benchmarks.federation.connection import environment
from fedmjp.errors import OutputError

FORBIDDEN = 403
# The content of a message is there until its receiver confirms it.
HAND_OUT_AGAIN = """
UPDATE message_ins SET delivered_at = '' WHERE delivered_at <> ''
    AND message_id IN (SELECT object_id FROM objects)
    AND message_id NOT IN (SELECT reply_to_message_id FROM message_res);
UPDATE message_res SET delivered_at = '' WHERE delivered_at <> ''
    AND message_id IN (SELECT object_id FROM objects);
"""
BUSY_SECONDS = 60  # for which a connection waits for the lock of another one
TABLES = {"message_ins", "message_res", "objects"}


_authenticate, _store_object = node_auth.authenticate_node, SqlLinkState.store_object
_initialize = SqlLinkState.initialize


def run_superlink(deployment: Deployment) -> None:
    """Become the SuperLink, which listens on this machine alone and knows the sites' keys.

    Args:
        deployment: Whose folder lies on this machine.

    Raises:
        ConfigError: If the folder is no deployment, or a site's public key cannot be read.
        OutputError: If the folder of the database is not this account's alone.
    """
    config = deployment.config()
    keys = [public_bytes(read_public_key(deployment.public_key(site))) for site in config.sites]
    _prepare_state(config)
    hand_out_again(config.database)

    def initialize(state: SqlLinkState) -> None:
        _initialize(state)
        register_keys(state, keys)

    wait_for_locks()
    changed: Any = SqlLinkState
    changed.store_object, changed.initialize = _store_if_missing, initialize
    node_auth.authenticate_node = _authorise
    arguments = ["--host", LOOPBACK, "--port", str(config.inside), "--database", str(config.database)]
    arguments += ["--ssl-ca-certfile", str(deployment.authority), "--ssl-certfile", str(deployment.certificate)]
    arguments += ["--ssl-keyfile", str(deployment.key), "--enable-supernode-auth", "--isolation", "process"]
    arguments += ["--superexec-auth-secret-file", str(deployment.secret), "--disable-runtime-dependency-installation"]
    _enter(deployment, "flower-superlink", arguments)
    flower_superlink()


def wait_for_locks() -> None:
    """Have this process's connections to Flower's database wait for a minute where it is locked."""
    changed: Any = sql_mixin
    changed.SQLITE_PRAGMAS = tuple(
        (name, str(1000 * BUSY_SECONDS) if name == "busy_timeout" else value) for name, value in changed.SQLITE_PRAGMAS
    )


def run_superexec(deployment: Deployment) -> None:
    """Become the SuperExec, which starts the server's part of runs for who has the deployment's secret.

    Args:
        deployment: Whose folder lies on this machine.

    Raises:
        ConfigError: If the folder is no deployment.
    """
    arguments = ["--root-certificates", str(deployment.authority)]
    arguments += ["--runtime-api-address", f"{LOOPBACK}:{deployment.config().inside}"]
    arguments += ["--superexec-auth-secret-file", str(deployment.secret)]
    _enter(deployment, "flower-superexec", arguments)
    flower_superexec()


def _enter(deployment: Deployment, name: str, arguments: Sequence[str]) -> None:
    """Give this process the name, arguments, environment and working directory of one of Flower's programs."""
    for folder in (deployment.home, deployment.empty):
        folder.mkdir(mode=0o700, exist_ok=True)
    os.environ.update(environment(deployment.home))
    os.chdir(deployment.empty)
    os.umask(0o077)
    sys.argv = [name, *arguments]


def _prepare_state(config: DeploymentConfig) -> None:
    """Make the database's folder where it is not there; refuse one that others own."""
    try:
        config.state.mkdir(mode=0o700, exist_ok=True)
        config.state.chmod(0o700)  # PermissionError if it is somebody else's
    except OSError as error:
        raise OutputError(f"{config.state} cannot hold the database: {error.strerror}; set state") from None


def register_keys(state: SqlLinkState, keys: Sequence[bytes]) -> None:
    """Let the SuperNodes with these keys in, unless they are in already.

    Args:
        state: Of the SuperLink, with its tables.
        keys: Public keys of the sites, as the SuperLink holds them.
    """
    for key in keys:
        with suppress(ValueError):  # the key is in use
            state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL)


def hand_out_again(database: Path) -> None:
    """Mark messages that nobody confirmed as not delivered, before a SuperLink starts.

    Args:
        database: The SuperLink's file; nothing is done where there is none.
    """
    if not database.exists():
        return
    with closing(sqlite3.connect(database, timeout=BUSY_SECONDS)) as connection:
        # One that was killed at its first start may have left a file without all tables.
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables >= TABLES:
            connection.executescript(HAND_OUT_AGAIN)


def _store_if_missing(self: SqlLinkState, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
    """Store a part of a message; return whether it is there, which it may have been before."""
    stored = _store_object(self, run_id, session_id, object_id, object_content)
    return stored or bool(self.object_store.get(object_id))


def _authorise(request: Request) -> None:
    """Authenticate a SuperNode as Flower does, then refuse what concerns the messages of others."""
    _authenticate(request)
    message: Any = request.state.protobuf_request
    state: Any = get_linkstate(request)
    foreign = False
    if isinstance(message, PushMessagesRequest):
        foreign = any(reply.metadata.src_node_id != message.node.node_id for reply in message.messages_list)
    elif isinstance(message, PullObjectRequest):
        foreign = _is_foreign(state, message.object_id, message.node.node_id)
    elif isinstance(message, ConfirmMessageReceivedRequest):
        foreign = _is_foreign(state, message.message_object_id, message.node.node_id)
        if not foreign:
            _note_delivery(state, message.message_object_id)
    if foreign:
        raise HTTPException(FORBIDDEN, "the message is another SuperNode's")


def _is_foreign(state: Any, name: str, node: int) -> bool:
    """Tell whether an object is a message to another node, or to the server."""
    with state.session() as session:
        receiver = session.scalar(select(MessageIns.dst_node_id).where(MessageIns.message_id == name))
        reply = session.scalar(select(MessageRes.message_id).where(MessageRes.message_id == name))
    return reply is not None or receiver not in (None, uint64_to_int64(node))


def _note_delivery(state: Any, name: str) -> None:
    """Mark a message as delivered: a node that confirms one may have got it before the SuperLink started anew."""
    waiting = (MessageIns.message_id == name) & (MessageIns.delivered_at == "")
    with state.session() as session:
        session.execute(update(MessageIns).where(waiting).values(delivered_at=now().isoformat()))
