"""What crosses the wire in chosen rounds of a training run: recorded, true, and ready to be attacked."""

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedmjp.benchmarks.federation.round_records import describe_records
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.benchmarks.federation.training import deal
from fedmjp.benchmarks.uploads.recorded import Recording
from fedmjp.cli import main
from fedmjp.errors import BadInputError, ConfigError
from fedmjp.models.build import build_vit
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.updates import gradient
from tests.federations import MICRO, PLAIN, play, scenario_of

RECIPE = {**PLAIN, "batch_size": 1, "label_smoothing": 0, "drop_path": 0}
DEFENDED = {"defences": ["mjp:mask_ratio=0.4"]}


def recorded(root: Path, values: dict[str, Any], **changes: Any) -> list[RunFolder]:
    """Folders of the rounds that a run recorded, described."""
    scenario = scenario_of(**{"recipe": RECIPE, "records": (1, 3), **values, **changes})
    play(scenario, root)
    _, dealt = deal(scenario)
    return describe_records(scenario, TrainingFolder(root).records, tuple(map(len, dealt.shares)))


def pairs(folder: RunFolder, scenario: Scenario) -> list[tuple[PrivateBatch, Upload]]:
    return [folder.record(scenario, path) for paths in folder.index(scenario).values() for path in paths]


@pytest.mark.parametrize("values", [{}, DEFENDED], ids=["none", "mjp"])
def test_a_recorded_gradient_is_that_of_the_private_batch_at_the_weights_that_were_sent(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    folders = recorded(tmp_path, values, strategy="fedsgd", server_learning_rate=0.1)
    sent = []
    for folder in folders:
        (scenario,) = Recording.open(folder.root).scenarios
        found = pairs(folder, scenario)
        assert len(found) == 2
        for private, upload in found:
            model = build_vit(scenario.network)
            model.load_state_dict(folder.upload_folder(scenario.folder).weights(upload.weights))
            expected = gradient(model, private)
            assert upload.kind == "gradient"
            assert upload.tensors.keys() == expected.keys()
            for name, tensor in upload.tensors.items():
                assert torch.allclose(tensor, expected[name], atol=1e-6), name
            assert bool(private.mask.any()) == bool(values)
        sent.append(found[0][1].weights)
    assert sent[0] != sent[1], "the weights moved between rounds 1 and 3"


def test_a_recorded_round_is_attacked_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    localised = {**DEFENDED, "model": {**MICRO, "localisation": "linear", "index_embedding": True}}
    folder = recorded(tmp_path / "run", localised, strategy="fedsgd")[1]
    arguments = ["attack", "--attack", "patch_embedding", "--setting", "b", "--uploads", str(folder.root)]
    monkeypatch.setattr(sys, "argv", ["fedmjp", *arguments, "--device", "cpu", "--output", str(tmp_path / "attack")])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err + printed.out
    assert "0 of 4 trials are finished" in printed.out
    assert "deit_micro" in printed.out
    assert "failed" not in printed.out
    weights = pd.read_csv(tmp_path / "attack" / "scores.csv")["weights"]
    assert weights.str.fullmatch("[0-9a-f]{64}").all(), "trained ones"
    assert str(tmp_path) not in (folder.root / "manifest.json").read_text()


def test_weight_changes_are_recorded_and_refused_to_attacks(tmp_path: Path) -> None:
    folders = recorded(tmp_path, {})
    (upload, *_) = sorted(folders[0].uploads.glob("*/round-*"))
    tensors = Upload.load(upload).tensors
    assert Upload.load(upload).kind == "delta"
    assert max(float(tensor.abs().max()) for tensor in tensors.values()) > 0
    assert not folders[0].evaluator.exists(), "four steps on four batches are behind an upload"
    with pytest.raises(BadInputError, match=r"AdamW .* attacks invert gradients and plain SGD"):
        Recording.open(folders[0].root)


def test_a_round_of_one_step_leaves_its_batch_beside_the_weight_change(tmp_path: Path) -> None:
    (folder, _) = recorded(tmp_path / "plain", {"recipe": {**RECIPE, "batch_size": 4}})
    assert len(list(folder.evaluator.glob("*/round-*"))) == 2
    (folder, _) = recorded(tmp_path / "erased", {"recipe": {**RECIPE, "batch_size": 4, "random_erasing": 1}})
    assert len(list(folder.uploads.glob("*/round-*"))) == 2, "what no record describes keeps nobody from training"
    assert not folder.evaluator.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixup": 0.8, "cutmix": 1.0}, r"with mixup 0.8, cutmix 1: set recipe.mixup=0 recipe.cutmix=0$"),
        ({"repeats": 3, "random_erasing": 0.25}, "set recipe.random_erasing=0 recipe.repeats=1$"),
        ({"batch_size": 5}, "with batch_size 5: set recipe.batch_size=4$"),
    ],
)
def test_what_no_record_describes_is_refused_beforehand(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recorded(tmp_path, {"recipe": {**RECIPE, **changes}}, strategy="fedsgd")
    assert not (tmp_path / "records").exists()
