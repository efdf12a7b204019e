"""A new attack in the tree is one file: the class that attacks/README.md shows, in a copy of the packages."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAME = "token_equations"
TESTED = """
import sys
from fedmjp.attacks import ATTACKS
from fedmjp.attacks.testing import CHECKS, AttackTrial
from tests import test_attacks

assert "token_equations" in test_attacks.CLOSED_FORMS, "the tests of all attacks take it up"
for check in CHECKS:
    check(AttackTrial(ATTACKS.get("token_equations")(), "deit_tiny", gain=25.0))
print("kept")
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and of the tests of all attacks, with one file more."""
    folder = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fedmjp", folder / "fedmjp", symlinks=False, ignore=ignored)
    (folder / "tests").mkdir()
    for name in ("__init__", "attacks", "conftest", "test_attacks"):
        if (ROOT / "tests" / f"{name}.py").exists():
            shutil.copy(ROOT / "tests" / f"{name}.py", folder / "tests")
    (block,) = [each for each in BLOCK.findall((ROOT / "attacks" / "README.md").read_text()) if "(Attack" in each]
    (folder / "fedmjp" / "attacks" / f"{NAME}.py").write_text(block)
    return folder


def output(tree: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env={"PYTHONPATH": str(tree)}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_file_is_listed(tree: Path) -> None:
    entries = {entry["name"]: entry for entry in json.loads(output(tree, "-m", "fedmjp", "list", "attacks", "--json"))}
    assert entries[NAME]["requires"] == "one picture per upload"
    assert NAME in output(tree, "-m", "fedmjp", "list", "attacks")


@pytest.mark.slow
def test_one_file_is_run(tree: Path) -> None:
    small = ("--model", "deit_tiny", "--image-size", "64", "--patch-size", "8", "--limit", "2")
    output(tree, "-m", "fedmjp", "attack", "--attack", NAME, *small, "--output", "attacked")
    assert NAME in (tree / "attacked" / "scores.csv").read_text()


@pytest.mark.slow
def test_one_file_is_held_to_the_contract(tree: Path) -> None:
    assert output(tree, "-c", TESTED).strip().endswith("kept")
