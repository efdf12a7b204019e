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
from fedmjp.benchmarks.deployment.creating import own_bundle
from fedmjp.benchmarks.deployment.intrusions import (
    ExpectedRefusalError,
    Intrusion,
    find_files_with,
    try_intrusion,
    try_without_run,
)
from fedmjp.benchmarks.deployment.layout import LOOPBACK, Deployment, SiteConfig, SiteFolder, as_yaml, write_private
from fedmjp.benchmarks.deployment.training import empty_database
from fedmjp.benchmarks.federation.bundle import as_toml
from fedmjp.benchmarks.federation.connection import Connection
from fedmjp.clients.gate.reasons import SAID, Reason
from fedmjp.errors import FederationError
from fedmjp.hosts import require_resolved

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


def check(deployment: Deployment, on_intrusion: Callable[[Intrusion], None]) -> bool:
    """Try everything.

    Args:
        deployment: That is up, and idle.
        on_intrusion: Called with each intrusion when it was tried.

    Returns:
        Whether all that must fail was tried, and failed.

    Raises:
        FederationError: If the deployment is not up, or a run is in progress.
    """
    require_idle(deployment)
    all_refused = True
    for intrusion in _intrusions(deployment):
        on_intrusion(intrusion)
        all_refused = all_refused and intrusion.outcome in ("refused", "open")
    return all_refused


def _intrusions(deployment: Deployment) -> Iterator[Intrusion]:
    try:
        require_resolved(deployment.config().address)
    except FederationError as error:
        yield Intrusion("the name by which sites reach the server", "could not be tried", str(error))
    yield from try_without_run(deployment)
    folder = Path(tempfile.mkdtemp(prefix="check-", dir=deployment.server))  # which the server's programs see
    try:
        app = _write_app(folder / "probe-app")
        yield try_intrusion("submitting an app from a site", lambda: _submit_from_outside(deployment, folder, app))
        with _Probe.start(deployment, folder, app) as running:
            yield from running.intrusions()
    except (FederationError, httpx.HTTPError) as error:
        yield Intrusion("what needs a run", "could not be tried", str(error))
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
            raise ExpectedRefusalError("flwr run: 403 Forbidden") from None
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
        """Let two nodes in, start the gated one and the run; put everything back at the end.

        Args:
            deployment: That is up, and idle.
            folder: For the files of the gated node and the app's answers.
            app: The probe's folder.
        """
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

    def intrusions(self) -> Iterator[Intrusion]:
        """Try, as a registered node, what concerns others; then try the app that no site allows."""
        address = f"{LOOPBACK}:{self.deployment.config().port}"
        thief_key = certificates.make_key()
        with open_control(self.deployment) as client:
            identifier = flower.register(client, thief_key.public_key())
        needle = np.random.default_rng().standard_normal(64)
        try:
            with (
                flower.fleet_client(address, self.deployment.authority, self.key) as honest,
                flower.fleet_client(address, self.deployment.authority, thief_key) as thieves,
            ):
                flower.activate(honest, self.key)
                thief = flower.activate(thieves, thief_key)
                yield try_intrusion("taking another site's task", lambda: _take(thieves, self.node))
                message = _wait_for_message(honest, self.node)
                forged, reply = (_reply(message, name, needle) for name in ("forged", "honest"))
                yield try_intrusion("reading another site's task by its name", lambda: _read(thieves, thief, message))
                discard = lambda: _discard(honest, thieves, thief, message)  # noqa: E731
                yield try_intrusion("discarding another site's task by its name", discard)
                yield try_intrusion("answering another site's task by its name", lambda: _forge(thieves, thief, forged))
                flower.push_reply(honest, self.node, reply)
        finally:
            with open_control(self.deployment) as client:
                flower.unregister(client, identifier or 0)
        yield try_intrusion("an app that is not on a site's list of bundles", self._bundle)
        empty_database(self.deployment)
        yield try_intrusion("an upload left in clear in a file of the server", lambda: self._left(needle))

    def _bundle(self) -> str:
        """Read what the gated node answered to an app that is not on its list."""
        deadline = time.monotonic() + SECONDS
        while not self.output.exists():
            if time.monotonic() > deadline:
                raise FederationError("the probe did not end")
            time.sleep(POLL_SECONDS)
        answer = json.loads(self.output.read_text()).get(str(self.gated), "no answer")
        if answer == SAID + Reason.BUNDLE:
            raise ExpectedRefusalError(Reason.BUNDLE)
        if isinstance(answer, str):
            raise FederationError(answer)
        return f"it answered {answer}"

    def _left(self, needle: np.ndarray) -> str:
        """Search the server's files for what a node sent a moment ago."""
        state = self.deployment.config().state
        files = find_files_with([self.deployment.server, state], needle.tobytes())
        if files:
            return ", ".join(map(str, files))
        raise ExpectedRefusalError(f"none in {self.deployment.server} and {state}, after the run")


