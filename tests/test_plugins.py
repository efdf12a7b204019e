"""Attacks and defences that another package adds: installed beside ours, listed, run, and held to the contract."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

import fedmjp.attacks.testing
import fedmjp.defences.testing
from tests.conftest import ROOT

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "third-party"
version = "0.1"

[project.entry-points."fedmjp.attacks"]
mean_patch = "third_party:MeanPatch"

[project.entry-points."fedmjp.defences"]
halved = "third_party:Halved"

[tool.hatch.build.targets.wheel]
packages = ["third_party"]
"""
MODULE = '''
"""What another package may add: an attack, which is one of ours under another name, and a defence."""

from fedmjp.attacks.patch_embedding import PatchEmbeddingAttack
from fedmjp.defences.base import Defence


class MeanPatch(PatchEmbeddingAttack):
    name = "mean_patch"
    paper = "none"
    summary = "a test of plug-ins"


class Halved(Defence):
    name = "halved"
    paper = "none"
    summary = "half of the update"
    told = "that half of it is sent"
    stages = ("update",)
    marks = frozenset({"scaled"})

    def protect(self, update, client, *, randomness):
        return {name: 0.5 * tensor if tensor.is_floating_point() else tensor for name, tensor in update.items()}
'''
CONFORMANCE = """
import fedmjp.attacks.testing
import fedmjp.defences.testing
import pytest
from third_party import Halved, MeanPatch

@pytest.mark.parametrize("check", fedmjp.attacks.testing.CHECKS, ids=lambda check: check.__name__)
def test_conformance_of_the_attack(check):
    check(fedmjp.attacks.testing.AttackTrial(attack=MeanPatch(), model="deit_tiny"))

@pytest.mark.parametrize("check", fedmjp.defences.testing.CHECKS, ids=lambda check: check.__name__)
def test_conformance_of_the_defence(check):
    check(fedmjp.defences.testing.Trial(Halved()))
"""
CAMPAIGN = """
name: tiny
data: {pictures: 2}
image_size: 64
patch_size: 8
metrics: [psnr]
grids:
  - models: [deit_tiny]
    defences: [halved, [mjp, halved]]
    settings: [a]
    attacks: [patch_embedding, grey]
"""


COMMANDS = """
import contextlib, json, sys
from fedmjp.cli import main

for arguments in json.loads(sys.argv[1]):
    sys.argv = ["fedmjp", *arguments]
    with contextlib.suppress(SystemExit):
        main()
    print(end="\\0", flush=True)
"""
SMALL = ("--model", "deit_tiny", "--image-size", "64", "--patch-size", "8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package is installed; ``source`` beside it has its tests."""
    folder = tmp_path_factory.mktemp("plugins")
    source, site = folder / "source", folder / "site"
    (source / "third_party").mkdir(parents=True)
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "third_party" / "__init__.py").write_text(MODULE)
    (source / "test_third_party.py").write_text(CONFORMANCE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, source], check=True)
    return site


def play(site: Path, *commands: Sequence[str], cwd: Path) -> tuple[list[str], str]:
    """What fedmjp prints on each of several commands, and its errors, with the package installed."""
    environment = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)], capture_output=True, text=True, cwd=cwd, env=environment
    )
    printed = done.stdout.split("\0")
    assert len(printed) == len(commands) + 1, done.stdout + done.stderr
    return printed[:-1], done.stderr


def entries(printed: str) -> dict[str, dict[str, str]]:
    return {entry["name"]: entry for entry in json.loads(printed)}


@pytest.mark.slow
def test_what_another_package_adds_is_listed_and_run(site: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(CAMPAIGN)
    author = ("--name", "C. Author", "--contact", "c@example.org", "--link", "https://example.org")
    (attacks, defences, *_, added, _), errors = play(
        site,
        ("list", "attacks", "--json"),
        ("list", "defences", "--json"),
        ("attack", "--attack", "mean_patch", *SMALL, "--limit", "2", "--output", "attacked"),
        ("campaign", "run", "tiny.yaml", "--output", "out", "--device", "cpu"),
        ("leaderboard", "pack", "out", *author),
        ("leaderboard", "add", "entry.json", "--to", "out", "--device", "cpu"),
        ("leaderboard", "out", "--output", "shown"),
        cwd=tmp_path,
    )
    assert entries(attacks)["mean_patch"]["summary"] == "a test of plug-ins"
    assert entries(defences)["halved"]["summary"] == "half of the update"
    assert entries(defences)["halved"]["the server is told"] == "that half of it is sent"
    assert "mean_patch" in (tmp_path / "attacked" / "scores.csv").read_text(), errors
    board = pd.read_csv(tmp_path / "out" / "leaderboard.csv").query("role == 'attack'").set_index("defence")
    assert set(board.index) == {"none", "halved", "mjp", "mjp + halved"}
    assert board.loc["halved", "psnr_mean"] > 60, "a closed form does not care for the scale"
    assert set(board.drop("none")["twin"]) == {board.loc["none", "id"]}
    assert "Admitted, recomputed: deit_tiny, halved, patch_embedding, setting a: leaks" in " ".join(added.split())
    (plug_in,) = json.loads((tmp_path / "entry.json").read_text())["recipe"]["plug_ins"]
    assert (plug_in["package"], plug_in["version"], plug_in["name"]) == ("third-party", "0.1", "halved")
    shown = pd.read_csv(tmp_path / "shown" / "leaderboard.csv").query("origin == 'submitted'")
    assert (set(shown["defence"]), set(shown["check"])) == ({"none", "halved", "mjp", "mjp + halved"}, {"recomputed"})


@pytest.mark.slow
def test_what_another_package_adds_is_held_to_the_contract(site: Path, tmp_path: Path) -> None:
    tests = site.parent / "source" / "test_third_party.py"
    suite = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{site}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )
    count = len(fedmjp.attacks.testing.CHECKS) + len(fedmjp.defences.testing.CHECKS)
    assert f"{count} passed" in suite.stdout, suite.stdout


@pytest.mark.slow
def test_a_broken_plug_in_is_named(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (stated,) = broken.glob("*.dist-info/entry_points.txt")
    stated.write_text(stated.read_text().replace("MeanPatch", "Missing"))
    command = ("attack", "--attack", "mean_patch", *SMALL, "--limit", "1")
    code = "from fedmjp.cli import main; main()"
    tried = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{broken}:{ROOT}"},
    )
    assert tried.returncode == 1
    assert "attack 'mean_patch' (third_party:Missing) cannot be loaded: AttributeError" in tried.stderr
    assert "Traceback" not in tried.stderr


def test_a_plug_in_cannot_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from fedmjp.attacks.grey import Grey
    from fedmjp.registry import Registry

    points = [
        EntryPoint("grey", "elsewhere:Grey", "fedmjp.attacks"),
        EntryPoint("new", "fedmjp.attacks.grey:Grey", "x"),
    ]
    monkeypatch.setattr("fedmjp.registry.entry_points", lambda group: points)
    registry: Registry[type] = Registry("attack", {"grey": "fedmjp.attacks.grey:Grey"}, entry_points="fedmjp.attacks")
    assert registry.get("grey") is Grey
    assert set(registry) == {"grey", "new"}
