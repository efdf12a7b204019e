"""Federations under defences: what leaves, what is refused, what it costs; without Flower's engine."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import select_for
from fedmjp.defences import DEFENCES
from fedmjp.defences.base import Client, Defence
from fedmjp.errors import DefenceError
from fedmjp.models.build import build_vit, parameter_count
from fedmjp.randomness import Randomness
from fedmjp.scenario import Scenario
from fedmjp.server.loop import Federation
from fedmjp.server.refusals import Refusal, RefusalFile
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.wire import ARRAYS, METRICS
from tests.federations import MICRO, InProcess, pictures, play, scenario_of

PATCHES = ("backbone.patch_embed.proj.weight", "backbone.patch_embed.proj.bias")
SINGLE = {"model": MICRO | {"classes": 1000}, "clients": 2, "pictures_per_client": 2}


class Fussy(Defence):
    """Refuses every second upload."""

    name = "fussy"
    paper = "none"
    summary = "a test of refusals"
    told = "nothing"
    stages = ("update",)
    calls: ClassVar[list[int]] = []

    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        self.calls.append(client.examples)
        if len(self.calls) % 2:
            raise DefenceError("fussy: this update must not leave")
        return dict(update)


@pytest.fixture
def fussy(monkeypatch: pytest.MonkeyPatch) -> None:
    for targets in (DEFENCES._own, DEFENCES._targets):
        monkeypatch.setitem(targets, "fussy", f"{__name__}:Fussy")
    monkeypatch.setattr(Fussy, "calls", [])


def history(root: Path) -> pd.DataFrame:
    return pd.read_csv(TrainingFolder(root).history)


def recorded(scenario: Scenario, root: Path) -> tuple[RunFolder, list[Refusal]]:
    """Single batches, recorded by the real loop; what was refused."""
    grid, folder = InProcess(scenario, TrainingFolder(root)), RunFolder(root)
    places = {"uploads_folder": str(folder.uploads), "evaluator_folder": str(folder.evaluator)}
    grid.run = grid.run.model_copy(update=places)
    return folder, Federation(grid, scenario, grid.run).play()  # type: ignore[arg-type]


@pytest.mark.usefixtures("fussy")
def test_an_update_that_a_defence_refuses_does_not_leave_and_the_rounds_go_on(tmp_path: Path) -> None:
    play(scenario_of(defences=["fussy"]), tmp_path)
    rows = history(tmp_path)
    assert rows["clients"].tolist() == rows["refused"].tolist() == [1, 1, 1]
    refused = RefusalFile.of_run(tmp_path).read()
    assert {each.reason for each in refused} == {"DefenceError: fussy: this update must not leave"}


@pytest.mark.usefixtures("fussy")
def test_so_it_is_where_single_batches_are_recorded(tmp_path: Path) -> None:
    scenario = Scenario.parse({**SINGLE, "defences": ["fussy"]})
    folder, refused = recorded(scenario, tmp_path)
    uploads = folder.uploads / scenario.folder
    assert refused == RefusalFile.of_run(uploads).read()
    assert [(each.round, each.client) for each in refused] == [(1, 0), (2, 0)]
    assert sorted(path.name for path in uploads.glob("round-*")) == [
        "round-00001-node-1.safetensors",
        "round-00002-node-1.safetensors",
    ]


def test_the_epsilon_at_the_end_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    play(scenario_of(defences=["local_dp:epsilon=5"]), tmp_path)
    epsilons = history(tmp_path)["epsilon"].tolist()
    assert epsilons == sorted(epsilons)
    assert 0 < epsilons[0] < 4
    assert 4.9 < epsilons[-1] <= 5.001


def test_steps_of_single_pictures_are_counted_too(tmp_path: Path) -> None:
    play(scenario_of(defences=["dp_sgd:epsilon=5"], rounds=2, local_epochs=2), tmp_path)
    assert 4.9 < history(tmp_path)["epsilon"].tolist()[-1] <= 5.001


def test_a_client_that_takes_more_steps_than_its_guarantee_is_for_sends_nothing(tmp_path: Path) -> None:
    stated = "dp_sgd:epsilon=5,steps=6,steps_per_upload=1,batch_size=2"
    play(scenario_of(defences=[stated]), tmp_path)
    refused = RefusalFile.of_run(tmp_path).read()
    assert len(refused) == 3 * 2
    assert all("takes 2 steps for an upload, steps_per_upload says 1" in each.reason for each in refused)


def test_without_a_guarantee_there_is_no_epsilon(tmp_path: Path) -> None:
    play(scenario_of(defences=["gaussian"], rounds=1), tmp_path)
    assert history(tmp_path)["epsilon"].isna().all()


@pytest.mark.parametrize(("defences", "share"), [([], 1.0), (["round:precision=bfloat16"], 0.5), (["sign"], 1 / 32)])
def test_history_says_what_an_upload_takes(tmp_path: Path, defences: list[str], share: float) -> None:
    scenario = scenario_of(defences=defences, rounds=1)
    play(scenario, tmp_path)
    (row,) = history(tmp_path).to_dict("records")
    assert row["upload_bytes"] == pytest.approx(share * 4 * parameter_count(scenario.network), rel=1e-3)
    assert 0 <= row["upload_seconds"] < 60


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam", "fedsgd"])
def test_what_is_withheld_stays_as_it_was_and_never_leaves(tmp_path: Path, strategy: str) -> None:
    scenario = scenario_of(defences=["withhold:roles=patch_embedding"], clients=3, strategy=strategy)
    weights, grid = play(scenario, tmp_path)
    assert RefusalFile.of_run(tmp_path).read() == []
    before = build_vit(scenario.network).state_dict()
    moved = {name for name, value in weights.items() if not torch.equal(value, before[name])}
    assert moved == set(before) - set(PATCHES)
    for reply in grid.replies.values():
        assert set(reply.content.array_records[ARRAYS]) == set(before) - set(PATCHES)
    uploaded = history(tmp_path)["upload_bytes"].iloc[0]
    assert uploaded == 4 * parameter_count(scenario.network) - 4 * sum(before[name].numel() for name in PATCHES)


def test_other_tensors_must_not_be_missing_and_withheld_ones_must_be(tmp_path: Path) -> None:
    def change(server_round: int, client: int, reply: Message) -> Message:
        arrays = dict(reply.content.array_records[ARRAYS].to_torch_state_dict())
        if client == 0:
            del arrays["backbone.head.bias"]
        elif server_round == 2:
            arrays[PATCHES[1]] = torch.zeros(192)
        reply.content[ARRAYS] = ArrayRecord(arrays)
        return reply

    play(scenario_of(defences=["withhold:roles=patch_embedding"], rounds=2), tmp_path, answer=change)
    refused = [(each.round, each.client, each.reason) for each in RefusalFile.of_run(tmp_path).read()]
    assert refused == [
        (1, 0, "sent no tensor 'backbone.head.bias'"),
        (2, 0, "sent no tensor 'backbone.head.bias'"),
        (2, 1, f"sent a tensor that nobody asked for: {PATCHES[1]!r}"),
    ]


def test_of_summed_updates_the_server_sees_the_mean_alone(tmp_path: Path) -> None:
    summed = scenario_of(defences=["secure_sum:clients=2"], strategy="fedsgd", clients=4, records=(1,), rounds=1)
    weights, grid = play(summed, tmp_path / "summed")
    plain, _ = play(scenario_of(strategy="fedsgd", clients=4, rounds=1), tmp_path / "plain")
    assert all(torch.allclose(value, plain[name], atol=1e-6) for name, value in weights.items())
    folder = TrainingFolder(tmp_path / "summed")
    (uploads,) = (folder.records / "round-00001" / "uploads").iterdir()
    kept = RunFolder(uploads.parents[1]).upload_folder(uploads.name).uploads()
    assert [(upload.node, upload.num_examples) for upload in kept] == [(0, 4), (2, 4)]
    for upload in kept:
        sent = [grid.replies[1, upload.node + each].content.array_records[ARRAYS] for each in (0, 1)]
        first, second = (each.to_torch_state_dict() for each in sent)
        assert all(torch.equal(value, (first[name] + second[name]) / 2) for name, value in upload.tensors.items())
    assert history(tmp_path / "summed")["clients"].tolist() == [4]


def test_unequal_shares_count_by_their_pictures(tmp_path: Path) -> None:
    summed = scenario_of(defences=["secure_sum:clients=3"], clients=3, rounds=1)
    weights, grid = play(summed, tmp_path / "summed")
    plain, _ = play(scenario_of(clients=3, rounds=1), tmp_path / "plain")
    counts = [grid.replies[1, client].content.metric_records[METRICS]["num-examples"] for client in range(3)]
    assert len(set(counts)) > 1
    assert all(torch.allclose(value, plain[name], atol=1e-6) for name, value in weights.items())


def test_if_one_of_a_group_fails_the_group_is_refused(tmp_path: Path) -> None:
    def spoil(_round: int, client: int, reply: Message) -> Message | None:
        if client == 1:
            arrays = reply.content.array_records[ARRAYS].to_torch_state_dict()
            reply.content[ARRAYS] = ArrayRecord({name: value * float("nan") for name, value in arrays.items()})
        return None if client == 2 else reply

    play(scenario_of(defences=["secure_sum:clients=2"], clients=4, rounds=1), tmp_path, answer=spoil)
    refused = [(each.client, each.reason) for each in RefusalFile.of_run(tmp_path).read()]
    assert refused[0][0] == 0
    assert refused[0][1].startswith("client 1 of its group: tensor ")
    assert refused[1] == (2, "client 2 of its group: did not answer")


def test_recorded_sums_are_found_by_the_pictures_of_all(tmp_path: Path) -> None:
    scenario = Scenario.parse({**SINGLE, "defences": ["mjp", "secure_sum:clients=2"], "clients": 4})
    folder, refused = recorded(scenario, tmp_path)
    assert refused == []
    found = folder.index(scenario)
    assert len(found) == scenario.uploads == 4
    for names, (path,) in found.items():
        private, upload = folder.record(scenario, path)
        assert private.pictures == names
        assert len(names) == upload.num_examples == 2
        exchange = scenario.exchange(_pictures(scenario, names))
        assert all(torch.equal(value, exchange.upload.tensors[name]) for name, value in upload.tensors.items())


def _pictures(scenario: Scenario, names: tuple[str, ...]) -> list[LabelledPicture]:
    selection = select_for(scenario)
    known = {entry.name: entry for entry in selection.entries}
    return [selection.load(known[name]) for name in names]


def test_running_statistics_do_not_leave_beside_a_protected_update(tmp_path: Path) -> None:
    model = {"name": "resnet50", "image_size": 32, "patch_size": 16, "classes": 4}
    play(scenario_of(model=model, defences=["clip"], rounds=1), tmp_path)
    refused = RefusalFile.of_run(tmp_path).read()
    assert [each.client for each in refused] == [0, 1]
    assert all("uploads running statistics, which clip does not protect" in each.reason for each in refused)


@pytest.mark.parametrize("defence", ["local_dp", "dp_sgd", "mjp:mask_ratio=0.5"])
def test_who_has_pictures_of_its_own_draws_noise_and_puzzles_that_no_seed_tells(tmp_path: Path, defence: str) -> None:
    shutil.copytree(pictures(), tmp_path / "own")
    sent: list[dict[int, dict[str, Tensor]]] = []
    for name in ("first", "second"):
        scenario = scenario_of(defences=[defence], rounds=1, strategy="fedsgd")
        _, grid = play(scenario, tmp_path / name, own={1: str(tmp_path / "own")})
        arrays = {client: grid.replies[1, client].content.array_records[ARRAYS] for client in range(2)}
        sent.append({client: dict(found.to_torch_state_dict()) for client, found in arrays.items()})
    bias = "backbone.head.bias"
    assert torch.equal(sent[0][0][bias], sent[1][0][bias]), "a simulation is repeatable"
    assert not torch.equal(sent[0][1][bias], sent[1][1][bias])


@pytest.mark.parametrize(
    ("defence", "said"),
    [
        ("local_dp:epsilon=2.0", "--defence local_dp:epsilon=2.0,rounds=3"),
        ("dp_sgd:batch_size=2", "--defence dp_sgd:batch_size=2,steps=6,steps_per_upload=2"),
    ],
)
def test_a_guarantee_whose_length_nobody_planned_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, defence: str, said: str
) -> None:
    """As where a run-config is written by hand."""
    monkeypatch.setattr("tests.federations.plan_for", lambda scenario, _dealt: scenario)
    play(scenario_of(defences=[defence]), tmp_path / "run")
    refused = RefusalFile.of_run(tmp_path / "run").read()
    assert len(refused) == 3 * 2
    assert all(each.reason.endswith(f"so that its length must be said: {said}") for each in refused)
