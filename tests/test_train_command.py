"""`fedmjp train`: what it leaves, and one clear line for bad input."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fedmjp.cli import main
from fedmjp.config import ModelConfig
from fedmjp.models.build import build
from fedmjp.training.run_folder import TrainingFolder

SMALL = [
    "model.name=deit_micro",
    "model.image_size=32",
    "model.patch_size=4",
    "recipe.epochs=2",
    "recipe.warmup_epochs=1",
    "recipe.batch_size=4",
]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedmjp", "train", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    for split, count in (("train", 4), ("val", 2)):
        for label in ("cat", "dog", "suit"):
            (folder / split / label).mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{index}.png")
    return folder


def test_a_run_leaves_what_the_next_command_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path
) -> None:
    output = tmp_path / "out"
    settings = [*SMALL, "--defence", "mjp:mask_ratio=0.2", "model.localisation=linear", "model.classes=3"]
    assert run(monkeypatch, *settings, "--data", str(pictures), "--output", str(output), "--seed", "3") == 0
    folder = TrainingFolder(output)
    history = pd.read_csv(folder.history)
    assert history["epoch"].tolist() == [1, 2]
    assert history["pictures"].tolist() == [12, 12]
    assert history["top1"].between(0, 1).all()
    assert np.isfinite(history[["loss", "localisation", "validation_loss"]]).all(axis=None)
    about = json.loads(folder.manifest.read_text())
    assert about["config"]["seed"] == about["config"]["model"]["seed"] == 3
    assert str(tmp_path) not in folder.manifest.read_text()
    assert folder.figure.stat().st_size > 10_000
    assert list(folder.tensorboard.iterdir())
    trained = build(folder.trained())
    assert trained.defended
    weights = load_file(folder.weights)
    assert all(torch.equal(value, weights[name]) for name, value in trained.state_dict().items())
    untrained = build(ModelConfig.parse(folder.trained().model_dump() | {"weights": None}))
    assert not torch.equal(untrained.backbone.pos_embed, trained.backbone.pos_embed)


def test_an_unreadable_picture_in_an_epoch_is_told_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "train" / "dog" / "1.png").write_bytes(b"no picture")
    settings = [*SMALL, "model.classes=3", "recipe.repeats=1"]
    assert run(monkeypatch, *settings, "--data", str(pictures), "--output", str(tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    assert printed.count("Skipped:") == 1
    assert "1.png" in printed
    assert pd.read_csv(tmp_path / "out" / "history.csv")["pictures"].tolist() == [11, 11]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.classes=2"], "2"),
        (["model.name=deit_mikro"], "Unknown model 'deit_mikro'. Did you mean deit_micro"),
        (["recipe.epochs=many"], "many"),
        (["recipe.epoch=3"], "epoch"),
        (["--defence", "mjp:mask_ratio=0.01"], "of 64 patches moves none"),
        (["--defence", "jigsaw", "puzzle.warmup_epochs=5"], "5 epochs without a puzzle"),
        (["--defence", "mjp", "puzzle.probability=0"], "puzzle.probability = 0"),
        (["--defence", "mpj"], "Unknown defence 'mpj'. Did you mean mjp"),
        (["--defence", "local_dp"], "nothing leaves here"),
        (["recipe.learning_rate=1e300"], "recipe.learning_rate = "),
        (["model=5"], "model"),
        (["--row", "table4-Z"], "table4-Z"),
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["model.weights=nowhere.safetensors"], "nowhere.safetensors cannot be read"),
        (["--data", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    pictures: Path,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "--data", str(pictures), *SMALL, "model.classes=3", *settings) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_row_of_the_paper_is_evaluated_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*SMALL, "model.classes=3", "--defence", "mjp:mask_ratio=0.2"]
    arguments = ["--row", "table4-J", "--data", str(pictures), "--output", str(tmp_path / "out"), *settings]
    assert run(monkeypatch, *arguments) == 0
    assert "Consistency" in capsys.readouterr().out
    rows = pd.read_csv(tmp_path / "out" / "evaluation" / "evaluation.csv")
    assert rows["mask_ratio"].tolist() == [0.27, 0.5]
    config = json.loads((tmp_path / "out" / "manifest.json").read_text())["config"]
    assert config["defences"] == [{"name": "mjp", "mask_ratio": 0.2}]
    assert config["model"]["localisation"] == "nonlinear"


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("- 1\n", "must hold keys"),
        ("1: 2\n", "the key 1 is no text"),
        ("model: {3: 4}\n", "the key 3 is no text"),
        ("model: [\n", "is not YAML"),
        ("recipe: 5\n", "recipe = 5"),
    ],
)
def test_a_file_that_is_no_configuration_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], yaml: str, message: str
) -> None:
    (tmp_path / "run.yaml").write_text(yaml)
    assert run(monkeypatch, "--config", str(tmp_path / "run.yaml"), "--output", str(tmp_path / "out")) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_options_come_before_a_files_keys_and_settings_before_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path
) -> None:
    (tmp_path / "run.yaml").write_text("seed: 7\ndata: nowhere\nmodel: {seed: 8}\nrecipe: {warmup_epochs: 0}\n")
    options = [
        "--config",
        str(tmp_path / "run.yaml"),
        "--data",
        str(pictures),
        "--seed",
        "3",
        *SMALL,
        "model.classes=3",
    ]
    assert run(monkeypatch, *options, "recipe.epochs=1", "recipe.warmup_epochs=0", "--output", str(tmp_path / "o")) == 0
    config = json.loads((tmp_path / "o" / "manifest.json").read_text())["config"]
    assert (config["seed"], config["model"]["seed"], config["recipe"]["epochs"]) == (3, 3, 1)


def test_a_refused_run_leaves_the_manifest_of_the_former_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "model.classes=3", "--data", str(pictures), "--output", str(tmp_path / "out")]
    assert run(monkeypatch, *arguments) == 0
    before = (tmp_path / "out" / "manifest.json").read_text()
    assert run(monkeypatch, *arguments, "--seed", "77") == 2
    assert "another configuration" in capsys.readouterr().err
    assert (tmp_path / "out" / "manifest.json").read_text() == before
    (tmp_path / "out" / "manifest.json").write_text('{"kind": "campaign"}')
    assert run(monkeypatch, *arguments) == 2
    assert "other results than a training run's" in capsys.readouterr().err


def test_fresh_deletes_nothing_before_the_new_run_can_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path
) -> None:
    arguments = [*SMALL, "model.classes=3", "--output", str(tmp_path / "out")]
    assert run(monkeypatch, *arguments, "--data", str(pictures)) == 0
    before = (tmp_path / "out" / "weights.safetensors").read_bytes()
    assert run(monkeypatch, *arguments, "--data", "/nowhere", "--fresh") == 2
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == before


def test_a_run_goes_on_where_its_pictures_were_moved_to_but_not_with_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SMALL, "model.classes=4", "--output", str(tmp_path / "out"), "--data"]
    assert run(monkeypatch, *arguments, str(pictures)) == 0
    moved = Path(shutil.copytree(pictures, tmp_path / "moved"))
    assert run(monkeypatch, *arguments, str(moved)) == 0
    shutil.copytree(moved / "train" / "cat", moved / "train" / "ant")
    assert run(monkeypatch, *arguments, str(moved)) == 2
    assert "is of a run on other pictures" in capsys.readouterr().err
    assert (tmp_path / "out" / "classes.txt").read_text() == "cat\ndog\nsuit\n"


def test_accuracy_on_the_training_pictures_is_called_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, told in ((pictures / "train", True), (pictures, False)):
        arguments = ["--data", str(place), "--output", str(tmp_path / f"out-{told}")]
        assert run(monkeypatch, *SMALL, "model.classes=3", *arguments) == 0
        assert ("measured on the pictures that are trained on" in capsys.readouterr().out) == told


def test_an_unreadable_validation_picture_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "val" / "suit" / "0.png").write_bytes(b"")
    assert run(monkeypatch, *SMALL, "model.classes=3", "--data", str(pictures), "--output", str(tmp_path / "out")) == 0
    assert capsys.readouterr().out.count("Skipped:") == 1


def test_a_validation_class_that_was_not_trained_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "val" / "dog").rename(pictures / "val" / "images")
    assert run(monkeypatch, *SMALL, "model.classes=4", "--data", str(pictures), "--output", str(tmp_path / "out")) == 2
    assert "has the class folder images" in capsys.readouterr().err


def test_a_checkpoint_of_another_architecture_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = build(ModelConfig(name="deit_tiny", image_size=32, patch_size=4, classes=3))
    save_file(other.state_dict(), tmp_path / "other.safetensors")
    settings = [*SMALL, "model.classes=3", f"model.weights={tmp_path / 'other.safetensors'}"]
    assert run(monkeypatch, *settings, "--data", str(pictures), "--output", str(tmp_path / "out")) == 2
    printed = capsys.readouterr().err
    assert "does not fit the model" in printed
    assert printed.count("\n") == 1


def test_a_split_without_pictures_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(pictures / "val")
    (pictures / "val" / "cat").mkdir(parents=True)
    assert run(monkeypatch, *SMALL, "--data", str(pictures), "--output", str(tmp_path / "out")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_pictures_of_other_classes_than_the_training_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(monkeypatch, *SMALL, "model.classes=3", "--data", str(pictures), "--output", str(output)) == 0
    for split in ("train", "val"):
        shutil.rmtree(pictures / split / "cat")
    capsys.readouterr()
    arguments = ["evaluate", str(output), "--data", str(pictures), "--output", str(tmp_path / "evaluation")]
    monkeypatch.setattr(sys, "argv", ["fedmjp", *arguments, "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "label 0 is dog in these pictures, but cat in the training" in printed
    assert printed.count("\n") == 1
