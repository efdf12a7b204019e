"""Processes that train together: the same model as one process makes, whatever their number; what cannot be shared."""

import json
import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedmjp.config import ModelConfig
from fedmjp.defences.pipeline import read_pipeline
from fedmjp.errors import TrainingError
from fedmjp.learning import Learning
from fedmjp.models.build import build
from fedmjp.server.refusals import RefusalFile
from fedmjp.training.central import TrainingEvents, open_pictures, train
from fedmjp.training.config import TrainingConfig
from fedmjp.training.loop import Schedule, Trainer
from fedmjp.training.process_group import ProcessGroup
from fedmjp.training.run_folder import TrainingFolder
from tests.federations import PLAIN, play, scenario_of

MODEL = {"name": "deit_micro", "image_size": 32, "patch_size": 4, "classes": 1000}
# What is drawn for a picture depends on its place alone, but for drop path. The rate is one that moves weights.
RECIPE = {"epochs": 3, "warmup_epochs": 1, "batch_size": 6, "drop_path": 0.0, "learning_rate": 0.05}
CONFIG = {"model": MODEL | {"localisation": "nonlinear"}, "defences": ["mjp:mask_ratio=0.3"], "recipe": RECIPE}


class StoppedError(Exception):
    """As by a kill between two epochs."""


def stop(epoch: int, *_: object) -> None:
    if epoch == 1:
        raise StoppedError


def moved_alike(
    begun: dict[str, torch.Tensor], found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> bool:
    """Whether weights moved the same way; keys' biases, whose gradients are zero, AdamW moves by their rounding."""
    names = [name for name in expected if not name.endswith("qkv.bias")]
    off, moved = (
        torch.stack([(weights[name] - since[name]).norm() for name in names])
        for weights, since in ((found, expected), (expected, begun))
    )
    return found.keys() == expected.keys() and bool((off <= 0.01 * moved).all())


@pytest.mark.slow
def test_a_run_goes_on_in_two_processes_to_the_weights_that_one_would_have_made(tmp_path: Path) -> None:
    config = TrainingConfig.parse(CONFIG)
    pictures = open_pictures(config.data, config.model.classes)
    one, two = TrainingFolder(tmp_path / "one"), TrainingFolder(tmp_path / "two")
    settings = [f"model.{key}={value}" for key, value in CONFIG["model"].items()]
    settings += [f"recipe.{key}={value}" for key, value in RECIPE.items()]
    command = ["train", *settings, "--defence", CONFIG["defences"][0], "--device", "cpu", "--output", str(two.root)]
    one.root.mkdir()
    train(config, pictures, one, TrainingEvents())
    two.root.mkdir()
    (two.root / ".fedmjp").touch()
    with pytest.raises(StoppedError):
        train(config, pictures, two, TrainingEvents(on_epoch=stop))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*torchrun, "-m", "fedmjp", *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Going on after epoch 1 of 3.") == ended.stdout.count("Epoch 3 of 3") == 1
    assert json.loads(two.manifest.read_text())["processes"] == 2
    begun, expected, found = build(config.network).state_dict(), load_file(one.weights), load_file(two.weights)
    assert moved_alike(begun, found, expected)
    columns = {"delimiter": ",", "skiprows": 1, "usecols": range(5)}
    assert np.allclose(np.loadtxt(one.history, **columns), np.loadtxt(two.history, **columns), rtol=1e-4)


@pytest.mark.slow
def test_a_client_of_two_processes_sends_what_one_would_have_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = PLAIN | {"batch_size": 4, "drop_path": 0.0, "mixup": 0.8}
    scenario = scenario_of(clients=1, rounds=1, local_epochs=2, strategy="fedprox", recipe=recipe)
    expected, _ = play(scenario, tmp_path / "one")
    monkeypatch.setattr("fedmjp.clients.training.count_processes", lambda _scenario: 2)
    found, grid = play(scenario, tmp_path / "two")
    assert grid.replies[1, 0].content["metrics"]["pictures"] == 16
    assert moved_alike(build(scenario.network).state_dict(), found, expected)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_client_whose_other_process_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmjp.clients.training.count_processes", lambda _scenario: 2)
    monkeypatch.setattr("fedmjp.clients.several_gpus._help", os.abort)
    monkeypatch.setattr("fedmjp.training.process_group.PATIENCE", timedelta(seconds=5))
    play(scenario_of(clients=1, rounds=1), tmp_path)
    (refused,) = RefusalFile.of_run(tmp_path).read()
    assert "process 0 of 2 that train together lost the others, one of which ended" in refused.reason


@pytest.mark.parametrize(
    ("model", "defence", "refused"),
    [
        ({}, "dp_sgd:epsilon=8,delta=1e-5", "dp_sgd.* draws one noise for all pictures of a step, which 2 processes"),
        ({"name": "resnet50", "patch_size": 16, "image_size": 64}, None, "a model that normalises over its batch"),
    ],
)
def test_what_processes_cannot_share_is_refused(model: dict, defence: str | None, refused: str) -> None:
    pipeline = read_pipeline([defence] if defence else [])
    network, learning = build(ModelConfig.parse(MODEL | model)), Learning.parse({"recipe": RECIPE | {"mixup": 0}})
    with pytest.raises(TrainingError, match=refused):
        Trainer(network, learning, pipeline, schedule=Schedule(1, 1), seed=0, group=ProcessGroup(0, 2))


def test_alone_a_gradient_stays_as_it_is() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, 2.0, 3.0])
    before = parameter.grad
    sums = ProcessGroup().average([parameter], torch.tensor([2.0, 0.5]), 4)
    assert sums.tolist() == [8.0, 2.0, 4.0]
    assert parameter.grad is before


@pytest.mark.parametrize("pictures", [3, 0])
def test_what_no_part_uses_gets_no_gradient(pictures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used, unused = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    if pictures:
        used.grad = torch.ones(2)
    # The other process has one picture: two values of each gradient, who uses what, a loss, the count.
    other = torch.tensor([5.0, 9.0, 0.0, 0.0, 1.0, 0.0, 2.0, 1.0])
    monkeypatch.setattr(ProcessGroup, "sum", lambda _self, values: values + other)
    sums = ProcessGroup(0, 2).average([used, unused], torch.tensor([4.0]), pictures)
    assert used.grad is not None
    assert used.grad.tolist() == [(pictures + 5) / (pictures + 1), (pictures + 9) / (pictures + 1)]
    assert unused.grad is None
    assert sums.tolist() == [4.0 * pictures + 2, pictures + 1]
