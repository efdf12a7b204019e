"""Ways to a deployment's SuperLink from the server itself, and what they trust."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.supercore.control import ControlHttpClient

from fedmjp.benchmarks.deployment import flower
from fedmjp.benchmarks.deployment.layout import LOOPBACK, Deployment, write_private
from fedmjp.benchmarks.federation.connection import Connection
from fedmjp.errors import ConfigError, FederationError

CONNECTION = "deployment"


def connect(deployment: Deployment) -> Connection:
    """Point Flower's command line at the deployment's SuperLink.

    Args:
        deployment: Whose folder lies on this machine.
    """
    write_private(
        deployment.home / "config.toml",
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{LOOPBACK}:{deployment.config().inside}"\nroot-certificates = "{deployment.authority}"\n',
    )
    return Connection(deployment.home, CONNECTION)


@contextmanager
def open_control(deployment: Deployment) -> Iterator[ControlHttpClient]:
    """Open the SuperLink's control API, which answers the server itself alone.

    Args:
        deployment: Whose folder lies on this machine.

    Raises:
        FederationError: If the SuperLink refuses, or does not answer.
    """
    address = f"{LOOPBACK}:{deployment.config().inside}"
    try:
        with flower.control_client(address, deployment.authority) as client:
            yield client
    except httpx.HTTPStatusError as error:
        raise FederationError(f"the SuperLink refused: {flower.refusal_text(error)}") from None
    except httpx.HTTPError as error:
        raise FederationError(
            f"the SuperLink does not answer at {address}: start the server's units or containers ({error})"
        ) from None


def require_idle(deployment: Deployment) -> None:
    """Check that the SuperLink answers and that no run is in progress.

    Args:
        deployment: Whose folder lies on this machine.

    Raises:
        ConfigError: If the folder is no deployment.
        FederationError: If the SuperLink does not answer, or a run is in progress.
    """
    with open_control(deployment) as client:
        if runs := flower.unfinished_runs(client):
            raise FederationError(f"run {runs[0]} is in progress: wait for it, or stop it by `fedmjp deploy stop`")


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Read a public key in OpenSSH's form.

    Args:
        path: The file.

    Raises:
        ConfigError: If the file holds no elliptic-curve key.
    """
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is no elliptic-curve key")
    return key


def trust_only(authority: Path) -> ssl.SSLContext:
    """Make a TLS context that trusts one authority and no other.

    Args:
        authority: The authority's certificate, as PEM.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    return context
