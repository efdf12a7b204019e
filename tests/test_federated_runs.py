"""`fedmjp simulate` with Flower and Ray: killed and gone on with, and what it says of bad input."""

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

from fedmjp.cli import main
from fedmjp.data.partitions import Partition
from fedmjp.errors import FederationError
from fedmjp.models.build import build
from fedmjp.running import KEPT
from fedmjp.scenario import TrainingScenario
from fedmjp.server.validation import Validation
from fedmjp.training.run_folder import TrainingFolder
from tests.federations import PLAIN, pictures, play
from tests.processes import wait_until
from tests.test_federation import FEDMJP, family

BAD_INPUT = 2
ROUNDS = 10  # of less than a second each: the kill must find some left
MODEL = ["model.name=deit_micro", "model.image_size=64", "model.patch_size=8"]
SETTINGS = [
    "--device", "cpu", *MODEL, "model.classes=4",
    *(f"recipe.{key}={value or json.dumps(value)}" for key, value in PLAIN.items()),
]  # fmt: skip


def command(output: Path, *arguments: str) -> list[str | Path]:
    start = ["simulate", "--data", pictures(), "--clients", "3", "--strategy", "fedadam", "--rounds", str(ROUNDS)]
    return [*FEDMJP, *start, *SETTINGS, *arguments, "--output", output]


