"""A deployment for real: a server and two sites, each in a network of its own, and what happens when parts fail."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fedmjp.benchmarks.deployment.layout import Deployment
from fedmjp.training.run_folder import TrainingFolder
from tests.federations import MICRO, PLAIN, pictures, play, scenario_of
from tests.units import Unit, read_units
from tests.worlds import SERVER, World, lacking

pytestmark = [pytest.mark.slow, pytest.mark.skipif(lacking() is not None, reason=str(lacking()))]
SITES = ("a", "b")
ROUNDS, PATIENCE = 2, 240.0
TRAIN = "Receiving: train"  # what a SuperNode says of a message
# Sites with pictures of their own draw from the system what is drawn at all.
RECIPE = {**PLAIN, "drop_path": 0}
# Lists the runs in progress; `deploy check` would begin to try things where there is none yet.
UNFINISHED = """
from pathlib import Path
from fedmjp.benchmarks.deployment import access, flower, layout
with access.open_control(layout.Deployment(Path("server"))) as client:
    print(*flower.unfinished_runs(client))
"""
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The server is up; no site is there."""
    folder = tmp_path_factory.mktemp("deployed")
    with World(SITES, folder) as made:
        said = made.fedmjp("deploy", "init", "server", "--sites", ",".join(SITES), "--host", SERVER).stdout
        assert f"From outside {SERVER}:8443" in said
        server = Server(made, Deployment(folder / "server"))
        try:
            server.start()
            yield made
        finally:
            server.stop()


class Server:
    """The server's programs, started, started again and ended as systemd does by the units that ``init`` wrote."""

    def __init__(self, world: World, deployment: Deployment) -> None:
        self.world, self.deployment, self.config = world, deployment, deployment.config()
        self.units = read_units(deployment.units)
        world.server = self

    def start(self) -> None:
        assert [unit.name.split("-")[-1] for unit in self.units] == [
            "superlink.service",
            "proxy.service",
            "superexec.service",
        ]
        assert all(unit.restarts for unit in self.units)
        assert [unit.memory for unit in self.units] == [self.config.state, None, None]
        self.world.run("mkdir", "-m", "700", str(self.config.state))
        self.processes = {unit.name: self._start(unit) for unit in self.units}
        self.wait()

    def wait(self) -> None:
        """Wait until SuperLink and proxy listen."""
        for port in (self.config.inside, self.config.port):
            knock = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
            up = lambda: not self.world.run(sys.executable, "-c", knock, check=False).returncode  # noqa: E731, B023
            wait_for(f"port {port}", up, *(self._log(unit) for unit in self.units))

    def restart(self, name: str) -> None:
        """Kill one and start it again."""
        (unit,) = [unit for unit in self.units if unit.name.endswith(f"-{name}.service")]
        self.world.signal(self.processes[unit.name], signal.SIGKILL)
        self.processes[unit.name] = self._start(unit)

    def stop(self) -> None:
        for unit in reversed(self.units):
            self.world.signal(self.processes[unit.name], signal.SIGTERM)
            self.processes[unit.name].wait(30)
        wait_for("all processes end", lambda: not self._running(), patience=30)  # TimeoutStopSec
        self.world.run("rm", "-r", str(self.config.state))

    def _running(self) -> list[str]:
        lines = self.world.run("ps", "-eo", "args").stdout.splitlines()
        return [line for line in lines if "flower" in line or "nginx" in line or " deploy " in line]

    def _start(self, unit: Unit) -> "subprocess.Popen[bytes]":
        return self.world.start_unit(unit, self._log(unit))

    def _log(self, unit: Unit) -> Path:
        return self.world.folder / f"{unit.name}.log"


def wait_for(what: str, condition: Callable[[], object], *logs: Path, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        said = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
        assert time.monotonic() < deadline, f"{what}: not within {patience} seconds\n{said}"
        time.sleep(0.2)


def test_check_is_refused_everything(world: World) -> None:
    checked = world.fedmjp("deploy", "check", "server", check=False)
    lines = checked.stdout.splitlines()
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert len(lines) == 19
    assert [line for line in lines if not line.startswith("refused ")] == [
        line for line in lines if line.startswith("open ") and "Flower has no login there" in line
    ]


@pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime is not installed")
def test_a_site_whose_clock_is_wrong_is_told_so(world: World) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(FAKETIME), "FAKETIME": "+10m"}
    site = str(world.folder / "server" / "sites" / "a")
    done = world.fedmjp("deploy", "node", site, "--data", pictures(), site="a", check=False, env=environment)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "set its clock" in done.stderr


