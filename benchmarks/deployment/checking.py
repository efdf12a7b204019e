"""Tries what must fail in a deployment that is up, with nodes of its own that are let in for as long as it takes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.supercore.control import ControlHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedmjp.benchmarks.deployment import certificates, flower, probe
from fedmjp.benchmarks.deployment.access import connect, open_control, require_idle
from fedmjp.benchmarks.deployment.attempts import Attempt, RefusedError, files_with, tried, without_a_run
from fedmjp.benchmarks.deployment.creating import own_bundle
from fedmjp.benchmarks.deployment.layout import LOOPBACK, Deployment, SiteConfig, SiteFolder, as_yaml, write_private
from fedmjp.benchmarks.deployment.training import empty_database
from fedmjp.benchmarks.federation.bundle import as_toml
from fedmjp.benchmarks.federation.connection import Connection
from fedmjp.clients.gate.reasons import SAID, Reason
from fedmjp.errors import FederationError

SECONDS = 120.0  # for nodes to come, and for their answers
POLL_SECONDS = 0.5
PYPROJECT = """\
[project]
name = "fedmjp"
version = "0.0.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["probe"]

[tool.flwr.app]
publisher = "fedmjp"

[tool.flwr.app.components]
serverapp = "probe.server:app"
clientapp = "probe.client:app"

[tool.flwr.app.config]
nodes = ""
output = ""
seconds = 0.0
"""
# Memory file systems: what lies there is on no disk, but where the machine swaps.
IN_MEMORY = ("tmpfs", "ramfs")


def check(deployment: Deployment, on_attempt: Callable[[Attempt], None]) -> bool:
    """Try everything.

    Args:
        deployment: That is up, and idle.
        on_attempt: Called with each attempt when it was made.

    Returns:
        Whether all that must fail was tried, and failed.

    Raises:
        FederationError: If the deployment is not up, or a run is in progress.
    """
    require_idle(deployment)
    held = True
    for attempt in _attempts(deployment):
        on_attempt(attempt)
        held = held and attempt.outcome in ("refused", "open")
    return held


def _attempts(deployment: Deployment) -> Iterator[Attempt]:
    yield from without_a_run(deployment)
    folder = Path(tempfile.mkdtemp(prefix="check-", dir=deployment.server))  # which the server's programs see
    try:
        app = _write_app(folder / "probe-app")
        yield tried("submitting an app from a site", lambda: _submit_from_outside(deployment, folder, app))
        with _Probe.start(deployment, folder, app) as running:
            yield from running.attempts()
    except (FederationError, httpx.HTTPError) as error:
        yield Attempt("what needs a run", "could not be tried", str(error))
    finally:
        shutil.rmtree(folder)
    yield _memory(deployment)


def _submit_from_outside(deployment: Deployment, folder: Path, app: Path) -> str:
    """Run Flower's own command line, with what a site has."""
    home = folder / "outside"
    home.mkdir()
    address = f"{LOOPBACK}:{deployment.config().port}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "outside"\n\n[superlink.outside]\naddress = "{address}"\n'
        f'root-certificates = "{deployment.authority}"\n'
    )
    config = folder / "outside.toml"
    config.write_text(as_toml({"nodes": "0"}))
    try:
        return f"run {Connection(home, 'outside').submit(app, config)} was started"
    except FederationError as error:
        if "403" in str(error) or "forbidden" in str(error).lower():
            raise RefusedError("flwr run: 403 Forbidden") from None
        raise


@dataclass
class _Probe:
    """A run of an app that no site allows, between two nodes of this check."""

    deployment: Deployment
    key: certificates.Key  # of a registered node
    node: int
    gated: int  # a node behind a gate that lists bundles
    output: Path

    @classmethod
    @contextmanager
    def start(cls, deployment: Deployment, folder: Path, app: Path) -> Iterator["_Probe"]:
        """Let two nodes in, start the gated one and the run; put everything back at the end."""
        keys = certificates.make_key(), certificates.make_key()
        output, config = folder / "answers.json", folder / "run-config.toml"
        with open_control(deployment) as client:
            node, gated = (flower.register(client, key.public_key()) for key in keys)
            assert node is not None and gated is not None  # noqa: S101, PT018 (keys that were made just now)
            supernode = _start_gated(deployment, folder, keys[1])
            try:
                values: dict[str, str | float] = {"nodes": f"{node},{gated}", "output": str(output), "seconds": SECONDS}
                config.write_text(as_toml(values))
                _wait_until_online(client, gated, supernode, folder / "node.log")
                run = connect(deployment).submit(app, config)
                yield cls(deployment, keys[0], node, gated, output)
                _wait_until_finished(client, int(run))
            finally:
                os.killpg(supernode.pid, signal.SIGKILL)
                supernode.wait()
                for identifier in (node, gated):
                    flower.unregister(client, identifier)

    def attempts(self) -> Iterator[Attempt]:
        """What a registered node tries against others, and what becomes of the probe."""
        address = f"{LOOPBACK}:{self.deployment.config().port}"
        thief = certificates.make_key()
        with open_control(self.deployment) as client:
            identifier = flower.register(client, thief.public_key())
        needle = np.random.default_rng().standard_normal(64)
        try:
            with (
                flower.fleet_client(address, self.deployment.authority, self.key) as honest,
                flower.fleet_client(address, self.deployment.authority, thief) as other,
            ):
                flower.activate(honest, self.key)
                own = flower.activate(other, thief)
                yield tried("taking another site's task", lambda: _take(other, self.node))
                asked = _wait_for_message(honest, self.node)
                forged, reply = (_reply(asked, name, needle) for name in ("forged", "honest"))
                yield tried("reading another site's task by its name", lambda: _read(other, own, asked))
                yield tried("discarding another site's task by its name", lambda: _discard(honest, other, own, asked))
                yield tried("answering another site's task by its name", lambda: _forge(other, own, forged))
                flower.push_reply(honest, self.node, reply)
        finally:
            with open_control(self.deployment) as client:
                flower.unregister(client, identifier or 0)
        yield tried("an app that is not on a site's list of bundles", self._bundle)
        empty_database(self.deployment)
        yield tried("an upload left in clear in a file of the server", lambda: self._left(needle))

    def _bundle(self) -> str:
        """What the gated node answered."""
        deadline = time.monotonic() + SECONDS
        while not self.output.exists():
            if time.monotonic() > deadline:
                raise FederationError("the probe did not end")
            time.sleep(POLL_SECONDS)
        said = json.loads(self.output.read_text()).get(str(self.gated), "no answer")
        if said == SAID + Reason.BUNDLE:
            raise RefusedError(Reason.BUNDLE)
        if isinstance(said, str):
            raise FederationError(said)
        return f"it answered {said}"

    def _left(self, needle: np.ndarray) -> str:
        """Files that hold what a node sent a moment ago."""
        state = self.deployment.config().state
        found = files_with([self.deployment.server, state], needle.tobytes())
        if found:
            return ", ".join(map(str, found))
        raise RefusedError(f"none in {self.deployment.server} and {state}, after the run")


