"""An attack that another package adds: installed beside ours, listed, run, and held to the contract."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "third-party-attack"
version = "0.1"

[project.entry-points."fedmjp.attacks"]
{name} = "third_party_attack:{attribute}"

[tool.hatch.build.targets.wheel]
packages = ["third_party_attack"]
"""
ATTACK = '''
"""What another package may add: one of ours under another name."""

from attacks.patch_embedding import PatchEmbedding


class MeanPatch(PatchEmbedding):
    name = "mean_patch"
    paper = "none"
    summary = "a test of plug-ins"
'''
CONFORMANCE = """
import pytest
from attacks.testing import CHECKS, Trial
from third_party_attack import MeanPatch

@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check):
    check(Trial(attack=MeanPatch(), model="deit_tiny"))
"""


def install(folder: Path, *, name: str = "mean_patch", attribute: str = "MeanPatch") -> Path:
    """Build the package and install it into a folder of its own."""
    source, site = folder / "source", folder / "site"
    (source / "third_party_attack").mkdir(parents=True)
    (source / "pyproject.toml").write_text(PYPROJECT.format(name=name, attribute=attribute))
    (source / "third_party_attack" / "__init__.py").write_text(ATTACK)
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
    suite = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(tmp_path / "source" / "test_third_party.py"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{site}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )
    assert "9 passed" in suite.stdout, suite.stdout


@pytest.mark.slow
def test_a_broken_plug_in_is_named(tmp_path: Path) -> None:
    site = install(tmp_path, name="broken", attribute="Missing")
    small = ("--model", "deit_tiny", "--image-size", "64", "--patch-size", "8", "--limit", "1")
    tried = command(site, "attack", "--attack", "broken", *small, cwd=tmp_path)
    assert tried.returncode == 1
    assert "attack 'broken' (third_party_attack:Missing) cannot be loaded: AttributeError" in tried.stderr
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