def test_a_site_whose_disk_is_full_is_told_so(world: World) -> None:
    site = world.folder / "server" / "sites" / "b"
    full = site / "flower"
    full.mkdir(exist_ok=True)
    world.run("sh", "-ec", f"mount -t tmpfs -o size=16k none {full}; head -c 100000 /dev/zero > {full}/zeros || true")
    done = world.fedmjp("deploy", "node", str(site), "--data", pictures(), site="b", check=False)
    world.run("umount", str(full))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_one_run_is_stopped_by_its_number(world: World) -> None:
    log, output = world.folder / "stopped.log", world.folder / "stopped"
    run = world.start("deploy", "run", "server", "--data", pictures(), "--output", str(output), log=log)
    unfinished = lambda: world.run(sys.executable, "-c", UNFINISHED).stdout.split()  # noqa: E731
    wait_for("the run is submitted", unfinished, log)
    (number,) = unfinished()
    refused = world.fedmjp("deploy", "check", "server", check=False).stderr
    assert f"run {number} is in progress: wait for it, or stop it by `fedmjp deploy stop`" in refused
    assert f"Stopped run {number}" in world.fedmjp("deploy", "stop", "server", number).stdout
    wait_for("its command ends", lambda: run.poll() is not None, log)
    assert run.returncode == 1
    assert sum("Error: " in line for line in log.read_text().splitlines()) == 1
    again = world.fedmjp("deploy", "stop", "server", number, check=False)
    assert again.returncode == 2
    assert "is not in progress on this server; none is in progress" in again.stderr


def test_a_run_outlives_a_killed_supernode_and_a_killed_superlink(world: World) -> None:
    server, nodes = world.folder / "server", {site: world.folder / f"{site}.log" for site in SITES}

    def node(site: str) -> "subprocess.Popen[bytes]":
        return world.start_unit(Unit.read(server / "sites" / site / "fedmjp-node.service"), nodes[site], site)

    def said(site: str, what: str) -> int:
        return nodes[site].read_text(errors="replace").count(what)

    config = world.folder / "run.yaml"
    config.write_text(json.dumps({"model": MICRO, "recipe": RECIPE, "rounds": ROUNDS}))
    log, output = world.folder / "run.log", world.folder / "out"
    for site in SITES:
        config_file = server / "sites" / site / "site.yaml"
        config_file.write_text(config_file.read_text().replace("data: ''", f"data: {pictures()}"))
    processes = {site: node(site) for site in SITES}
    command = ["deploy", "run", str(server), "--data", pictures(), "--config", str(config), "--output", str(output)]
    run = world.start(*command, log=log)
    wait_for("round 1", lambda: all(said(site, TRAIN) for site in SITES), log, *nodes.values())
    world.signal(processes["b"], signal.SIGKILL)
    world.signal(processes["a"], signal.SIGSTOP)  # no round ends before b is back
    processes["b"] = node("b")
    wait_for("b comes back", lambda: said("b", "SuperNode ID") == 2, nodes["b"])
    world.signal(processes["a"], signal.SIGCONT)
    wait_for("round 2", lambda: said("a", TRAIN) == 2, log, nodes["a"])
    world.server.restart("superlink")
    world.server.restart("proxy")
    wait_for("the run ends", lambda: run.poll() is not None, log, *nodes.values())
    assert run.returncode == 0, log.read_text()
    for process in processes.values():
        world.signal(process, signal.SIGTERM)
    for process in processes.values():
        process.wait(90)  # TimeoutStopSec of a unit that states none

    assert list(pd.read_csv(output / "history.csv")["clients"]) == [1, 2]
    refused = pd.read_csv(output / "refused.csv")
    assert refused[["round", "client"]].to_numpy().tolist() == [[1, 1]]
    undisturbed, _ = play(
        scenario_of(rounds=ROUNDS, recipe=RECIPE),
        world.folder / "undisturbed",
        own={client: pictures() for client in range(len(SITES))},
        answer=lambda number, client, reply: None if (number, client) == (1, 1) else reply,
    )
    weights = load_file(output / "weights.safetensors")
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(weights[name], value) for name, value in undisturbed.items())
    assert TrainingFolder(output).trained().weights is not None, "what evaluate reads"
