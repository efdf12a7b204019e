"""Segmentation: scenes drawn here, figures against torchmetrics, the backbone against timm's, and the command."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from fedmjp import running
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.errors import CheckpointError, ConfigError, DataError
from fedmjp.models.build import build
from fedmjp.seeds import scoped_randomness
from fedmjp.training.state import save_weights
from tests.studies import load_study

study = load_study("segmentation/study.py")
CLASSES, IGNORED, count, figures_of, open_scenes = (
    study.CLASSES, study.IGNORED, study.count, study.figures_of, study.open_scenes,
)  # fmt: skip
SegmentationConfig, SegmentationRecipe, UperNetModel = (
    study.SegmentationConfig, study.SegmentationRecipe, study.UperNetModel,
)  # fmt: skip
build_network, learning_rate_factor, training_crop, whole = (
    study.build_network, study.learning_rate_factor, study.training_crop, study.whole,
)  # fmt: skip

SMALL = {"dim": 12, "depths": [1, 1, 1, 1], "heads": [1, 1, 2, 2], "window": 4, "channels": 16, "auxiliary_channels": 8}
SETTINGS = [f"model.{key}={str(value).strip('[]').replace(' ', '')}" for key, value in SMALL.items()]
COLOURS = {3: (220, 30, 30), 77: (30, 200, 40), 150: (40, 40, 230)}  # of each class
BLURRED = 10  # pixels on both sides of a border in which JPEG and resizing mix the colours of two classes


def draw_scene(root: Path, split: str, number: int) -> None:
    """Bars of colours that say what they are, with a border of no class."""
    drawn = np.random.default_rng(number)
    values = np.repeat(drawn.permutation(list(COLOURS)), 16)[None].repeat(40, axis=0).astype(np.uint8)
    picture = np.stack([np.vectorize(lambda value, at=at: COLOURS[value][at])(values) for at in range(3)], axis=-1)
    values[:2] = 0
    for kind, ending, content in (("images", "jpg", picture.astype(np.uint8)), ("annotations", "png", values)):
        folder = root / kind / split
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(content).save(folder / f"ADE_{number:08d}.{ending}")


@pytest.fixture(scope="module")
def scenes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "ADEChallengeData2016"
    for number in range(6):
        draw_scene(root, "training", number)
    for number in range(6, 8):
        draw_scene(root, "validation", number)
    return root


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["study.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        running.run(study.app)
    return int(ended.value.code or 0)


class StoppedError(Exception):
    pass


def stop_at_first_checkpoint(_console: Any, text: str) -> None:
    if text.startswith("Iteration"):
        raise StoppedError


def test_a_network_learns_scenes_and_goes_on_where_it_was_stopped(
    scenes_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {"iterations": 30, "batch_size": 4, "crop": 32, "learning_rate": 0.02, "warmup_iterations": 2}
    words = ["train", "--data", str(scenes_folder), *SETTINGS, "recipe.checkpoint_every=10"]
    words += [f"recipe.{key}={value}" for key, value in recipe.items()]
    parts = tmp_path / "parts"
    assert run(monkeypatch, *words, "--output", str(tmp_path / "whole")) == 0
    assert "need ones trained on ImageNet" in capsys.readouterr().out
    with monkeypatch.context() as patched:
        patched.setattr(study, "tell", stop_at_first_checkpoint)
        with pytest.raises(StoppedError):
            run(patched, *words, "--output", str(parts))
    assert run(monkeypatch, *words, "--output", str(parts)) == 0
    histories = [pd.read_csv(tmp_path / name / "history.csv") for name in ("whole", "parts")]
    assert histories[0]["iteration"].tolist() == [10, 20, 30]
    assert histories[0]["loss"].tolist() == histories[1]["loss"].tolist()
    capsys.readouterr()
    evaluated = ["evaluate", str(parts), "--data", str(scenes_folder), "--output", str(tmp_path / "figures")]
    assert run(monkeypatch, *evaluated) == 0
    assert "Swin-T + MJP (the paper's): mIoU 44.03, mAcc 55.50" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures" / "segmentation.json").read_text())
    assert figures["mAcc"] > 0.8
    assert figures["mIoU"] > 0.7
    assert run(monkeypatch, *words, "recipe.crop=64", "--output", str(parts)) == 2
    assert "another configuration" in capsys.readouterr().err
    draw_scene(scenes_folder, "training", 99)
    assert run(monkeypatch, *words, "--output", str(parts)) == 2
    assert "other scenes" in capsys.readouterr().err


def test_figures_are_those_of_torchmetrics() -> None:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(7, (2, 60, 50), generator=generator, dtype=torch.uint8)
    predicted = torch.where(torch.rand(labels.shape, generator=generator) < 0.6, labels, labels.flip(0)).long()
    labels[:, :9] = IGNORED
    figures = figures_of(count(labels[0], predicted[0], 9) + count(labels[1], predicted[1], 9))
    known = {"num_classes": 9, "ignore_index": IGNORED}
    given = (predicted, labels.long())
    assert figures.mean_overlap == pytest.approx(MulticlassJaccardIndex(**known)(*given).item(), abs=1e-6)
    assert figures.mean_accuracy == pytest.approx(MulticlassAccuracy(**known)(*given).item(), abs=1e-6)
    assert figures.accuracy == pytest.approx(MulticlassAccuracy(average="micro", **known)(*given).item(), abs=1e-6)
    assert figures.overlaps.isnan().tolist() == [False] * 7 + [True] * 2


def features_of(model: UperNetModel, backbone: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one picture, by the network and by timm."""
    network = build_network(model, 0)
    inputs = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = backbone.eval().forward_features(inputs)
        swin = network.network.backbone.swin
        swin.layernorm.load_state_dict(backbone.norm.state_dict())  # not among what a segmentation network uses
        ours = swin(inputs).last_hidden_state
        assert network(torch.zeros(1, 3, 64, 96)).shape == (1, CLASSES, 64, 96)
    return ours.view_as(theirs), theirs


