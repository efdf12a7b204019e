"""A site's SuperNode, behind the site's upload gate."""

import os
import time
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedmjp.benchmarks.deployment import flower
from fedmjp.benchmarks.deployment.layout import SiteFolder, write_private
from fedmjp.benchmarks.federation.bundle import as_toml
from fedmjp.benchmarks.federation.connection import environment, free_port
from fedmjp.errors import ConfigError, DataError, FederationError
from fedmjp.hosts import require_resolved

CLOCKS = "set its clock, which may be 5 seconds ahead of the server's and 5 minutes behind"
GONE_SECONDS = 10.0  # longer than servers take to ask again for replies


def run_node(site: SiteFolder, data: str | None = None) -> None:
    """Run a site's SuperNode until it is stopped.

    Args:
        site: The folder that was carried here.
        data: Folder of the site's pictures; by default what ``site.yaml`` says.

    Raises:
        ConfigError: If the folder or its policy is not that of a site.
        DataError: If there is no folder of pictures.
        FederationError: If the server's name does not resolve, or it does not know the site's key.
    """
    config = site.config()
    pictures = Path(data or config.data or "").absolute()
    if not (data or config.data):
        raise DataError(f"no pictures: name their folder by --data, or as data in {site.config_file}")
    if not pictures.is_dir():
        raise DataError(f"there is no folder {pictures}")
    neutral = site.home / "empty"  # Python would import from a working directory first
    neutral.mkdir(mode=0o700, parents=True, exist_ok=True)
    about: dict[str, str | int] = {
        "partition-id": config.partition_id,
        "num-partitions": config.num_partitions,
        "data": str(pictures),
    }
    write_private(site.home / "node.toml", as_toml(about))
    require_resolved(config.server)
    leave_first(site)
    from fedmjp.clients.gate.site import run_supernode  # noqa: PLC0415 (seconds of imports)

    os.environ.update(environment(site.home))
    os.chdir(neutral)
    arguments = ["--superlink", config.server, "--root-certificates", str(site.authority)]
    arguments += ["--auth-supernode-private-key", str(site.key), "--node-config", str(site.home / "node.toml")]
    run_supernode(site.policy, [*arguments, "--port", str(free_port())])


def leave_first(site: SiteFolder) -> None:
    """Tell the server that the node's last process is gone, and learn whether it knows the site.

    A SuperNode that was killed is online for the server for up to a minute. Until then it may not come again, and if
    it did, the server would wait for the reply that died with it. A server that cannot be reached is waited for
    later.

    Args:
        site: The folder that was carried here.

    Raises:
        FederationError: If the server refuses the site's key, or is not that of this deployment.
    """
    address, identifier_file = site.config().server, site.home / "node-id"
    key = site_key(site)
    with flower.fleet_client(address, site.authority, key) as client:
        try:
            try:
                identifier, was_online = flower.activate(client, key), False
            except httpx.HTTPStatusError as error:
                if error.response.status_code in flower.UNAVAILABLE or not identifier_file.exists():
                    raise
                identifier, was_online = int(identifier_file.read_text()), True  # the server thinks that it is online
            flower.deactivate(client, identifier)
        except httpx.TransportError as error:
            if "certificate" in str(error).lower():
                raise FederationError(f"{address} is not the server of this deployment: {error}") from None
            return
        except httpx.HTTPStatusError as error:
            if error.response.status_code in flower.UNAVAILABLE:
                return
            raise FederationError(_refusal(error)) from None
    write_private(identifier_file, str(identifier))
    if was_online:
        time.sleep(GONE_SECONDS)


def _refusal(error: httpx.HTTPStatusError) -> str:
    if error.response.status_code == httpx.codes.UNAUTHORIZED:
        return f"the server does not accept this site's signature: {CLOCKS}"
    return f"the server refuses this site's key: {flower.refusal_text(error)}"


def site_key(site: SiteFolder) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key.

    Args:
        site: The folder that was carried here.

    Raises:
        ConfigError: If there is no elliptic-curve key in it.
    """
    try:
        key = load_ssh_private_key(site.key.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{site.key} cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{site.key} is no elliptic-curve key")
    return key
