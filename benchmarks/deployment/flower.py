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

from fedmjp.clients.gate.flower import PushAnswer, send_whole

Key = ec.EllipticCurvePrivateKey
FINISHED, ONLINE = "finished", "online"
UNAVAILABLE = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)


def fleet_client(address: str, authority: Path, key: Key) -> FleetHttpClient:
    """Make a client of a SuperLink's fleet API that signs as the SuperNode with a key does.

    Args:
        address: HOST:PORT of the SuperLink or its proxy.
        authority: The certificate that is trusted.
        key: The SuperNode's private key.
    """
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    interceptors = (RuntimeVersionHttpInterceptor(component_name="SuperNode"), signed)
    return FleetHttpClient.from_server_address(address, False, str(authority), interceptors)


def control_client(address: str, authority: Path) -> ControlHttpClient:
    """Make a client of a SuperLink's control API, which Flower's command line uses.

    Args:
        address: HOST:PORT of the SuperLink.
        authority: The certificate that is trusted.
    """
    interceptors = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    return ControlHttpClient.from_server_address(address, False, str(authority), interceptors)


def runtime_client(address: str, authority: Path) -> RuntimeHttpClient:
    """Make a client of a SuperLink's runtime API, as a SuperExec without the secret has it.

    Args:
        address: HOST:PORT of the SuperLink.
        authority: The certificate that is trusted.
    """
    interceptors = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    return RuntimeHttpClient.from_server_address(address, False, str(authority), interceptors)


def activate(client: FleetHttpClient, key: Key) -> int:
    """Report the SuperNode with a key as present.

    Args:
        client: Signs with the key.
        key: The SuperNode's private key.

    Returns:
        The node's identifier.
    """
    request = ActivateNodeRequest(
        public_key=public_bytes(key.public_key()), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
    )
    return int(client.ActivateNode(request).node_id)


def public_bytes(key: ec.EllipticCurvePublicKey) -> bytes:
    """Encode a SuperNode's public key as messages and the SuperLink hold it.

    Args:
        key: The public key.
    """
    return bytes(public_key_to_bytes(key))


def deactivate(client: FleetHttpClient, identifier: int) -> None:
    """Report a SuperNode as gone.

    Args:
        client: Signs with the node's key.
        identifier: The node's.
    """
    client.DeactivateNode(DeactivateNodeRequest(node_id=identifier))


def register(client: ControlHttpClient, public: ec.EllipticCurvePublicKey) -> int | None:
    """Let the SuperNode with a key in.

    Args:
        client: Of the control API.
        public: The node's public key.

    Returns:
        The node's identifier; None if the key was registered before.
    """
    try:
        return int(client.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(public))).node_id)
    except httpx.HTTPStatusError as error:
        if _code_of(error) == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
            return None
        raise


def unregister(client: ControlHttpClient, identifier: int) -> None:
    """Stop letting a SuperNode in.

    Args:
        client: Of the control API.
        identifier: The node's.
    """
    client.UnregisterNode(UnregisterNodeRequest(node_id=identifier))


def unfinished_runs(client: ControlHttpClient) -> list[int]:
    """List the identifiers of runs that are in progress.

    Args:
        client: Of the control API.
    """
    runs = client.ListRuns(ListRunsRequest()).run_dict
    return [identifier for identifier, run in runs.items() if run.status.status != FINISHED]


def online_nodes(client: ControlHttpClient) -> set[int]:
    """List the identifiers of nodes that are present.

    Args:
        client: Of the control API.
    """
    nodes = client.ListNodes(ListNodesRequest()).nodes_info
    return {int(node.node_id) for node in nodes if node.status == ONLINE}


def refusal_text(error: httpx.HTTPStatusError) -> str:
    """Read the reason that a SuperLink gives for refusing a request.

    Args:
        error: What the client raised.
    """
    answer = FlowerError.from_json(error.response.text)
    return answer.message if answer else f"HTTP {error.response.status_code}"


def pull_message(client: FleetHttpClient, node: int) -> Message | None:
    """Pull the next message for a node, without its content.

    Args:
        client: Signs with a node's key.
        node: Identifier of the node.

    Returns:
        The message; None if none is waiting.
    """
    messages = client.PullMessages(PullMessagesRequest(node=Node(node_id=node))).messages_list
    return message_from_proto(messages[0]) if messages else None


def pull_object(client: FleetHttpClient, node: int, message: Message, object_id: str) -> bytes:
    """Pull a part of a message's run by its name.

    Args:
        client: Signs with a node's key.
        node: Identifier of the node that asks.
        message: Of the run.
        object_id: SHA-256 of the part.

    Returns:
        The part; empty if it is not there.
    """
    request = PullObjectRequest(node=Node(node_id=node), run_id=message.metadata.run_id, object_id=object_id)
    return bytes(client.PullObject(request).object_content)


def push_reply(client: FleetHttpClient, node: int, reply: Message) -> bool:
    """Send a reply and its content as a node.

    Args:
        client: Signs with a node's key.
        node: Identifier of the node that sends.
        reply: What to send.

    Returns:
        Whether the SuperLink took it.
    """
    accepted = False

    def send(bare: Message, tree: Any, runtime: float) -> PushAnswer:
        nonlocal accepted
        request = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[message_to_proto(bare)],
            message_object_trees=[tree],
            clientapp_runtime_list=[runtime],
        )
        answer = client.PushMessages(request)
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
    """Confirm as a node that a message was received, upon which the SuperLink forgets its content.

    Args:
        client: Signs with a node's key.
        node: Identifier of the node that confirms.
        message: The message.
    """
    metadata = message.metadata
    request = ConfirmMessageReceivedRequest(
        node=Node(node_id=node), run_id=metadata.run_id, message_object_id=metadata.message_id
    )
    client.ConfirmMessageReceived(request)


def bundle_hash(app: Path) -> str:
    """Compute the SHA-256 of the bundle that Flower makes of an app, by which SuperLinks and sites know it.

    Args:
        app: The app's folder.
    """
    return hashlib.sha256(build_fab_from_disk(app)).hexdigest()


def _code_of(error: httpx.HTTPStatusError) -> int | None:
    answer = FlowerError.from_json(error.response.text)
    return None if answer is None else int(answer.code)
