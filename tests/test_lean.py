"""Commands that compute nothing start without torch, workers and clients without scipy; an attack's road is short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import font_manager  # noqa: F401 (makes its cache: a command that does would say so)

WORKERS = """
import sys
import fedmjp.benchmarks.running.ray_workers
import fedmjp.clients.app
print(*sys.modules)
"""


def modules(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """By a worker of a campaign and by a client."""
    return modules(WORKERS)


def test_workers_and_clients_start_without_scipy_which_few_of_them_need(imported: set[str]) -> None:
    assert {"fedmjp.benchmarks.running.ray_workers", "fedmjp.clients.app"} <= imported
    assert "scipy" not in imported


# To import some packages is an error. They are not None in sys.modules, where scipy looks for torch.
COMMAND = """
import sys
forbidden = sys.argv.pop(1).split(",")
class Forbidden:
    def find_spec(name, path=None, target=None):
        if name in forbidden:
            raise ImportError(f"{name} is not needed here")
sys.meta_path.insert(0, Forbidden)
from fedmjp.cli import main
main()
"""
RESULTS = Path(__file__).parents[1] / "results"
EVERY_HELP = """
import sys
import typer
from fedmjp.cli import app
def of(command, *words):
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from of(below, *words, name)
helped = list(of(typer.main.get_command(app)))
for words in helped:
    app([*words, "--help"], standalone_mode=False)
assert ("campaign", "status") in helped
print(*sys.modules)
"""


def require_success(folder: Path, forbidden: str, command: str) -> None:
    words = [sys.executable, "-c", COMMAND, forbidden, *command.split()]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "commands",
    [
        ["weights"],
        ["compare run"],
        ["gate show gate.jsonl"],
        ["deploy init hospital --sites north"],
        *([f"list {kind}"] for kind in ("attacks", "defences", "servers", "models", "metrics", "models deit_small")),
    ],
    ids=" ".join,
)
def test_commands_that_compute_nothing_start_without_torch(tmp_path: Path, commands: list[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "history.csv").write_text("epoch,top1\n1,0.5\n")
    (tmp_path / "gate.jsonl").touch()
    for command in commands:
        require_success(tmp_path, "torch", command)


# With servers that change weights, with defences that give a guarantee, with a metric that was not computed.
@pytest.mark.parametrize("study", ["fishing", "defences_deit_small", "mask_ratio"])
@pytest.mark.parametrize("command", ["campaign status", "leaderboard --output board"])
def test_what_was_measured_is_told_without_what_computes(tmp_path: Path, command: str, study: str) -> None:
    require_success(tmp_path, "torch,torchvision,timm,flwr,dp_accounting", f"{command} {RESULTS / study}")


def test_help_of_every_command_comes_without_torch() -> None:
    assert "torch" not in modules(EVERY_HELP)


# Prints the functions that the command enters, as their file and name, and the modules that it imported.
ROAD = """
import inspect, os, sys, threading
import fedmjp.cli
entered = set()
folder = os.path.dirname(fedmjp.__file__)
def enter(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(folder):
        entered.add((code.co_filename, code.co_qualname))
threading.setprofile(enter)
sys.setprofile(enter)
try:
    fedmjp.cli.main()
except SystemExit as ended:
    sys.setprofile(None)
    assert not ended.code
for file, function in sorted(entered):
    if not function.rpartition(".")[2].startswith("<"):  # comprehensions and lambdas are a part of their function
        print("entered", file.removeprefix(folder), function)
print("imported", *sys.modules)
"""
FUNCTIONS, FILES = 276, 57


def test_few_functions_lie_between_the_command_attack_and_its_table(tmp_path: Path) -> None:
    words = "attack --attack patch_embedding --model deit_tiny --image-size 64 --limit 2 --setting a --device cpu"
    command = [sys.executable, "-c", ROAD, *words.split(), "--output", "scores"]
    environment = {**os.environ, "TORCH_HOME": str(tmp_path / "nothing")}  # LPIPS is a metric that may be there
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    entered = [line[1:] for line in lines if line[:1] == ["entered"]]
    assert len(entered) <= FUNCTIONS, "merge or leave out what only passes on, see design.md"
    assert len({file for file, _ in entered}) <= FILES
    imported = next(line for line in lines if line[:1] == ["imported"])
    assert {"matplotlib", "pandas", "scipy", "skimage.io", "sqlalchemy"}.isdisjoint(imported)
