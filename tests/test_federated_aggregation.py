"""Flower's strategies behind our Aggregator, on hand-made replies."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedmjp.server.aggregation import Aggregator
from fedmjp.server.shelf import Shelf, StoredUpdate
from fedmjp.wire import ARRAYS, BUFFERS, METRICS, REPORTED
from tests.federations import scenario_of

WEIGHTS = {"w": torch.tensor([1.0, -2.0]), "norm.mean": torch.tensor([0.5]), "norm.count": torch.tensor(10)}
MOVES = [0.3, -0.1, 0.7]  # of client i, which has i + 1 pictures
SHELF = Shelf()
MEAN = (1 * 0.3 - 2 * 0.1 + 3 * 0.7) / 6


@pytest.fixture(autouse=True, scope="module")
def inside_a_run() -> None:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def aggregator(strategy: str, **values: Any) -> Aggregator:
    return Aggregator(scenario_of(strategy=strategy, **values), ["w"])


def step(made: Aggregator, server_round: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A round in which every client moves its weights by its ``MOVES``."""
    messages = made.messages(server_round, made.records(weights), [10, 11, 12])
    stepped = made.aggregate(server_round, weights, replies(made, messages, weights))
    assert stepped is not None
    return stepped


def replies(
    made: Aggregator, messages: Sequence[Message], weights: dict[str, torch.Tensor], move: float | None = None
) -> list[StoredUpdate]:
    found = []
    for client, message in enumerate(messages):
        message.metadata.__dict__["_message_id"] = str(client)
        moved = {
            "w": torch.full_like(weights["w"], MOVES[client] if move is None else move),
            "norm.mean": weights["norm.mean"] + client,
            "norm.count": weights["norm.count"] + 4,
        }
        metrics: dict[str, Any] = {**dict.fromkeys(REPORTED, 1), "num-examples": client + 1}
        content = RecordDict({**made.records(moved), METRICS: MetricRecord(metrics)})
        found.append(SHELF.keep(Message(content=content, reply_to=message)))
    return found


def test_messages_carry_parameters_and_buffers_apart() -> None:
    made = aggregator("fedprox", proximal_mu=0.5)
    (message,) = made.messages(7, made.records(WEIGHTS), [10])
    assert list(message.content.array_records[ARRAYS]) == ["w"]
    assert set(message.content.array_records[BUFFERS]) == {"norm.mean", "norm.count"}
    assert dict(message.content.config_records["config"]) == {"server-round": 7, "proximal-mu": 0.5, "scenario": 0}


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedavgm", "fedadam", "fedsgd"])
def test_buffers_are_averaged_and_keep_their_type_whatever_the_strategy(strategy: str) -> None:
    after = step(aggregator(strategy), 1, WEIGHTS)
    assert after["norm.mean"].item() == pytest.approx(0.5 + (0 * 1 + 1 * 2 + 2 * 3) / 6)
    assert torch.equal(after["norm.count"], torch.tensor(14))
    assert {name: value.dtype for name, value in after.items()} == {n: value.dtype for n, value in WEIGHTS.items()}


def test_fedavg_weighs_by_pictures() -> None:
    assert torch.allclose(step(aggregator("fedavg"), 1, WEIGHTS)["w"], WEIGHTS["w"] + MEAN)


def test_fedavgm_is_torchs_sgd_with_momentum_on_the_mean_change() -> None:
    parameter = torch.nn.Parameter(WEIGHTS["w"].clone())
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    made, weights = aggregator("fedavgm", server_learning_rate=0.5, server_momentum=0.9), dict(WEIGHTS)
    for server_round in (1, 2, 3):
        parameter.grad = torch.full_like(parameter, -MEAN)
        optimizer.step()
        weights = step(made, server_round, weights)
        assert torch.allclose(weights["w"], parameter.detach(), atol=1e-6)


