"""Our trained weights by name: what is said of them is what their runs hold, and another file is refused."""

import csv
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedmjp
from fedmjp import zoo
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.errors import BadInputError, CheckpointError, UnknownNameError, WeightsMissingError
from fedmjp.models.build import build_vit
from tests.conftest import ROOT
from tests.test_weights_command import run

RUNS = ROOT / "results" / "learning" / "runs"
NAME = "coarse-mjp-0"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in place of the user's."""
    monkeypatch.setenv("FEDMJP_WEIGHTS", str(tmp_path / "weights"))
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


def test_every_run_is_in_the_zoo_and_on_the_page() -> None:
    assert set(zoo.ZOO) == {path.name for path in RUNS.iterdir()}
    page = (RUNS.parent / "README.md").read_text(encoding="utf-8")
    for model in zoo.ZOO.values():
        said = (model.training, model.defence, model.patch_size, model.top1, f"`{model.sha256}`")
        assert f"| `{model.name}` | {' | '.join(map(str, said))} |" in page


@pytest.mark.parametrize("model", zoo.ZOO.values(), ids=lambda model: model.name)
def test_what_the_zoo_says_is_what_the_run_holds(model: zoo.ZooModel) -> None:
    run = RUNS / model.name
    assert hashlib.sha256((run / "weights.safetensors").read_bytes()).hexdigest() == model.sha256
    config: dict[str, Any] = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["config"]
    with (run / "history.csv").open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert 100 * float(rows[-1]["top1"]) == pytest.approx(model.top1, abs=0.051)
    assert {name: config["model"][name] for name in model.model} == model.model
    assert model.defence == next((each["name"] for each in config.get("defences", [])), "none")
    epochs = "rounds" if "training" in config else "epochs"
    assert f"{len(rows)} {epochs}" in model.training


def test_a_scenario_takes_a_name_and_has_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = fedmjp.Scenario(model=f"zoo:{NAME}", defences=["mjp"])
    built = build_vit(scenario.network)
    trained = load_file(RUNS / NAME / "weights.safetensors")
    assert torch.equal(built.state_dict()["unknown_embedding"], trained["unknown_embedding"])
    (picture,) = fedmjp.bundled_pictures(1, size=32)
    with pytest.raises(BadInputError, match=f"label {picture.label}, but the model knows 32 classes"):
        scenario.exchange([picture])
    exchange = scenario.exchange([replace(picture, label=3)])
    assert "backbone.patch_embed.proj.weight" in exchange.upload.tensors


def test_the_command_tells_name_score_and_digest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 0
    printed = capsys.readouterr().out
    for model in zoo.ZOO.values():
        assert f"zoo:{model.name}" in printed
        assert model.sha256 in printed
    assert run(monkeypatch, "fetch", f"zoo:{NAME}") == 0
    assert str(RUNS / NAME / "weights.safetensors") in capsys.readouterr().out


def test_another_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    weights = load_file(RUNS / NAME / "weights.safetensors")
    first = next(iter(weights))
    weights[first].flatten()[0] += 1e-6
    save_file(weights, folder / f"{NAME}.safetensors")
    with pytest.raises(CheckpointError, match=f"is not zoo:{NAME}: its SHA-256 begins with"):
        Checkpoint.of(f"zoo:{NAME}")
    assert run(monkeypatch, "fetch", f"zoo:{NAME}") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_is_replaced_later_is_refused_as_well(folder: Path) -> None:
    target = folder / f"{NAME}.safetensors"
    target.write_bytes((RUNS / NAME / "weights.safetensors").read_bytes())
    config = ModelConfig.parse(
        {**zoo.ZOO[NAME].model, "unknown_embedding": True, "weights": Checkpoint.of(f"zoo:{NAME}")}
    )
    target.write_bytes((RUNS / "coarse-none-0" / "weights.safetensors").read_bytes())
    with pytest.raises(CheckpointError):
        build_vit(config)


def test_a_wrong_name_and_a_missing_file_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="zoo:coarse-mjp-0"):
        Checkpoint.of("zoo:coarse-mjp")
    monkeypatch.setattr(zoo, "CLONE", tmp_path)
    with pytest.raises(WeightsMissingError, match=f"{NAME}.safetensors"):
        Checkpoint.of(f"zoo:{NAME}")
