"""A site's SuperNode, behind the site's upload gate."""

import os
import time
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.supercore.error import FlowerError
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from benchmarks.deployment.layout import SiteFolder, write_private
from benchmarks.federation.bundle import as_toml
from benchmarks.federation.connection import environment, free_port
from clients.gate.site import run_supernode
from fedmjp.errors import ConfigError, DataError, FederationError

GONE_SECONDS = 10.0  # longer than servers take to ask again for replies


def run_node(site: SiteFolder, data: str | None = None) -> None:
    """Run a site's SuperNode until it is stopped.

    Args:
        site: The folder that was carried here.
        data: Folder of the site's pictures; by default what ``site.yaml`` says.

    Raises:
        ConfigError: If the folder or its policy is not that of a site.
        DataError: If there is no folder of pictures.
        FederationError: If the server does not know the site's key.
    """
    config = site.config()
    pictures = Path(data or config.data or "").absolute()
    if not (data or config.data):
        raise DataError(f"no pictures: name their folder by --data, or as data in {site.config_file}")
    if not pictures.is_dir():
        raise DataError(f"there is no folder {pictures}")
    neutral = site.home / "empty"  # Python would import from a working directory first
    neutral.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = {"partition-id": config.partition_id, "num-partitions": config.num_partitions, "data": str(pictures)}
    write_private(site.home / "node.toml", as_toml(about))
    leave_first(site)
    os.environ.update(environment(site.home))
    os.chdir(neutral)
    arguments = ["--superlink", config.server, "--root-certificates", str(site.authority)]
    arguments += ["--auth-supernode-private-key", str(site.key), "--node-config", str(site.home / "node.toml")]
    run_supernode(site.policy, [*arguments, "--port", str(free_port())])


def leave_first(site: SiteFolder) -> None:
    """Tell the server that what ran here before is gone, and learn whether it knows the site.

    A SuperNode that was killed is online for the server for up to a minute. Until then it may not come again, and if it
    did, the server would wait for the reply that died with it. A server that cannot be reached is waited for later.

    Raises:
        FederationError: If the server refuses the site's key.
    """
    with fleet_client(site) as client:
        try:
            identifier = _activate(client, site)
            if identifier is not None:
                write_private(site.home / "node-id", str(identifier))
                client.DeactivateNode(DeactivateNodeRequest(node_id=identifier))
                return
            client.DeactivateNode(DeactivateNodeRequest(node_id=_known_identifier(site)))
        except httpx.TransportError as error:
            if "certificate" in str(error).lower():
                raise FederationError(f"{site.config().server} is not the server of this deployment: {error}") from None
            return
        except httpx.HTTPStatusError as error:
            if error.response.status_code in UNAVAILABLE:
                return
            raise FederationError(f"the server refuses this site's key: {_reason(error)}") from None
    time.sleep(GONE_SECONDS)


UNAVAILABLE = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)


def fleet_client(site: SiteFolder) -> FleetHttpClient:
    """What speaks to the server with a site's key."""
    key = site_key(site)
    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    ]
    return FleetHttpClient.from_server_address(site.config().server, False, str(site.authority), interceptors)


def site_key(site: SiteFolder) -> ec.EllipticCurvePrivateKey:
    """A site's private key; ConfigError if there is none."""
    try:
        key = load_ssh_private_key(site.key.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{site.key} cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{site.key} is no elliptic-curve key")
    return key


def _activate(client: FleetHttpClient, site: SiteFolder) -> int | None:
    """The node's identifier; None if the server thinks that it is online."""
    key = public_key_to_bytes(site_key(site).public_key())
    try:
        asked = ActivateNodeRequest(public_key=key, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        return int(client.ActivateNode(asked).node_id)
    except httpx.HTTPStatusError as error:
        if error.response.status_code in UNAVAILABLE or not (site.home / "node-id").exists():
            raise
        return None


def _known_identifier(site: SiteFolder) -> int:
    return int((site.home / "node-id").read_text())


def _reason(error: httpx.HTTPStatusError) -> str:
    said = FlowerError.from_json(error.response.text)
    return said.message if said else f"HTTP {error.response.status_code}"
