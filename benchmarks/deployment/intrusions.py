"""Intrusions that a stranger tries against a deployment, each by the means that it would have."""

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import psutil
from flwr.proto.control_pb2 import ListRunsRequest
from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest

from fedmjp.benchmarks.deployment import certificates, flower
from fedmjp.benchmarks.deployment.access import trust_only
from fedmjp.benchmarks.deployment.layout import LOOPBACK, Deployment, write_private

Outcome = Literal["refused", "NOT REFUSED", "could not be tried", "open"]
REFUSALS = range(400, 500)
# What a proxy that reads paths otherwise than the SuperLink would let through.
DETOURS = (
    "/v1/control/list-runs",
    "//v1/control/list-runs",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/;/../../control/list-runs",
    "/v1/fleetx/../control/list-runs",
    "/V1/CONTROL/list-runs",
    "/docs",
    "/openapi.json",
    "/health",
)


@dataclass(frozen=True)
class Intrusion:
    """An intrusion that was tried, and its outcome; "open" is what open Flower cannot refuse, as the guide says."""

    what: str
    outcome: Outcome
    why: str

    @property
    def line(self) -> str:
        """Write the intrusion as a line for the user."""
        return f"{self.outcome:<20}{self.what}" + (f": {self.why}" if self.why else "")


class ExpectedRefusalError(Exception):
    """The refusal of an attempt; the message says how it was refused."""


def try_intrusion(title: str, action: Callable[[], str]) -> Intrusion:
    """Try what must fail, and report what became of it.

    Args:
        title: The intrusion in words.
        action: Raises ``ExpectedRefusalError``, or what clients of Flower raise of a refusal; returns what it got
            otherwise.
    """
    try:
        return Intrusion(title, "NOT REFUSED", action())
    except ExpectedRefusalError as refused:
        return Intrusion(title, "refused", str(refused))
    except httpx.HTTPStatusError as error:
        outcome: Outcome = "refused" if error.response.status_code in REFUSALS else "could not be tried"
        return Intrusion(title, outcome, flower.refusal_text(error))
    except Exception as error:  # noqa: BLE001 (whatever it is, nothing was shown)
        return Intrusion(title, "could not be tried", f"{type(error).__name__}: {error}")


def try_without_run(deployment: Deployment) -> Iterator[Intrusion]:
    """Try all that can be tried while nothing runs: keys, TLS, and ways past the proxy.

    Args:
        deployment: That is up.
    """
    config, stranger = deployment.config(), certificates.make_key()
    outside, inside = f"{LOOPBACK}:{config.port}", f"{LOOPBACK}:{config.inside}"

    def activate() -> str:
        with flower.fleet_client(outside, deployment.authority, stranger) as client:
            return f"node {flower.activate(client, stranger)}"

    def enrol() -> str:
        public = flower.public_bytes(stranger.public_key())
        with flower.fleet_client(outside, deployment.authority, stranger) as client:
            return f"node {client.RegisterNode(RegisterNodeFleetRequest(public_key=public)).node_id}"

    def no_key() -> str:
        with httpx.Client(verify=trust_only(deployment.authority), trust_env=False) as client:
            headers = {"content-type": "application/protobuf"}
            answer = client.post(f"https://{outside}/v1/fleet/pull-messages", content=b"", headers=headers)
        answer.raise_for_status()
        return f"HTTP {answer.status_code}"

    def plain() -> str:
        with httpx.Client(trust_env=False) as client:
            answer = client.post(f"http://{outside}/v1/fleet/activate-node", content=b"")
        answer.raise_for_status()
        return f"HTTP {answer.status_code}"

    def acquire(address: str) -> str:
        with flower.runtime_client(address, deployment.authority) as client:
            client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
        return "it may take tasks"

    def list_runs(address: str) -> str:
        with flower.control_client(address, deployment.authority) as client:
            return f"{len(client.ListRuns(ListRunsRequest()).run_dict)} runs are listed"

    yield try_intrusion("a SuperNode with a key that is not registered", activate)
    yield try_intrusion("a SuperNode that registers itself", enrol)
    yield try_intrusion("a SuperNode without a key", no_key)
    yield try_intrusion("plain text instead of TLS", plain)
    yield try_intrusion("another server with a certificate of another authority", lambda: _trust_impostor(deployment))
    yield try_intrusion("the control API from outside", lambda: list_runs(outside))
    yield try_intrusion("the runtime API from outside", lambda: acquire(outside))
    yield try_intrusion("ways around the proxy's rules", lambda: _take_detours(deployment))
    yield try_intrusion("a task of the server's, from the server itself, without its secret", lambda: acquire(inside))
    yield try_intrusion("the SuperLink's own port from another machine", lambda: _knock(config.inside))
    local = try_intrusion("submitting apps from any account of the server itself", lambda: list_runs(inside))
    yield Intrusion(local.what, "open", "Flower has no login there") if local.outcome == "NOT REFUSED" else local


