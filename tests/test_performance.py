"""The harness of benchmarks: each is a command, and what it writes says how it was made."""

import json
import re
import sys
from pathlib import Path

import pytest

from fedmjp.benchmarks.performance import run as benchmarks
from fedmjp.benchmarks.performance.harness import app
from fedmjp.running import run
from tests.conftest import ROOT


def play(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks/performance/run.py"), *arguments])
    with pytest.raises(SystemExit) as ended:
        run(app)
    return int(ended.value.code or 0)


def test_figures_are_written_with_command_versions_and_hardware(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "store.json"
    assert play(monkeypatch, "store", "--trials", "320", "--json", str(file)) == 0
    about = json.loads(file.read_text())
    assert about["command"] == "python benchmarks/performance/run.py store --json FILE --trials 320"
    assert about["rows_per_second_first_tenth"] > 0
    assert {"versions", "hardware", "revision"} <= about.keys()


def test_an_unknown_part_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(monkeypatch, "gpu", "--part", "nonsense", "--json", str(tmp_path / "gpu.json")) == 2
    assert "nonsense" in (message := capsys.readouterr().err)
    assert message.count("\n") == 1


def test_the_readme_names_benchmarks_that_there_are() -> None:
    assert benchmarks.app is app
    named = set(re.findall(r"performance/run\.py (\w+)", (ROOT / "results/performance/README.md").read_text()))
    assert named
    assert named <= {command.name for command in app.registered_commands}