def test_a_classifiers_weights_give_the_features_that_timm_computes(tmp_path: Path) -> None:
    sizes = {"embed_dim": 12, "depths": (2, 1, 1, 1), "num_heads": (1, 1, 2, 2), "window_size": 4, "img_size": 128}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **sizes)
    torch.save({"model": swin.state_dict()}, tmp_path / "weights.pth")
    weights = Checkpoint.of(tmp_path / "weights.pth")
    ours, theirs = features_of(UperNetModel.parse({**SMALL, "depths": (2, 1, 1, 1), "weights": weights}), swin, 128)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_model_trained_with_mjp_keeps_its_absolute_positions(tmp_path: Path) -> None:
    model = build(ModelConfig(name="swin_tiny", unknown_embedding=True, image_size=224, patch_size=4, classes=3))
    save_weights(tmp_path / "weights.safetensors", model.state_dict())
    small = UperNetModel(channels=16, auxiliary_channels=8, weights=Checkpoint.of(tmp_path / "weights.safetensors"))
    ours, theirs = features_of(small, model.backbone, 224)
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_weights_of_something_else_are_refused_by_the_first_name(tmp_path: Path) -> None:
    file = tmp_path / "deit.pth"
    deit = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=1)
    torch.save({"model": deit.state_dict()}, file)
    with pytest.raises(CheckpointError, match=r"is not of such a Swin transformer: it holds swin\.blocks"):
        build_network(UperNetModel.parse({**SMALL, "weights": Checkpoint.of(file)}), 0)
    swin = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=24, num_heads=(1, 1, 1, 1))
    torch.save(swin.state_dict(), file)
    with pytest.raises(CheckpointError, match=r"is \(24, 3, 4, 4\) instead of \(12, 3, 4, 4\); set model.dim"):
        build_network(UperNetModel.parse({**SMALL, "weights": Checkpoint.of(file)}), 0)