def rounds(output: Path) -> list[int]:
    history = TrainingFolder(output).history
    return pd.read_csv(history)["round"].tolist() if history.exists() else []


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    environment = {**os.environ, "FEDMJP_TEST": str(tmp_path), "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"env": environment, "cwd": tmp_path, "text": True}
    killed = subprocess.Popen(
        command(tmp_path / "killed"), stdout=subprocess.DEVNULL, start_new_session=True, **options
    )
    try:
        # A round is kept once the next one has its line: the line comes before the state that a run goes on from.
        wait_until(lambda: len(rounds(tmp_path / "killed")) >= 2, seconds=600)
    finally:
        kill_all(str(tmp_path))
        killed.wait()
    wait_until(lambda: not family(str(tmp_path), math.inf), seconds=600)
    assert 2 <= len(rounds(tmp_path / "killed")) < ROUNDS
    resumed = subprocess.run(command(tmp_path / "killed"), check=True, capture_output=True, **options)
    assert "Going on after round" in resumed.stdout
    assert f"Round 1 of {ROUNDS}" not in resumed.stdout
    assert f"Round {ROUNDS} of {ROUNDS}: 3 clients" in resumed.stdout
    assert rounds(tmp_path / "killed") == list(range(1, ROUNDS + 1))
    scenario = TrainingFolder(tmp_path / "killed").config()
    assert isinstance(scenario, TrainingScenario)
    found = scenario.model_copy(update={"data": pictures()})  # the manifest keeps no folders
    whole, _ = play(found, tmp_path / "whole")  # with one thread, too
    state = torch.load(tmp_path / "killed" / "state.pt", weights_only=True)
    assert all(torch.equal(whole[name], value) for name, value in state["weights"].items())
    leaves_what_it_promises(tmp_path / "killed")


def kill_all(marker: str) -> None:
    """The launcher, Flower's processes and Ray's at once, as when a machine goes down: no guard is left to tidy up."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FEDMJP_TEST") == marker:
                process.kill()


def leaves_what_it_promises(output: Path) -> None:
    """The written weights are those of the last history row, in a model that anybody can build."""
    folder = TrainingFolder(output)
    scenario = folder.config()
    assert isinstance(scenario, TrainingScenario)
    assert scenario.training is not None
    model = build(folder.trained())
    scenario = scenario.model_copy(update={"data": pictures()})  # the manifest keeps no folders
    accuracy = Validation(model, scenario, scenario.training.recipe).accuracy(model.state_dict())
    last = pd.read_csv(folder.history).iloc[-1]
    assert accuracy.top1 == pytest.approx(last["top1"])
    assert accuracy.loss == pytest.approx(last["validation_loss"], rel=1e-4)
    assert all((output / name).exists() for name in ("history.png", "partition.png", "partition.npz", "tensorboard"))


def simulate(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> int:
    data = [] if "--data" in arguments else ["--data", pictures()]
    command = ["fedmjp", "simulate", *data, *SETTINGS, *arguments, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_finished_run_says_so_and_another_configuration_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--clients", "2", "--rounds", "1"]
    monkeypatch.setattr("fedmjp.benchmarks.federation.training.train_federated", _in_process)
    assert simulate(monkeypatch, tmp_path, *arguments) == 0
    printed = capsys.readouterr().out
    assert "2 clients, " in printed
    assert "has no validation split: Top-1 is measured on the pictures that the clients train on" in printed
    assert simulate(monkeypatch, tmp_path, *arguments) == 0
    assert "All 1 rounds are done; --fresh starts over." in capsys.readouterr().out
    about = (tmp_path / "manifest.json").read_text()
    assert pictures() not in about, "folders of this machine are nobody's business"
    assert (tmp_path / "classes.txt").read_text().split() == [f"class-{number}" for number in range(4)]
    assert simulate(monkeypatch, tmp_path, *arguments, "--seed", "1") == BAD_INPUT
    assert (tmp_path / "manifest.json").read_text() == about, "still that of the run"
    assert "another configuration" in capsys.readouterr().err
    assert simulate(monkeypatch, tmp_path, *arguments, "--seed", "1", "--fresh") == 0
    assert rounds(tmp_path) == [1]
    assert simulate(monkeypatch, tmp_path, *arguments, "--data", "/nowhere", "--fresh") == BAD_INPUT
    assert (tmp_path / "weights.safetensors").exists(), "nothing is removed for what cannot be started"


def test_a_run_that_failed_says_that_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise FederationError("the run's SuperLink does not answer any more")

    monkeypatch.setattr("fedmjp.benchmarks.federation.training.run_app", fail)
    assert simulate(monkeypatch, tmp_path, "--clients", "2", "--rounds", "1") == 1
    told = capsys.readouterr().err.strip()
    assert told == f"Error: the run's SuperLink does not answer any more; {KEPT}"


def test_a_folder_of_other_results_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / ".fedmjp").write_text("a mark")
    (tmp_path / "manifest.json").write_text('{"kind": "evaluation"}')
    assert simulate(monkeypatch, tmp_path, "--clients", "2") == BAD_INPUT
    assert "holds other results than a training run's" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name != ".fedmjp"] == ["manifest.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {rounds: 5}", "unknown key 'training'"),
        ("recipe:", "recipe = None is no group of keys"),
        ("partition: [1]", "partition = [1] is no group of keys"),
        ("model: 5", "model = 5 is no group of keys"),
        ("1: 2", "the key 1 is no text"),
        ("rounds: many", "rounds = 'many'"),
        ("defences: [mpj]", "Unknown defence 'mpj'. Did you mean mjp"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert simulate(monkeypatch, tmp_path / "run", "--config", str(tmp_path / "run.yaml")) == BAD_INPUT
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_round_that_is_played_again_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plays: list[int] = []

    def run_app(*_: object) -> None:
        """The server's own loop, which nobody answers when it plays first."""
        plays.append(0)
        silent = len(plays) == 1
        scenario = TrainingFolder(tmp_path).config()
        assert isinstance(scenario, TrainingScenario)
        scenario = scenario.model_copy(update={"data": pictures()})  # the manifest keeps no folders
        play(scenario, tmp_path, answer=lambda _round, _client, reply: None if silent else reply)

    monkeypatch.setattr("fedmjp.benchmarks.federation.training.run_app", run_app)
    assert simulate(monkeypatch, tmp_path, "--clients", "2", "--rounds", "1") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Played again: in round 1 0 of 2 clients gave an update that can be used" in printed
    assert rounds(tmp_path) == [1]


def _in_process(scenario: TrainingScenario, _dealt: Partition, folder: TrainingFolder, *_: object) -> None:
    play(scenario, folder.root)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "fedavgg"], "'--strategy': 'fedavgg' is not one of 'fedavg', 'fedprox'"),
        (["--partition", "random"], "'--partition': 'random' is not one of 'iid'"),
        (["--rounds", "3", "--uploads", "4"], "records of round 4 were asked for, but there are rounds 1 to 3"),
        (["--clients", "9"], "9 clients cannot share 8 pictures"),
        (["--participation", "0"], "participation = 0"),
        (["--data", "/nowhere/at/all"], "there is no folder /nowhere/at/all"),
        (["model.classes=3"], "has label 3"),
        (["model.name=deit_micr"], "Unknown model 'deit_micr'. Did you mean deit_micro"),
        (["recipe.batchsize=4"], "unknown key 'recipe.batchsize', did you mean 'recipe.batch_size'?"),
        (["model.weights=/nowhere.safetensors"], "/nowhere.safetensors cannot be read"),
        (["batch_size=3"], "unknown key 'batch_size', did you mean 'recipe.batch_size'?"),
        (["model=3"], "model"),
        (["nonsense"], "'nonsense' is not of the form KEY=VALUE"),
        (["--gpus-per-client", "0.5"], "--gpus-per-client 0.5 was asked for, but the run is on the CPU"),
        (
            ["--strategy", "fedsgd", "--uploads", "1", "recipe.mixup=0.8", "recipe.repeats=3", "recipe.batch_size=9"],
            "with mixup 0.8, repeats 3, batch_size 9: set recipe.mixup=0 recipe.repeats=1 recipe.batch_size=1",
        ),
        (["--row", "table4-Z"], "table4-Z"),
        (["--defence", "gausian"], "Unknown defence 'gausian'. Did you mean gaussian"),
        (["--defence", "local_dp:epsilon=0"], "epsilon = '0'"),
        (["--defence", "secure_sum:clients=3"], "8 clients make no groups of 3, whose updates are summed"),
        (["--defence", "dp_sgd", "recipe.cutmix=1"], "mixed ones are of two: set mixup and cutmix to 0"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_trained(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    assert simulate(monkeypatch, tmp_path / "run", *arguments) == BAD_INPUT
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "run" / "manifest.json").exists()
