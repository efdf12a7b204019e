"""Starts and stops the server of a deployment."""

import shutil
import signal
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.supercore.control import ControlHttpClient

from fedmjp.benchmarks.deployment import flower, supervision
from fedmjp.benchmarks.deployment.creating import CONNECTION
from fedmjp.benchmarks.deployment.layout import LOOPBACK, Deployment, DeploymentConfig, write_private
from fedmjp.benchmarks.deployment.proxy import find_nginx, proxy_configuration
from fedmjp.benchmarks.federation.connection import Connection
from fedmjp.errors import ConfigError, FederationError, OutputError
from fedmjp.extras import require

START_SECONDS = 90
POLL_SECONDS = 0.3
WATCH_SECONDS = 5
ENDING = (signal.SIGTERM, signal.SIGINT)


def start(deployment: Deployment) -> DeploymentConfig:
    """Start the server, or what of it does not run, wait until it is healthy, and register the sites' keys.

    Returns:
        The configuration that it was started with.

    Raises:
        BadInputError: If nginx or supervisor is not installed, or the folder is no deployment.
        FederationError: If the server does not come up.
        OutputError: If the folder of the database is not ours alone.
    """
    config, nginx = deployment.config(), find_nginx()
    require("deploy", "fedmjp deploy up")
    if not supervision.states(deployment):
        _prepare(deployment, config, nginx)
        supervision.start(deployment)
    _wait_until_healthy(deployment, config)
    with control(deployment) as client:
        for site in config.sites:
            flower.register(client, read_public_key(deployment.public_key(site)))
    return config


def stop(deployment: Deployment) -> bool:
    """Stop the server and remove its database; whether it ran."""
    config = deployment.config()
    ran = supervision.stop(deployment)
    shutil.rmtree(config.state, ignore_errors=True)
    return ran


def wait_for_end(deployment: Deployment) -> None:
    """Wait until the server ends, or until this process is to end, and then stop it.

    Raises:
        FederationError: If the server ended by itself.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    while signal.sigtimedwait(ENDING, WATCH_SECONDS) is None:
        if not supervision.states(deployment):
            raise FederationError(f"the server ended: see {deployment.logs}")
    stop(deployment)


def connect(deployment: Deployment) -> Connection:
    """What asks the deployment's SuperLink, from the server itself."""
    return Connection(deployment.home, CONNECTION)


@contextmanager
def control(deployment: Deployment) -> Iterator[ControlHttpClient]:
    """The SuperLink's control API, from the server itself; FederationError if it does not answer, or refuses."""
    try:
        with flower.control_client(f"{LOOPBACK}:{deployment.config().inside}", deployment.authority) as client:
            yield client
    except httpx.HTTPStatusError as error:
        raise FederationError(f"the SuperLink refused: {flower.reason_of(error)}") from None
    except httpx.HTTPError as error:
        raise FederationError(f"the SuperLink does not answer, which may be starting: {error}") from None


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """A public key in OpenSSH's form; ConfigError if the file holds none."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is no elliptic-curve key")
    return key


def trusting(authority: Path) -> ssl.SSLContext:
    """TLS that trusts one authority and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    return context


def _prepare(deployment: Deployment, config: DeploymentConfig, nginx: str) -> None:
    """Write what programs read, for this place, and make the folders that they write to."""
    for folder in (deployment.logs, deployment.empty):
        folder.mkdir(mode=0o700, exist_ok=True)
    try:
        config.state.mkdir(mode=0o700, exist_ok=True)
        config.state.chmod(0o700)  # PermissionError if it is somebody else's
    except OSError as error:
        raise OutputError(f"{config.state} cannot hold the database: {error.strerror}; set state") from None
    write_private(
        deployment.home / "config.toml",
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{LOOPBACK}:{config.inside}"\nroot-certificates = "{deployment.authority}"\n',
    )
    write_private(deployment.proxy, proxy_configuration(deployment, config))
    write_private(deployment.supervisor, supervision.supervisor_configuration(deployment, config, nginx))


def _wait_until_healthy(deployment: Deployment, config: DeploymentConfig) -> None:
    urls = {
        supervision.SUPERLINK: (f"https://{LOOPBACK}:{config.inside}/health", httpx.codes.OK),
        supervision.PROXY: (f"https://{LOOPBACK}:{config.port}/", httpx.codes.FORBIDDEN),
    }
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(verify=trusting(deployment.authority), trust_env=False, timeout=2) as client:
        while urls and time.monotonic() < deadline:
            for name, (url, expected) in list(urls.items()):
                if _answers(client, url, expected):
                    del urls[name]
            time.sleep(POLL_SECONDS if urls else 0)
    for name in urls:
        said = supervision.last_words(deployment, name)
        raise FederationError(f"the {name} did not come up within {START_SECONDS} seconds: {said}")


def _answers(client: httpx.Client, url: str, expected: int) -> bool:
    try:
        return client.get(url).status_code == expected
    except httpx.HTTPError:
        return False