def test_labels_are_classes_from_zero_and_the_rest_is_ignored(scenes_folder: Path) -> None:
    scenes = open_scenes(scenes_folder, "validation")
    image, labels = scenes.load(0)
    assert image.shape == (3, 40, 48)
    assert sorted(labels.unique().tolist()) == [2, 76, 149, IGNORED]
    assert (labels[:2] == IGNORED).all()
    assert scenes.class_names()[149] == "150"


def test_crops_move_labels_with_their_pixels(scenes_folder: Path) -> None:
    image, labels = open_scenes(scenes_folder, "training").load(1)
    for drawn in range(20):
        with scoped_randomness(drawn):
            shown, there = training_crop(image, labels, 96)  # greater than most resized scenes
        assert shown.shape == (3, 96, 96)
        assert there.dtype == torch.int64
        for value, colour in COLOURS.items():
            others = (there != value - 1).float()[None]
            away = F.max_pool2d(others, 2 * BLURRED + 1, stride=1, padding=BLURRED)[0] == 0
            of_class = shown[:, away]
            if of_class.shape[1]:
                assert int(of_class.mean(dim=1).argmax()) == int(np.argmax(colour))
    tried, size = whole(image, 32, 4)
    assert (size, tuple(tried.shape)) == ((32, 38), (3, 32, 40))


def test_the_learning_rate_is_torchs_warm_up_and_fall() -> None:
    recipe = SegmentationRecipe(iterations=20, warmup_iterations=5)
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedules = [
        torch.optim.lr_scheduler.LinearLR(optimiser, start_factor=1e-6, total_iters=5),
        torch.optim.lr_scheduler.PolynomialLR(optimiser, total_iters=15, power=1.0),
    ]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimiser, schedules, milestones=[5])
    for done in range(20):
        assert learning_rate_factor(recipe, done) == pytest.approx(optimiser.param_groups[0]["lr"], abs=1e-6)
        optimiser.step()
        schedule.step()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: root / "nowhere", "there is no folder .*nowhere .fedmjp does not.*: known: annotations, images"),
        (lambda root: root.parent, "did you mean .*ADEChallengeData2016"),
        (lambda root: (root / "annotations/training/ADE_00000000.png").unlink(), "picture ADE_00000000 .* annotation"),
        (lambda root: Image.new("L", (9, 8)).save(root / "annotations/training/ADE_00000000.png"),
         r"ADE_00000000.png is 9 x 8 pixels, its picture 48 x 40"),
        (lambda root: Image.new("L", (48, 40), 151).save(root / "annotations/training/ADE_00000000.png"),
         "holds the value 151: classes are 1 to 150"),
        (lambda root: Image.new("RGB", (48, 40)).save(root / "annotations/training/ADE_00000000.png"),
         "one whole number is a class"),
        (lambda root: (root / "images/training/ADE_00000000.jpg").write_bytes(b"x"), "cannot be read"),
    ],
)  # fmt: skip
def test_a_folder_of_another_kind_is_told_in_one_line(spoil: Any, message: str, tmp_path: Path) -> None:
    root = tmp_path / "ADEChallengeData2016"
    draw_scene(root, "training", 0)
    draw_scene(root, "training", 1)
    place = spoil(root)
    with pytest.raises(DataError, match=message) as told:
        open_scenes(place if isinstance(place, Path) else root, "training").load(0)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"depths": [2, 2]}}, "4 numbers above 0"),
        ({"model": {"heads": [3, 6, 12, 7]}}, "do not divide into 7 heads"),
        ({"recipe": {"batch_size": 1}}, "recipe.batch_size = 1"),
        ({"recipe": {"iterations": 100}}, "leaves nothing of iterations=100"),
        ({"recipe": {"crops": 512}}, "did you mean 'recipe.crop'"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SegmentationConfig.parse({"data": "x", **values})


def test_help_lists_every_key_there_is() -> None:
    told = {f"{group}.{name}" for group, names in study.KEYS.items() for name in names.split(", ")}
    settable = SegmentationConfig.keys()
    of_files = {"model.weights.path", "model.weights.sha256"}
    assert told == {key for key in settable if "." in key} - of_files
