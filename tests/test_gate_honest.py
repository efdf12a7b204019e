"""Honest apps of many kinds pass the upload gate's default policy; uploads of one record do not, whatever is beside."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

from fedmjp.clients.gate.reading import ReplyReading, read_reply
from fedmjp.clients.gate.reasons import Reason
from fedmjp.clients.gate.watching import TrainingWatch
from fedmjp.clients.kinds import read_as_weights
from fedmjp.clients.replies import SentArrays
from fedmjp.seeds import scoped_randomness, torch_generator
from tests.studies import load_study
from tests.test_gate import gate_of, last, message_of, reason_of, replying

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
STUDY = load_study("honest_apps/study.py")
DRAW = torch_generator(0, "test_gate_honest")


@pytest.fixture(autouse=True, scope="module")
def on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks are small
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:The max_iter was reached")
@pytest.mark.parametrize("name", STUDY.APPS)
def test_an_honest_app_passes_round_after_round_and_no_model_of_it_is_suspicious(name: str) -> None:
    rounds = 3 if STUDY.APPS[name].steps < 50 else 2
    alarming = name in ("quickstart CNN, SGD, 125 steps", "3-D CNN")  # units die at these rates of learning
    rows = STUDY.play(name, {} if alarming else {"model_checks": "refuse"}, rounds)
    assert {row["verdict"] for row in rows} == {"passed"}, rows
    assert alarming or {row["checks"] for row in rows} == {""}, rows
    assert len(rows) == rounds * STUDY.CLIENTS
    unjudged = {row["not_judged"] > 0 for row in rows}
    assert unjudged == {name in ("CNN, SCAFFOLD", "trees as bytes")}


@pytest.mark.parametrize("decoys", STUDY.DECOYS)
@pytest.mark.parametrize("network", STUDY.NETWORKS)
def test_one_record_is_not_hidden_by_what_no_step_uses(network: str, decoys: str) -> None:
    for steps in (1, 3):
        (row,) = STUDY.hide_one(network, decoys, steps, 1)
        assert (row["verdict"], row["records"]) == ("refused", 1), row
        assert row["reasons"].split("; ")[0] in {Reason.FEW, Reason.PICTURES}


def layers() -> nn.Module:
    with scoped_randomness(3):
        return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows), torch.arange(len(rows)) % 4)


def without_optimiser(model: nn.Module, rows: Tensor) -> None:
    for part in rows.split(4):
        gradients = torch.autograd.grad(loss_of(model, part), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient


def accumulated(model: nn.Module, rows: Tensor) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for part in rows.split(2):
        loss_of(model, part).backward()
    optimiser.step()


def in_a_closure(model: nn.Module, rows: Tensor) -> None:
    optimiser = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        return loss

    optimiser.step(closure)


def validated_as_well(model: nn.Module, rows: Tensor) -> None:
    accumulated(model, rows)
    model.eval()
    model(torch.randn(50, 12, generator=DRAW))


@pytest.mark.parametrize("train", [without_optimiser, accumulated, in_a_closure, validated_as_well])
def test_rows_count_however_a_step_is_taken(train: Any) -> None:
    rows = torch.randn(16, 12, generator=DRAW)
    with TrainingWatch().watching() as seen:
        train(layers(), rows)
    assert seen.pictures == 16


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_gradient_that_was_cleared_is_none_of_the_rows_that_are_sent(order: str) -> None:
    model, alone, decoys = layers(), torch.randn(1, 12, generator=DRAW), torch.randn(40, 12, generator=DRAW)
    with TrainingWatch().watching() as seen:
        for rows in (alone, decoys) if order == "first" else (decoys, alone):
            model.zero_grad()
            loss_of(model, rows).backward()
    assert seen.pictures == 1, "the app may have copied either gradient"


def test_rows_of_sequences_that_come_first_are_those_of_the_batch() -> None:
    model = nn.LSTM(3, 5)
    series = torch.randn(20, 1, 3, generator=DRAW)  # (time, batch, features)
    with TrainingWatch().watching() as seen:
        model(series)[0].sum().backward()
    assert seen.pictures == 1


def weights_and_change(size: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    sent = {"w": torch.randn(40, 30, generator=DRAW), "n": torch.tensor(7)}
    change = {"w": size * torch.randn(40, 30, generator=DRAW), "n": torch.tensor(2)}
    return sent, change


@pytest.mark.parametrize("size", [0.01, 0.3, 1.0, 1.5])
def test_weights_are_told_from_their_change_at_any_size(size: float) -> None:
    sent, change = weights_and_change(size)
    assert read_as_weights({name: sent[name] + change[name] for name in sent}, sent)[0]
    assert read_as_weights(change, sent) == (False,), "a counter fell"
    assert read_as_weights({"w": change["w"]}, {"w": sent["w"]}) == (False, True), "nobody can be sure"


def test_a_tensor_that_came_back_bit_by_bit_says_that_the_reply_is_weights() -> None:
    sent, change = weights_and_change(1.0)
    frozen = torch.ones(8)
    reply = {"w": sent["w"] + change["w"], "frozen": frozen.clone()}
    assert read_as_weights(reply, {"w": sent["w"], "frozen": frozen}) == (True,)


def reading_of(sent: dict[str, Tensor], **records: dict[str, Tensor]) -> ReplyReading:
    message = message_of(RecordDict({"arrays": ArrayRecord(sent)}))
    content = RecordDict({name: ArrayRecord(tensors) for name, tensors in records.items()})
    return read_reply(Message(content, reply_to=message), SentArrays(message), None, "test")


def test_what_did_not_come_in_is_counted_and_what_did_is_always_judged() -> None:
    sent = {"w": torch.ones(4, 3), "b": torch.ones(4)}
    part = reading_of(sent, arrays={"b": torch.full((4,), 1.1)})
    assert [sorted(update.tensors) for readings in part.updates for update in readings] == [["b"]]
    assert part.unjudged_bytes == 0
    more = reading_of(sent, arrays={"w": sent["w"] * 1.1, "b": sent["b"]}, control={"w": sent["w"] * 0, "b": sent["b"]})
    assert [sorted(readings[0].tensors) for readings in more.updates] == [["b", "w"]]
    assert more.unjudged_bytes == 4 * (12 + 4)


def test_two_classes_alone_give_a_last_layer_rank_one_and_that_is_no_single_picture(tmp_path: Path) -> None:
    app = STUDY.App(STUDY.of_tables, "tables", steps=1, options={"lr": 0.05})
    with scoped_randomness(1):
        gate = gate_of(tmp_path)
        batches = STUDY.batches_of(app, 0, 1)
    reply = STUDY.exchange(gate, app.begin(), 0, 1, lambda content: (app.answer(content, batches), 32))
    assert not reply.has_error()
    (outcome,) = [outcome for outcome in last(gate).outcomes if outcome.attack.startswith("rank one")]
    assert outcome.came_back == 0


def with_control(message: Message) -> RecordDict:
    arrays = message.content["arrays"]
    return RecordDict({"arrays": arrays, "control": arrays, "metrics": MetricRecord({"num-examples": 8})})


def with_another_control(message: Message) -> RecordDict:
    content = with_control(message)
    content["another"] = content["control"]
    return content


def test_records_that_did_not_come_in_keep_the_form_of_the_first_round_and_a_policy_may_refuse_them(
    tmp_path: Path,
) -> None:
    gate = gate_of(tmp_path)
    assert not replying(gate, with_control).has_error()
    entry = last(gate)
    size = sum(array.numpy().nbytes for array in replying(gate, with_control).content["control"].values())
    assert entry.not_judged == size
    assert reason_of(replying(gate, with_another_control)).endswith("than in the first round of the run")
    assert reason_of(replying(gate_of(tmp_path, unjudged="refuse"), with_control)).endswith("lists further ones")