def test_fedadam_is_the_papers_formula() -> None:
    """Reddi et al., "Adaptive federated optimization", 2021, Algorithm 2, with Flower's correction of the bias."""
    made, weights = aggregator("fedadam", server_learning_rate=0.01), dict(WEIGHTS)
    first = second = 0.0
    for server_round in (1, 2):
        before = weights["w"]
        weights = step(made, server_round, weights)
        first, second = 0.9 * first + 0.1 * MEAN, 0.99 * second + 0.01 * MEAN**2
        rate = 0.01 * math.sqrt(1 - 0.99 ** (server_round + 1)) / (1 - 0.9 ** (server_round + 1))
        expected = before + rate * first / (math.sqrt(second) + 0.001)
        assert torch.allclose(weights["w"], expected, atol=1e-6)


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam", "fedsgd"])
def test_tensors_belong_to_their_names_in_whatever_order_they_come(strategy: str) -> None:
    weights = {"a": torch.zeros(2), "b": torch.ones(2)}
    sent = [{"a": torch.tensor([0.1, 0.2]) * client, "b": torch.tensor([3.0, 4.0]) + client} for client in (1, 2)]

    def after(order: Sequence[str]) -> dict[str, torch.Tensor]:
        made = Aggregator(scenario_of(strategy=strategy), ["a", "b"])
        found = []
        for client, message in enumerate(made.messages(1, made.records(weights), [10, 11])):
            message.metadata.__dict__["_message_id"] = str(client)
            arrays = ArrayRecord({name: sent[client][name] for name in order})
            content = RecordDict({ARRAYS: arrays, METRICS: MetricRecord(dict.fromkeys(REPORTED, 1))})
            found.append(SHELF.keep(Message(content=content, reply_to=message)))
        return made.aggregate(1, weights, found)

    expected, shuffled = after(["a", "b"]), after(["b", "a"])
    assert all(torch.equal(shuffled[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("strategy", "rate"), [("fedavgm", 1.0), ("fedadam", 0.01), ("fedsgd", 0.1)])
def test_each_strategy_has_a_learning_rate_of_its_own(strategy: str, rate: float) -> None:
    assert scenario_of(strategy=strategy).server_rate == rate
    assert scenario_of(strategy=strategy, server_learning_rate=0.3).server_rate == 0.3


@pytest.mark.parametrize("strategy", ["fedavgm", "fedadam"])
def test_a_strategy_goes_on_from_its_state(strategy: str) -> None:
    made = aggregator(strategy)
    after = step(made, 1, WEIGHTS)
    resumed = aggregator(strategy)
    resumed.load_state(copy.deepcopy(made.state()))
    forgetful = aggregator(strategy)
    expected = step(made, 2, after)["w"]
    assert torch.equal(step(resumed, 2, after)["w"], expected)
    assert not torch.equal(step(forgetful, 2, after)["w"], expected)


def test_nobody_left_leaves_the_weights_as_they_are() -> None:
    made = aggregator("fedadam")
    assert made.messages(1, made.records(WEIGHTS), []) == []
    after = made.aggregate(1, WEIGHTS, [])
    assert after is not None
    assert all(torch.equal(after[name], value) for name, value in WEIGHTS.items())


@pytest.mark.parametrize("strategy", ["fedavgm", "fedadam", "fedsgd"])
def test_finite_replies_that_overflow_together_are_forgotten(strategy: str) -> None:
    made, untouched = (aggregator(strategy, server_learning_rate=10.0) for _ in range(2))
    after = step(made, 1, WEIGHTS)
    step(untouched, 1, WEIGHTS)
    messages = made.messages(2, made.records(after), [10, 11, 12])
    assert made.aggregate(2, after, replies(made, messages, after, move=-3e38)) is None
    untouched.messages(2, untouched.records(after), [10, 11, 12])
    assert torch.equal(step(made, 3, after)["w"], step(untouched, 3, after)["w"])
