"""Rounds of a training run attacked together: each client's uploads of several epochs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedmjp.attacks.mjp.localisation import without_localisation
from fedmjp.benchmarks.federation.round_records import describe_records
from fedmjp.benchmarks.federation.training import deal
from fedmjp.benchmarks.plan.experiment import Experiment
from fedmjp.benchmarks.uploads.rounds import RecordedRounds, attacked, open_records
from fedmjp.cli import main
from fedmjp.errors import BadInputError
from fedmjp.exchange import Exchange
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.threat import ThreatModel
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.updates import gradient
from tests.boards import attack_board
from tests.federations import MICRO, PLAIN, play, scenario_of
from tests.several_uploads import witness

__all__ = ["witness"]
RECIPE = {**PLAIN, "batch_size": 1, "label_smoothing": 0, "drop_path": 0, "crop_scale": 1, "flip": 0}
MJP = ["mjp:mask_ratio=0.4"]
PUZZLE = {"localisation_weight": 0.5}
EPOCHS, STEPS = 2, 4  # of four pictures per client


def trained(root: Path, localisation: str = "linear", **changes: Any) -> Path:
    """The records of every round of a small FedSGD run."""
    rounds = EPOCHS * STEPS
    scenario = scenario_of(
        model={**MICRO, "localisation": localisation},
        defences=MJP,
        recipe={**RECIPE, **changes.pop("recipe", {})},
        puzzle={**PUZZLE, **changes},
        strategy="fedsgd",
        server_learning_rate=0.1,
        rounds=rounds,
        records=tuple(range(1, rounds + 1)),
    )
    play(scenario, root)
    records = TrainingFolder(root).records
    _, dealt = deal(scenario)
    describe_records(scenario, records, tuple(map(len, dealt.shares)))
    return records


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"))


def opened_alone(folder: Path) -> RecordedRounds:
    rounds = open_records(folder)
    assert isinstance(rounds, RecordedRounds)
    return rounds


def opened(folder: Path) -> tuple[RecordedRounds, Experiment]:
    rounds = opened_alone(folder)
    (scenario,) = rounds.attacked(None, device="cpu")
    values = {"scenario": scenario, "attacks": ("witness",), "settings": ("b", "c"), "metrics": ("psnr",)}
    return rounds, Experiment.parse(values)


def test_the_last_upload_of_each_picture_comes_with_all_others_of_its_client(witness: str, records: Path) -> None:
    rounds, experiment = opened(records)
    assert experiment.scenario.threat.uploads_per_picture == EPOCHS
    batches = [tuple(entry.name for entry in batch) for batch in rounds.batches(experiment.scenario)]
    assert len(batches) == len(set(batches)) == 8
    found = rounds.source(experiment).uploads(batches)
    for batch, each in found.items():
        assert isinstance(each, Exchange)
        assert each.private.pictures == batch
        own, others = each.upload, each.upload.others
        assert own.server_round > STEPS, "of the last epoch"
        expected = [r for r in range(1, EPOCHS * STEPS + 1) if r != own.server_round]
        assert [other.server_round for other in others] == expected
        assert {other.node for other in others} == {own.node}
        assert len({own.weights, *(other.weights for other in others)}) == EPOCHS * STEPS, "the weights moved"
        assert all(other.tensors.keys() == {names.POSITION_EMBEDDING} for other in others)


@pytest.mark.parametrize("kind", ["linear", "nonlinear"])
def test_without_localisation_is_the_gradient_of_the_classification_loss(tmp_path: Path, kind: str) -> None:
    """Against the plain gradient of the private batch at the weights that were sent."""
    warm = {"warmup_epochs": 1} if kind == "nonlinear" else {}
    cosine = {"localisation_schedule": "cosine", "recipe": warm} if warm else {}
    rounds = opened_alone(trained(tmp_path, kind, **cosine))
    scenario = rounds.rounds[-1].scenarios[0]
    weights = set()
    for record in rounds.records(scenario):
        expected = gradient(record.model(), PrivateBatch.load(record.path))
        sent = Upload.load(record.recording.folder.uploads / scenario.folder / record.path.name)
        used = record.upload()
        for name, tensor in expected.items():
            assert torch.allclose(used.tensors[name], tensor, atol=1e-6), name
        weight = record.recording.localisation_weights[str(record.node)]
        weights.add(weight)
        differs = (sent.tensors[names.POSITION_EMBEDDING] - expected[names.POSITION_EMBEDDING]).abs().max()
        assert float(differs) > 4e-6 or not weight, "the loss was in the upload"
    assert weights == ({0.0, 0.5} if warm else {0.5})


def test_what_the_server_cannot_compute_stays_in_uploads(tmp_path: Path) -> None:
    for number, changes in enumerate(({"localisation": "pca"}, {"recipe": {"batch_size": 2}})):
        rounds = opened_alone(trained(tmp_path / str(number), **changes))
        assert rounds.rounds[0].localisation_weights == {}
        scenario = rounds.rounds[0].scenarios[0]
        (first, *_) = rounds.records(scenario)
        sent = Upload.load(first.recording.folder.uploads / scenario.folder / first.path.name)
        assert torch.equal(first.upload().tensors[names.POSITION_EMBEDDING], sent.tensors[names.POSITION_EMBEDDING])


def test_localisation_is_taken_out_where_nothing_is_masked(records: Path) -> None:
    rounds = opened_alone(records)
    model = build_vit(rounds.rounds[0].scenarios[0].model)
    found = torch.autograd.grad(model.localisation_loss(), list(model.parameters()), materialize_grads=True)
    loss = dict(zip((name for name, _ in model.named_parameters()), found, strict=True))
    upload = Upload({name: 2 * value + 1 for name, value in loss.items()}, "gradient", 1, 1, 0, "weights")
    for name, tensor in without_localisation(upload, model, 2.0, ThreatModel()).tensors.items():
        assert torch.allclose(tensor, torch.ones_like(tensor), atol=1e-6), name


def test_an_attack_on_rounds_has_a_row_per_picture(
    witness: str, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--attack", "witness", "--setting", "c", "--uploads", str(records), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["fedmjp", "attack", *arguments, "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    board = attack_board(tmp_path).set_index("attack")
    assert board.loc["witness", "n"] == board.loc["witness", "trials"] == 8
    assert board.loc["witness", "threat_uploads_per_picture"] == EPOCHS
    assert len(board.loc["witness", "provenance_weights_sha256"].split()) == STEPS


def test_a_picture_is_attacked_in_its_last_upload_only(records: Path) -> None:
    rounds = opened_alone(records)
    every = rounds.records(rounds.rounds[0].scenarios[0])
    assert len(every) == 2 * EPOCHS * STEPS
    assert sorted(name for each in attacked(every) for name in each.pictures) == sorted(
        {name for each in every for name in each.pictures}
    )


def test_a_folder_without_rounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="holds no records of `fedmjp record`"):
        open_records(tmp_path)