def _take(client: FleetHttpClient, victim: int) -> str:
    return "it got a message" if flower.pull_message(client, victim) else "it may ask for messages"


def _read(client: FleetHttpClient, node: int, message: Message) -> str:
    content = flower.pull_object(client, node, message, message.metadata.message_id)
    if not content:
        raise ExpectedRefusalError("there is nothing by that name")
    return f"{len(content)} bytes"


def _discard(victim: FleetHttpClient, client: FleetHttpClient, node: int, message: Message) -> str:
    flower.confirm(client, node, message)
    if flower.pull_object(victim, message.metadata.dst_node_id, message, message.metadata.message_id):
        raise ExpectedRefusalError("it is still there")
    return "it is gone"


def _forge(client: FleetHttpClient, node: int, forged: Message) -> str:
    if not flower.push_reply(client, node, forged):
        raise ExpectedRefusalError("the SuperLink did not want it")
    return "the server takes it for the site's"


def _reply(message: Message, name: str, numbers: np.ndarray) -> Message:
    return Message(RecordDict({name: ArrayRecord([numbers])}), reply_to=message)


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
    """Start a SuperNode as a site does, whose gate allows our own bundle alone."""
    site, pictures = SiteFolder(folder / "site"), folder / "pictures"
    for created in (site.root, pictures):
        created.mkdir(mode=0o700)
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
            last_words = " ".join(log.read_text(errors="replace").split())[-400:]
            raise FederationError(f"the SuperNode of this check did not come: {last_words}")
        time.sleep(POLL_SECONDS)


def _wait_until_finished(client: ControlHttpClient, run: int) -> None:
    deadline = time.monotonic() + SECONDS
    while run in flower.unfinished_runs(client) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _write_app(folder: Path) -> Path:
    """Write an app that calls itself ours and is not."""
    (folder / "probe").mkdir(parents=True)
    for name in ("__init__.py", "client.py", "server.py"):
        shutil.copy(Path(probe.__path__[0]) / name, folder / "probe" / name)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    return folder


def _memory(deployment: Deployment) -> Intrusion:
    """Check that the database, through which uploads pass, is in memory that is never swapped."""
    state, title = deployment.config().state, "uploads on a disk while a run goes on"
    partitions = sorted(psutil.disk_partitions(all=True), key=lambda entry: -len(entry.mountpoint))
    place = next((entry for entry in partitions if state.is_relative_to(entry.mountpoint)), None)
    if place is None or place.fstype not in IN_MEMORY:
        return Intrusion(title, "NOT REFUSED", f"{state} is on a disk; set state to a folder in memory, or encrypt it")
    if psutil.swap_memory().total:
        return Intrusion(
            title, "NOT REFUSED", f"{state} is in memory, but this machine swaps: swapoff, or encrypt the swap"
        )
    return Intrusion(title, "refused", f"{state} is in memory, and this machine has no swap")
