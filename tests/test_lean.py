"""Imports without torch where nothing is computed, and without its compiler where that works."""

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import font_manager  # noqa: F401 (makes its cache: a command that does would say so)

LEAN = """
import sys
from fedmjp.models.build import blueprint
from fedmjp.scenario import Scenario
blueprint(Scenario(model="deit_micro").network)
import fedmjp.benchmarks.running.ray_workers
import fedmjp.clients.app
print(*sys.modules)
"""
# As in a release of timm or torchvision that asks the compiler for what the placeholder does not have.
LACKING = """
import sys, types
from pathlib import Path
import torch, fedmjp
text = (Path(fedmjp.__file__).parent / "lean.py").read_text()
lacking = text.replace('vars(stubs[COMPILER])["disable"] = _disable', "pass")
assert lacking != text
module = sys.modules["fedmjp.lean"] = types.ModuleType("fedmjp.lean")
exec(lacking, vars(module))
import torchvision.transforms.v2 as v2
from fedmjp.models.build import build_vit
from fedmjp.scenario import Scenario
model = build_vit(Scenario(model="deit_micro").network)
assert v2.Resize(4)(torch.zeros(1, 3, 8, 8)).shape == (1, 3, 4, 4)
print(*sys.modules)
"""


def modules(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """By what plans, by a worker of a campaign and by a client."""
    return modules(LEAN)


def test_the_compiler_is_not_imported_where_nothing_is_compiled(imported: set[str]) -> None:
    assert {"torch", "timm"} <= imported
    assert "torch._dynamo" not in imported


def test_the_compiler_is_imported_where_a_release_needs_it() -> None:
    assert "torch._dynamo" in modules(LACKING)


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
        ["deploy init hospital --sites north", "deploy down hospital"],
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
