"""What a new user types first: --help, --version, a wrong word, README's commands on defaults, too little memory."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
import typer
from rich.text import Text
from typer.testing import CliRunner

import fedmjp
from fedmjp.benchmarks.running.engine import Engine
from fedmjp.cli import app, main
from fedmjp.cli.keys import SIMULATED, TRAINED
from fedmjp.config import ModelConfig
from fedmjp.errors import ConfigError, out_of_memory
from fedmjp.learning import Training
from fedmjp.scenario import TrainingScenario
from fedmjp.training.config import TrainingConfig
from tests.experiments import small_experiments

ROOT = Path(__file__).parents[1]
TYPED = {"attack", "campaign", "evaluate", "leaderboard", "list", "record", "simulate", "train", "weights"}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedmjp", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def commands(command: click.Command, *words: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *words, name)


EVERY = dict(commands(typer.main.get_command(app)))
EXAMPLES = [
    line
    for command in EVERY.values()
    for line in Text.from_markup(command.epilog or "").plain.splitlines()
    if line.startswith("fedmjp ")
]


def test_every_command_has_an_example_and_its_options_in_groups() -> None:
    for words, command in EVERY.items():
        if not isinstance(command, click.Group):
            assert "Examples:" in (command.epilog or ""), words
            options = [each for each in command.params if isinstance(each, click.Option)]
            assert len(options) < 6 or all(getattr(each, "rich_help_panel", None) for each in options), words
    assert {line.split()[1] for line in EXAMPLES} >= TYPED


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_of_help_is_understood(line: str) -> None:
    words, command = shlex.split(line)[1:], typer.main.get_command(app)
    while isinstance(command, click.Group):
        _, below, words = command.resolve_command(click.Context(command), words)
        assert below is not None
        command = below
    if words != ["--help"]:
        command.make_context(command.name, list(words))


@pytest.mark.parametrize("command", ["train", "simulate"])
def test_help_lists_every_key_there_is(command: str) -> None:
    listed = TRAINED if command == "train" else SIMULATED
    told = {f"{group}.{name}" if group else name for group, names in listed.items() for name in names.split(", ")}
    known = {*TrainingConfig.keys()} if command == "train" else {*Training.keys(), *TrainingScenario.keys()}
    known = {key for key in known if key.partition(".")[0] != "training"}
    groups = {"model", "recipe", "puzzle", "partition"}
    elsewhere = set()
    if command == "simulate":  # rounds are its epochs; sites that evaluate have pictures of their own
        elsewhere = {"recipe.epochs", "validation"}
    assert told == known - groups - elsewhere
    printed = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert all(names.split(", ")[-1] in printed for names in listed.values())


def test_version_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"fedmjp {fedmjp.__version__}\n"


def test_help_and_mistyped_words_import_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
from fedmjp.cli import main
for words in (["--help"], ["--version"], ["atack"], ["attack", "--help"], ["attack", "--atack", "x"],
              ["attack", "--attack", "foo"], ["attack", "--attack", "grey", "--model", "foo"],
              ["record", "--defence", "foo"], ["attack", "--attack", "grey", "--setting", "d"],
              ["train", "--help"], ["simulate", "--device", "tpu"]):
    sys.argv = ["fedmjp", *words]
    try:
        main()
    except SystemExit as ended:
        print(words, ended.code, file=sys.stderr)
heavy = sorted({"torch", "timm", "numpy", "pandas", "flwr", "ray"} & set(sys.modules))
print("HEAVY", heavy, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stderr
    assert done.stderr.count("'] 2\n") == 7, "what is mistyped is bad input"
    assert done.stderr.count("'] 0\n") == 4


def test_fewer_epochs_have_the_papers_share_of_warm_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[TrainingConfig] = []
    monkeypatch.setattr("fedmjp.training.central.train", lambda config, *_: told.append(config))
    small = ("model.name=deit_micro", "model.image_size=32", "model.patch_size=8")
    assert run(monkeypatch, "train", *small, "recipe.epochs=30", "--output", str(tmp_path / "a")) == 0
    assert told[0].recipe.warmup_epochs == 2
    assert (
        run(monkeypatch, "train", *small, "recipe.epochs=30", "recipe.warmup_epochs=5", "--output", str(tmp_path / "b"))
        == 0
    )
    assert told[1].recipe.warmup_epochs == 5


def test_uploads_of_a_training_are_recorded_on_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[TrainingScenario] = []

    def train(scenario: TrainingScenario, *_: object) -> None:
        told.append(scenario)

    monkeypatch.setattr("fedmjp.benchmarks.federation.training.train_federated", train)
    small = ("model.name=deit_micro", "model.image_size=32", "model.patch_size=8", "--output", str(tmp_path))
    assert run(monkeypatch, "simulate", "--strategy", "fedsgd", "--uploads", "10", *small) == 0
    assert told[0].training is not None
    recipe = told[0].training.recipe
    assert (recipe.batch_size, recipe.mixup, recipe.cutmix, recipe.random_erasing, recipe.repeats) == (1, 0, 0, 0, 1)


@pytest.mark.parametrize(("image_size", "patch_size"), [(100_000_000, 16), (4096, 16), (224, 1)])
def test_any_size_is_bounded(image_size: int, patch_size: int) -> None:
    with pytest.raises(ConfigError, match=r"less than or equal to 4096|of which there may be 16384"):
        ModelConfig.parse({"name": "deit_tiny", "image_size": image_size, "patch_size": patch_size})


def _torch_says() -> BaseException:
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("error", [MemoryError(), _torch_says(), torch.OutOfMemoryError("CUDA out of memory.")])
def test_out_of_memory_is_one_sentence_and_a_second_run_starts_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    arguments = ("--image-size", "64", "--patch-size", "8", "--limit", "1", "--output", str(tmp_path))
    with monkeypatch.context() as short:
        short.setattr(Engine, "results", fail)
        assert run(short, "attack", "--attack", "grey", "--model", "deit_tiny", *arguments) == 1
    told = capsys.readouterr().err
    assert told.startswith("Error: out of memory: close other programs, or lower what the command has of --image-size")
    assert told.count("\n") == 1
    assert run(monkeypatch, "attack", "--attack", "grey", "--model", "deit_tiny", *arguments) == 0
    assert "0 of 1 trials are finished" in capsys.readouterr().out


def test_a_quickstart_without_memory_says_so_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(
        "fedmjp.benchmarks.campaign.quickstart.quickstart", lambda device: small_experiments(device=device)
    )
    monkeypatch.setattr("fedmjp.benchmarks.uploads.source.FederatedRun.prepare", fail)
    assert run(monkeypatch, "quickstart", "--output", str(tmp_path)) == 1
    assert capsys.readouterr().err.startswith("Error: out of memory: close other programs")


def test_out_of_memory_is_known_by_its_words() -> None:
    assert not out_of_memory(ValueError("a memory of better days"))
