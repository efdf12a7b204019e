"""Kills of a campaign's processes: results are those of an undisturbed run, and no process is left.

test_federated_runs kills a simulation, whose processes take a minute to start.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

KILLS = 2


@pytest.mark.slow
def test_killed_processes_lose_and_double_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults", "campaign", "--kills", str(KILLS), "--size", "1"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "manifest.json").read_text())["kills"] == KILLS
