"""One kill of each case: results are those of an undisturbed run, and no process is left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size", "kills"), [("campaign", 1, 1), ("simulation", 1, 1)])
def test_killed_processes_lose_and_double_nothing(case: str, size: int, kills: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults", case, "--kills", str(kills), "--size", str(size)]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "manifest.json").read_text())["kills"] == kills
