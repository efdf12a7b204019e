"""Attacks and defences that another package adds: installed beside ours, listed, run, and held to the contract."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import attacks.testing
import fedmjp.defences.testing
from tests.conftest import ROOT

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "third-party"
version = "0.1"

[project.entry-points."fedmjp.{group}"]
{name} = "third_party:{attribute}"

[tool.hatch.build.targets.wheel]
packages = ["third_party"]
"""
MODULE = '''
"""What another package may add: an attack, which is one of ours under another name, and a defence."""

from attacks.patch_embedding import PatchEmbedding
from fedmjp.defences.base import Defence


class MeanPatch(PatchEmbedding):
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
import attacks.testing
import fedmjp.defences.testing
import pytest
from third_party import Halved, MeanPatch

@pytest.mark.parametrize("check", attacks.testing.CHECKS, ids=lambda check: check.__name__)
def test_conformance_of_the_attack(check):
    check(attacks.testing.Trial(attack=MeanPatch(), model="deit_tiny"))

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


def install(folder: Path, *, group: str = "attacks", name: str = "mean_patch", attribute: str = "MeanPatch") -> Path:
    """Build the package and install it into a folder of its own."""
    source, site = folder / "source", folder / "site"
    (source / "third_party").mkdir(parents=True)
    (source / "pyproject.toml").write_text(PYPROJECT.format(group=group, name=name, attribute=attribute))
    (source / "third_party" / "__init__.py").write_text(MODULE)
    (source / "test_third_party.py").write_text(CONFORMANCE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site]
    subprocess.run([*pip, source], check=True)
    return site


def command(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from fedmjp.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd)


@pytest.mark.slow
def test_an_attack_of_another_package_is_listed_run_and_tested(tmp_path: Path) -> None:
    site = install(tmp_path)
    listed = command(site, "list", "attacks", "--json", cwd=tmp_path)
    entries = {entry["name"]: entry for entry in json.loads(listed.stdout)}
    assert entries["mean_patch"]["summary"] == "a test of plug-ins"
    small = ("--model", "deit_tiny", "--image-size", "64", "--patch-size", "8", "--limit", "2")
    done = command(site, "attack", "--attack", "mean_patch", *small, "--output", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean_patch" in (tmp_path / "out" / "leaderboard.csv").read_text()


@pytest.mark.slow
def test_a_defence_of_another_package_is_listed_and_put_to_the_test(tmp_path: Path) -> None:
    site = install(tmp_path, group="defences", name="halved", attribute="Halved")
    listed = command(site, "list", "defences", "--json", cwd=tmp_path)
    entries = {entry["name"]: entry for entry in json.loads(listed.stdout)}
    assert entries["halved"]["summary"] == "half of the update"
    assert entries["halved"]["the server is told"] == "that half of it is sent"
    (tmp_path / "tiny.yaml").write_text(CAMPAIGN)
    done = command(site, "campaign", "run", "tiny.yaml", "--output", "out", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    board = pd.read_csv(tmp_path / "out" / "leaderboard.csv").query("role == 'attack'").set_index("defence")
    assert set(board.index) == {"none", "halved", "mjp", "mjp + halved"}
    assert board.loc["halved", "psnr_mean"] > 60, "a closed form does not care for the scale"
    assert set(board.drop("none")["twin"]) == {board.loc["none", "id"]}


@pytest.mark.slow
def test_what_another_package_adds_is_held_to_the_contract(tmp_path: Path) -> None:
    site = install(tmp_path)
    suite = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "source" / "test_third_party.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{site}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )
    count = len(attacks.testing.CHECKS) + len(fedmjp.defences.testing.CHECKS)
    assert f"{count} passed" in suite.stdout, suite.stdout


@pytest.mark.slow
def test_a_broken_plug_in_is_named(tmp_path: Path) -> None:
    site = install(tmp_path, name="broken", attribute="Missing")
    small = ("--model", "deit_tiny", "--image-size", "64", "--patch-size", "8", "--limit", "1")
    tried = command(site, "attack", "--attack", "broken", *small, cwd=tmp_path)
    assert tried.returncode == 1
    assert "attack 'broken' (third_party:Missing) cannot be loaded: AttributeError" in tried.stderr
    assert "Traceback" not in tried.stderr


def test_a_plug_in_cannot_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from attacks.grey import Grey
    from fedmjp.registry import Registry

    points = [EntryPoint("grey", "elsewhere:Grey", "fedmjp.attacks"), EntryPoint("new", "attacks.grey:Grey", "x")]
    monkeypatch.setattr("fedmjp.registry.entry_points", lambda group: points)
    registry: Registry[type] = Registry("attack", {"grey": "attacks.grey:Grey"}, entry_points="fedmjp.attacks")
    assert registry.get("grey") is Grey
    assert set(registry) == {"grey", "new"}