def _take_detours(deployment: Deployment) -> str:
    """Ask for what the proxy must not let through, under other spellings of its path."""
    through = []
    for path in DETOURS:
        for method in ("POST", "GET"):
            address = LOOPBACK, deployment.config().port
            connection = http.client.HTTPSConnection(*address, context=trust_only(deployment.authority), timeout=10)
            try:
                connection.request(method, path, body=b"", headers={"Content-Type": "application/protobuf"})
                if connection.getresponse().status not in REFUSALS:
                    through.append(f"{method} {path}")
            finally:
                connection.close()
    if through:
        return ", ".join(through)
    raise ExpectedRefusalError(f"{2 * len(DETOURS)} spellings")


def _knock(port: int) -> str:
    """Knock at a port by the addresses of this machine that others can reach."""
    listed = (address for addresses in psutil.net_if_addrs().values() for address in addresses)
    reachable = sorted(
        address.address
        for address in listed
        if address.family in (socket.AF_INET, socket.AF_INET6) and not ipaddress.ip_address(address.address).is_loopback
    )
    if not reachable:
        raise ExpectedRefusalError("this machine has no address that others could reach")
    for address in reachable:
        try:
            with socket.create_connection((address, port), timeout=5):
                return f"{address}:{port} answers"
        except OSError:
            continue
    raise ExpectedRefusalError(f"{', '.join(reachable)}: nobody answers on port {port}")


def _trust_impostor(deployment: Deployment) -> str:
    """Have a SuperNode connect to a server that has another authority's certificate."""
    with _start_impostor(deployment) as port:
        key = certificates.make_key()
        with flower.fleet_client(f"localhost:{port}", deployment.authority, key) as client:
            try:
                flower.activate(client, key)
            except httpx.ConnectError as error:
                if "certificate" in str(error).lower():
                    raise ExpectedRefusalError("the SuperNode does not trust it") from None
                raise
            except httpx.HTTPError:
                return "the SuperNode spoke to it"
    return "the SuperNode spoke to it"


@contextmanager
def _start_impostor(deployment: Deployment) -> Iterator[int]:
    """Start a server that anybody could start; yield the port that it listens on."""
    authority_key, key = certificates.make_key(), certificates.make_key()
    certificate = certificates.make_server(key, certificates.make_authority(authority_key), authority_key, "localhost")
    file = deployment.empty / "impostor.pem"
    write_private(file, certificates.pem(certificate) + certificates.private_pem(key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    file.unlink()
    with socket.create_server((LOOPBACK, 0)) as listener:
        threading.Thread(target=_shake_hands, args=(listener, context), daemon=True).start()
        yield int(listener.getsockname()[1])


def _shake_hands(listener: socket.socket, context: ssl.SSLContext) -> None:
    try:
        connection, _ = listener.accept()
        with connection, context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(1)
    except OSError:
        return


def find_files_with(folders: list[Path], needle: bytes) -> list[Path]:
    """List the files in folders that hold these bytes.

    Args:
        folders: Searched with all below them.
        needle: The bytes.
    """
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in files if needle in path.read_bytes()]
