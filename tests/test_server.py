"""The server without Flower's engine: tap, strategy, adversary, on hand-made messages."""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.supercore.task_identity import TaskIdentity

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.adversary import Adversary
from fedmjp.benchmarks.federation.simulation import RunFolder
from fedmjp.clients.app import train
from fedmjp.data.selection import select_for
from fedmjp.errors import AttackNotApplicableError
from fedmjp.exchange import prepare_round
from fedmjp.facade import attack
from fedmjp.models.adopt import adopt
from fedmjp.models.build import build_vit
from fedmjp.private import PrivateBatch
from fedmjp.scenario import Scenario, make_run_config
from fedmjp.server.aggregation import Aggregator
from fedmjp.server.shelf import Shelf
from fedmjp.server.tap import UploadTap
from fedmjp.server.uploads import UploadFolder
from fedmjp.threat import ThreatModel
from fedmjp.updates import delta
from fedmjp.wire import REFUSED
from tests.attacks import QUICK, THREATS, applies
from tests.experiments import record_directly

WEIGHTS = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5])}


@pytest.fixture(autouse=True, scope="module")
def inside_a_run() -> None:
    """Flower makes messages only inside a run."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def training(node: int, **records: Any) -> Message:
    content = RecordDict({"arrays": ArrayRecord(WEIGHTS), "config": ConfigRecord({"server-round": 1}), **records})
    message = Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node)
    message.metadata.__dict__["_message_id"] = f"message-{node}"
    return message


def answer(message: Message, scale: float, examples: int = 1, **records: Any) -> Message:
    gradients = ArrayRecord({name: tensor * scale for name, tensor in WEIGHTS.items()})
    metrics = MetricRecord({"num-examples": examples})
    reply = Message(content=RecordDict({"arrays": gradients, "metrics": metrics, **records}), reply_to=message)
    reply.metadata.__dict__["_message_id"] = f"reply-{scale}"
    return reply


class Clients:
    """A Grid whose clients answer with the weights times their node number."""

    def __init__(self, silent: tuple[int, ...] = (), failing: tuple[int, ...] = (), nan: tuple[int, ...] = ()) -> None:
        self.silent, self.failing, self.nan = silent, failing, nan

    def get_node_ids(self) -> Iterable[int]:
        return [1, 2, 3]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"message-{node}"
            if node in self.failing:
                reason = 'Traceback (most recent call last):\n  File "x"\nValueError: no picture\n'
                replies.append(Message(Error(code=2, reason=reason), reply_to=message))
            elif node not in self.silent:
                replies.append(answer(message, float("nan") if node in self.nan else node))
        return replies


def test_the_tap_hands_everything_through_and_records_each_reply(tmp_path: Path) -> None:
    folder = UploadFolder(tmp_path)
    tap = UploadTap(Clients(), folder, "gradient")  # type: ignore[arg-type]
    for expected_round in (1, 2):
        replies = list(tap.send_and_receive([training(node) for node in (1, 2, 3)]))
        assert [r.content["arrays"].to_torch_state_dict()["w"].tolist() for r in replies] == [[1, 2], [2, 4], [3, 6]]
        recorded = [upload for upload in folder.uploads() if upload.server_round == expected_round]
        assert len(recorded) == 3
    assert {tuple(folder.weights(upload.weights)["w"].tolist()) for upload in folder.uploads()} == {(1.0, 2.0)}
    assert len(list(tmp_path.glob("weights-*"))) == 1
    assert tap.failures == []


def test_the_tap_keeps_only_the_tensors_asked_for(tmp_path: Path) -> None:
    folder = UploadFolder(tmp_path, frozenset({"b"}))
    UploadTap(Clients(), folder, "gradient").send_and_receive([training(1)])  # type: ignore[arg-type]
    assert list(folder.uploads()[0].tensors) == ["b"]


def test_the_tap_names_clients_that_fail_or_send_nonsense_and_waits_for_none(tmp_path: Path) -> None:
    folder = UploadFolder(tmp_path)
    tap = UploadTap(Clients(silent=(1,), failing=(2,), nan=(3,)), folder, "gradient")  # type: ignore[arg-type]
    tap.send_and_receive([training(node) for node in (1, 2, 3)])
    assert folder.uploads() == []
    assert [failure.split(": ", 1)[1] for failure in tap.failures] == [
        "ValueError: no picture",
        "upload tensor 'w' holds NaN or infinite values",
    ]


def test_the_tap_survives_messages_of_other_layouts(tmp_path: Path) -> None:
    tap = UploadTap(Clients(), UploadFolder(tmp_path), "gradient")  # type: ignore[arg-type]
    two = training(1, more=ArrayRecord(WEIGHTS))
    assert len(list(tap.send_and_receive([two]))) == 1
    assert "2 array records instead of one" in tap.failures[0]


@pytest.mark.parametrize("strategy", [FedAdam(fraction_evaluate=0.0), FedAvg(fraction_evaluate=0.0)])
def test_the_tap_works_under_any_strategy(tmp_path: Path, strategy: Any) -> None:
    folder = UploadFolder(tmp_path)
    tap = UploadTap(Clients(), folder, "gradient")  # type: ignore[arg-type]
    strategy.start(grid=tap, initial_arrays=ArrayRecord(WEIGHTS), num_rounds=2)
    assert sorted(upload.server_round for upload in folder.uploads()) == [1, 1, 1, 2, 2, 2]
    assert len(list(tmp_path.glob("weights-*"))) == 2, "the weights moved in between"


def test_the_tap_counts_on_from_rounds_before_and_names_nodes(tmp_path: Path) -> None:
    folder = UploadFolder(tmp_path)
    tap = UploadTap(Clients(), folder, "gradient", rounds=6, number={1: 0, 2: 1}.__getitem__)  # type: ignore[arg-type]
    tap.send_and_receive([training(node) for node in (1, 2)])
    assert [(upload.server_round, upload.node) for upload in folder.uploads()] == [(7, 0), (7, 1)]


def test_a_record_of_somebodys_own_app_says_what_was_sent(tmp_path: Path) -> None:
    class Trained(Clients):
        """Clients of an app as Flower's tutorials have it: they answer with the weights that they trained."""

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            return [answer(message, 1.01) for message in messages]

    class Stepped(Clients):
        """Clients that answer with something else of the same names."""

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            return [answer(message, -0.01) for message in messages]

    found = {}
    for clients, asked in ((Trained(), None), (Trained(), "delta"), (Stepped(), None), (Stepped(), "delta")):
        folder = UploadFolder(tmp_path / f"{type(clients).__name__}-{asked}")
        UploadTap(clients, folder, asked).send_and_receive([training(1)])  # type: ignore[arg-type]
        found[type(clients).__name__, asked] = folder.uploads()[0].kind
    assert found == {
        ("Trained", None): "weights",
        ("Trained", "delta"): "weights",
        ("Stepped", None): "unknown",
        ("Stepped", "delta"): "delta",
    }


