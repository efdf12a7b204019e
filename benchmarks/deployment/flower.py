"""All that a deployment uses of Flower without a public name, as of 1.41.

``tests/test_deploy_run.py`` uses each against a real SuperLink: clients of the three APIs (fleet of SuperNodes, control
of users, runtime of processes), the headers that a SuperNode signs, and what a bundle is made of.
"""

import hashlib
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedmjp.clients.gate.flower import Sent, send_whole

Key = ec.EllipticCurvePrivateKey
FINISHED, ONLINE = "finished", "online"
UNAVAILABLE = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)


def fleet_client(address: str, authority: Path, key: Key) -> FleetHttpClient:
    """What speaks to a SuperLink as a SuperNode with this key does."""
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    interceptors = (RuntimeVersionHttpInterceptor(component_name="SuperNode"), signed)
    return FleetHttpClient.from_server_address(address, False, str(authority), interceptors)


def control_client(address: str, authority: Path) -> ControlHttpClient:
    """What asks a SuperLink as the command line of Flower does."""
    interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    return ControlHttpClient.from_server_address(address, False, str(authority), interceptors)


def runtime_client(address: str, authority: Path) -> RuntimeHttpClient:
    """What asks a SuperLink for tasks as a SuperExec does that has no secret."""
    interceptors = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    return RuntimeHttpClient.from_server_address(address, False, str(authority), interceptors)


def activate(client: FleetHttpClient, key: Key) -> int:
    """Say that the SuperNode with a key is there; its identifier."""
    asked = ActivateNodeRequest(
        public_key=public_bytes(key.public_key()), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
    )
    return int(client.ActivateNode(asked).node_id)


def public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """A SuperNode's public key, as messages and the SuperLink hold it."""
    return bytes(public_key_to_bytes(key))


def deactivate(client: FleetHttpClient, identifier: int) -> None:
    """Say that a SuperNode is gone."""
    client.DeactivateNode(DeactivateNodeRequest(node_id=identifier))


def register(client: ControlHttpClient, public: ec.EllipticCurvePublicKey) -> int | None:
    """Let the SuperNode with a key in; its identifier, or None if it was registered before."""
    try:
        return int(client.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(public))).node_id)
    except httpx.HTTPStatusError as error:
        if _code_of(error) == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
            return None
        raise


def unregister(client: ControlHttpClient, identifier: int) -> None:
    """Let a SuperNode in no more."""
    client.UnregisterNode(UnregisterNodeRequest(node_id=identifier))


def unfinished_runs(client: ControlHttpClient) -> list[int]:
    """Identifiers of runs that are in progress."""
    runs = client.ListRuns(ListRunsRequest()).run_dict
    return [identifier for identifier, run in runs.items() if run.status.status != FINISHED]


def online_nodes(client: ControlHttpClient) -> set[int]:
    """Identifiers of nodes that are there."""
    nodes = client.ListNodes(ListNodesRequest()).nodes_info
    return {int(node.node_id) for node in nodes if node.status == ONLINE}


def refusal_text(error: httpx.HTTPStatusError) -> str:
    """What a SuperLink says of a request that it refuses."""
    said = FlowerError.from_json(error.response.text)
    return said.message if said else f"HTTP {error.response.status_code}"


def pull_message(client: FleetHttpClient, node: int) -> Message | None:
    """The next message for a node, without its content, if there is one."""
    messages = client.PullMessages(PullMessagesRequest(node=Node(node_id=node))).messages_list
    return message_from_proto(messages[0]) if messages else None


def pull_object(client: FleetHttpClient, node: int, message: Message, object_id: str) -> bytes:
    """A part of the content of a message's run, by its name; nothing if it is not there."""
    asked = PullObjectRequest(node=Node(node_id=node), run_id=message.metadata.run_id, object_id=object_id)
    return bytes(client.PullObject(asked).object_content)


def push_reply(client: FleetHttpClient, node: int, reply: Message) -> bool:
    """Send a reply and its content as a node; whether the SuperLink wanted it."""
    accepted = False

    def send(bare: Message, tree: Any, runtime: float) -> Sent:
        nonlocal accepted
        asked = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[message_to_proto(bare)],
            message_object_trees=[tree],
            clientapp_runtime_list=[runtime],
        )
        answer = client.PushMessages(asked)
        accepted = bool(answer.objects_to_push)
        return set(answer.objects_to_push), answer.session_id

    def push(run: int, session: str, object_id: str, content: bytes) -> None:
        part = PushObjectRequest(
            node=Node(node_id=node), run_id=run, object_id=object_id, object_content=content, session_id=session
        )
        client.PushObject(part)

    send_whole(reply, send, push, 0.0)
    return accepted


def confirm(client: FleetHttpClient, node: int, message: Message) -> None:
    """Say as a node that a message was received, upon which the SuperLink forgets its content."""
    metadata = message.metadata
    asked = ConfirmMessageReceivedRequest(
        node=Node(node_id=node), run_id=metadata.run_id, message_object_id=metadata.message_id
    )
    client.ConfirmMessageReceived(asked)


def bundle_hash(app: Path) -> str:
    """SHA-256 of the bundle that Flower makes of an app's folder, by which SuperLinks and sites know it."""
    return hashlib.sha256(build_fab_from_disk(app)).hexdigest()


def _code_of(error: httpx.HTTPStatusError) -> int | None:
    said = FlowerError.from_json(error.response.text)
    return None if said is None else int(said.code)