def _take(client: FleetHttpClient, victim: int) -> str:
    return "it got a message" if flower.pull_message(client, victim) else "it may ask for messages"


def _read(client: FleetHttpClient, own: int, asked: Message) -> str:
    content = flower.pull_object(client, own, asked, asked.metadata.message_id)
    if not content:
        raise RefusedError("there is nothing by that name")
    return f"{len(content)} bytes"


def _discard(victim: FleetHttpClient, client: FleetHttpClient, own: int, asked: Message) -> str:
    flower.confirm(client, own, asked)
    if flower.pull_object(victim, asked.metadata.dst_node_id, asked, asked.metadata.message_id):
        raise RefusedError("it is still there")
    return "it is gone"


def _forge(client: FleetHttpClient, own: int, forged: Message) -> str:
    if not flower.push_reply(client, own, forged):
        raise RefusedError("the SuperLink did not want it")
    return "the server takes it for the site's"


def _reply(asked: Message, name: str, numbers: np.ndarray) -> Message:
    return Message(RecordDict({name: ArrayRecord([numbers])}), reply_to=asked)


def _wait_for_message(client: FleetHttpClient, node: int) -> Message:
    deadline = time.monotonic() + SECONDS
    message: Message | None = None
    # Its content comes after it.
    while message is None or not flower.pull_object(client, node, message, message.metadata.message_id):
        if time.monotonic() > deadline:
            raise FederationError("the probe sent no message")
        time.sleep(POLL_SECONDS)
        message = message or flower.pull_message(client, node)
    return message


def _start_gated(deployment: Deployment, folder: Path, key: certificates.Key) -> "subprocess.Popen[bytes]":
    """A SuperNode as a site runs it, which allows our own bundle alone."""
    site, pictures = SiteFolder(folder / "site"), folder / "pictures"
    for made in (site.root, pictures):
        made.mkdir(mode=0o700)
    write_private(site.key, certificates.private_openssh(key))
    write_private(site.authority, deployment.authority.read_bytes())
    write_private(site.policy, as_yaml({"kind": "change", "bundles": [own_bundle()]}))
    about = SiteConfig(server=f"localhost:{deployment.config().port}", partition_id=0, num_partitions=1)
    write_private(site.config_file, as_yaml(about.model_dump()))
    with (folder / "node.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "fedmjp", "deploy", "node", str(site.root), "--data", str(pictures)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_until_online(client: ControlHttpClient, node: int, supernode: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while node not in flower.online_nodes(client):
        if supernode.poll() is not None or time.monotonic() > deadline:
            said = " ".join(log.read_text(errors="replace").split())[-400:]
            raise FederationError(f"the SuperNode of this check did not come: {said}")
        time.sleep(POLL_SECONDS)


def _wait_until_finished(client: ControlHttpClient, run: int) -> None:
    deadline = time.monotonic() + SECONDS
    while run in flower.unfinished_runs(client) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _write_app(folder: Path) -> Path:
    """An app that calls itself ours and is not."""
    (folder / "probe").mkdir(parents=True)
    for name in ("__init__.py", "client.py", "server.py"):
        shutil.copy(Path(probe.__path__[0]) / name, folder / "probe" / name)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    return folder


def _memory(deployment: Deployment) -> Attempt:
    """Where uploads are while a run goes on."""
    state, what = deployment.config().state, "uploads on a disk while a run goes on"
    partitions = sorted(psutil.disk_partitions(all=True), key=lambda each: -len(each.mountpoint))
    place = next((each for each in partitions if state.is_relative_to(each.mountpoint)), None)
    if place is None or place.fstype not in IN_MEMORY:
        return Attempt(what, "NOT REFUSED", f"{state} is on a disk; set state to a folder in memory, or encrypt it")
    if psutil.swap_memory().total:
        return Attempt(
            what, "NOT REFUSED", f"{state} is in memory, but this machine swaps: swapoff, or encrypt the swap"
        )
    return Attempt(what, "refused", f"{state} is in memory, and this machine has no swap")