@pytest.mark.parametrize(("kind", "reason"), [("weights", "subtract those"), ("unknown", "nobody knows")])
def test_what_is_no_update_is_not_attacked(kind: Any, reason: str) -> None:
    module = timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=32, depth=1)
    model = adopt(module)
    upload = model.upload(dict(module.named_parameters()))
    with pytest.raises(AttackNotApplicableError, match=reason):
        attack("patch_embedding", replace(upload, kind=kind), model)


def stepped(update: str, rate: float | None) -> dict[str, torch.Tensor]:
    """Weights after a round of two clients with one and three pictures, whose updates are 1 and 4 times the weights."""
    scenario = Scenario.parse({"clients": 2, "update": update, "server_learning_rate": rate})
    aggregator = Aggregator(scenario, WEIGHTS)
    shelf = Shelf()
    replies = [answer(training(1), 1.0, examples=1), answer(training(2), 4.0, examples=3)]
    found = aggregator.aggregate(1, WEIGHTS, [shelf.keep(reply) for reply in replies])
    assert found is not None
    return found


@pytest.mark.parametrize(("update", "sign"), [("gradient", -1), ("delta", 1)])
def test_the_server_steps_along_the_mean_update_by_pictures(update: str, sign: int) -> None:
    mean = (1 * 1.0 + 3 * 4.0) / 4
    for name, weight in stepped(update, 0.1).items():
        assert torch.allclose(weight, WEIGHTS[name] + sign * 0.1 * mean * WEIGHTS[name])


