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
from tests.worlds import SERVER, World, lacking

pytestmark = [pytest.mark.slow, pytest.mark.skipif(lacking() is not None, reason=str(lacking()))]
SITES = ("a", "b")
ROUNDS, PATIENCE = 2, 240.0
TRAIN = "Receiving: train"  # what a SuperNode says of a message
# Sites with pictures of their own draw from the system what is drawn at all.
RECIPE = {**PLAIN, "drop_path": 0}
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The server is up; no site is there."""
    folder = tmp_path_factory.mktemp("deployed")
    with World(SITES, folder) as made:
        made.fedmjp("deploy", "init", "server", "--sites", ",".join(SITES), "--host", SERVER)
        try:
            said = made.fedmjp("deploy", "up", "server").stdout
            assert f"From outside: {SERVER}:8443" in said
            yield made
        finally:
            assert "Down." in made.fedmjp("deploy", "down", "server").stdout
            made.run("test", "!", "-e", str(Deployment(folder / "server").config().state))


def wait_for(what: str, condition: Callable[[], object], *logs: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        said = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE} seconds\n{said}"
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
    full.mkdir()
    world.run("sh", "-ec", f"mount -t tmpfs -o size=16k none {full}; head -c 100000 /dev/zero > {full}/zeros || true")
    done = world.fedmjp("deploy", "node", str(site), "--data", pictures(), site="b", check=False)
    world.run("umount", str(full))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_a_run_outlives_a_killed_supernode_and_a_killed_superlink(world: World) -> None:
    server, nodes = world.folder / "server", {site: world.folder / f"{site}.log" for site in SITES}

    def node(site: str) -> "subprocess.Popen[bytes]":
        folder = str(server / "sites" / site)
        return world.start("deploy", "node", folder, "--data", pictures(), log=nodes[site], site=site)

    def said(site: str, what: str) -> int:
        return nodes[site].read_text(errors="replace").count(what)

    config = world.folder / "run.yaml"
    config.write_text(json.dumps({"model": MICRO, "recipe": RECIPE, "rounds": ROUNDS}))
    log, output = world.folder / "run.log", world.folder / "out"
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
    control = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(server / "server" / "supervisord.conf")]
    world.run("kill", "-9", world.run(*control, "pid", "superlink").stdout.strip())
    wait_for("the run ends", lambda: run.poll() is not None, log, *nodes.values())
    assert run.returncode == 0, log.read_text()

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