@pytest.mark.parametrize("rate", [None, 0.0])
def test_without_a_learning_rate_the_weights_of_single_batches_stay(rate: float | None) -> None:
    assert all(torch.equal(weight, WEIGHTS[name]) for name, weight in stepped("gradient", rate).items())


SMALL = {"name": "deit_tiny", "image_size": 64, "patch_size": 8}
SCENARIO = Scenario.parse({"model": SMALL, "defences": ["mjp"], "clients": 2})


def client_message(partitions: int = 2, scenario: Scenario = SCENARIO) -> tuple[Message, Any]:
    model = build_vit(scenario.network)
    asked = ConfigRecord({"server-round": 1, "scenario": 0})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "config": asked})
    message = Message(content=content, message_type=MessageType.TRAIN, dst_node_id=1)
    message.metadata.__dict__["_message_id"] = "message"
    context = SimpleNamespace(
        run_config=make_run_config([scenario]).flat(),
        node_config={"partition-id": 0, "num-partitions": partitions, "reads": "/"},
        node_id=1,
    )
    return message, context


def test_a_clients_reply_holds_gradients_and_a_count_and_nothing_else() -> None:
    message, context = client_message()
    content = train(message, context).content
    assert set(content) == {"arrays", "metrics"}
    assert dict(content["metrics"]) == {"num-examples": 1}
    gradients = content["arrays"].to_torch_state_dict()
    shapes = {name: parameter.shape for name, parameter in build_vit(SCENARIO.network).named_parameters()}
    assert {name: tensor.shape for name, tensor in gradients.items()} == shapes


def test_a_client_sends_the_weight_delta_of_a_batch_where_it_is_asked_to() -> None:
    asked = {"pictures_per_client": 2, "batch_size": 2, "update": "delta", "local_steps": 2, "local_learning_rate": 0.1}
    scenario = SCENARIO.model_copy(update=asked)
    message, context = client_message(scenario=scenario)
    content = train(message, context).content
    assert dict(content["metrics"]) == {"num-examples": 2}
    batch = prepare_round(scenario, select_for(scenario), client=0, server_round=1)
    expected = delta(build_vit(SCENARIO.network), batch, steps=2, learning_rate=0.1)
    sent = content["arrays"].to_torch_state_dict()
    assert all(torch.allclose(sent[name], tensor, atol=1e-7) for name, tensor in expected.items())


def test_a_client_refuses_a_federation_of_another_size() -> None:
    message, context = client_message(partitions=3)
    reply = train(message, context)
    assert reply.error.code == REFUSED
    assert reply.error.reason == ("ConfigError: clients = 2, but the federation has 3; set both to the same number")


WATCH: list[str] = []
SEEN: list[str] = []


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if WATCH and event != "import" and any(str(argument).startswith(WATCH[0]) for argument in arguments):
        SEEN.append(event)


@pytest.mark.slow
def test_the_adversary_never_touches_the_evaluators_folder(tmp_path: Path) -> None:
    scenarios = [
        Scenario.parse({"model": {"name": name, "image_size": 32, "patch_size": 8}, "defences": defences, "clients": 2})
        for name in ("deit_micro", "deit_tiny_april")
        for defences in ("none", "mjp")
    ]
    folder = RunFolder(tmp_path)
    record_directly(scenarios, folder)
    sys.addaudithook(_watch)  # cannot be removed; it is idle while WATCH is empty
    WATCH.append(os.fspath(folder.evaluator))
    tried: set[str] = set()
    try:
        for scenario in scenarios:
            kept = folder.upload_folder(scenario.folder)
            uploads = kept.uploads()
            model = build_vit(scenario.network)
            model.load_state_dict(kept.weights(uploads[0].weights))
            for attack in [name for name in ATTACKS if name not in tried and applies(name, model)]:
                adversary = Adversary(model, ThreatModel(), seed=0)
                made = adversary.reconstruct(attack, uploads[:1], QUICK.get(attack, {}), on_progress=lambda *_: None)
                assert len(made) == 1
                tried.add(attack)
        assert SEEN == []
        PrivateBatch.load(next(folder.evaluator.rglob("round-*")))
        assert "open" in SEEN, "the watch sees what it should see"
    finally:
        WATCH.clear()
    bounds = {name for name in ATTACKS if ATTACKS.get(name).role == "bound"}
    assert tried == set(ATTACKS) - bounds - set(THREATS), "every attack that an honest server could run"
