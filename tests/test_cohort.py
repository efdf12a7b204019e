"""Robust strategies behind our Aggregator, and what an update is held against, on hand-made replies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from scipy.stats import trim_mean

from fedmjp.cli.options import StrategyIfAny
from fedmjp.errors import ConfigError, FederationError
from fedmjp.learning import ROBUST, Strategy
from fedmjp.server import aggregation
from fedmjp.server.aggregation import Aggregator
from fedmjp.server.cohort import Client, bound_examples, measure_parts
from fedmjp.server.cohort import find_long_updates as compare_parts
from fedmjp.server.shelf import Shelf, StoredUpdate
from fedmjp.wire import ARRAYS, BUFFERS, EXAMPLES, METRICS
from tests.federations import scenario_of

CLIENTS = 10
HONEST = np.random.default_rng(0).normal(size=(CLIENTS, 40)).astype(np.float32) * 1e-3
WEIGHTS = {"w": torch.full((40,), 1e3), "count": torch.tensor(7)}  # much longer than updates


@pytest.fixture(autouse=True, scope="module")
def inside_a_run() -> None:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def reply(update: Any, count: int = 8, examples: int = 2, **tensors: torch.Tensor) -> Message:
    question = Message(content=RecordDict(), message_type=MessageType.TRAIN, dst_node_id=1)
    question.metadata.__dict__["_message_id"] = "question"
    arrays = ArrayRecord({"w": torch.as_tensor(update), **tensors})
    buffers = ArrayRecord({"count": torch.tensor(count)})
    metrics = MetricRecord({EXAMPLES: examples})
    return Message(RecordDict({ARRAYS: arrays, BUFFERS: buffers, METRICS: metrics}), reply_to=question)


SENT = {ARRAYS: ArrayRecord({"w": WEIGHTS["w"]}), BUFFERS: ArrayRecord({"count": WEIGHTS["count"]})}


SHELF = Shelf()


def kept(*replies: Message) -> list[StoredUpdate]:
    return [SHELF.keep(message) for message in replies]


def find_long_updates(replies: Mapping[Client, Message], max_norm: float) -> dict[Client, str]:
    return compare_parts({client: measure_parts(message, SENT) for client, message in replies.items()}, max_norm)


def step(strategy: str, updates: np.ndarray, hostile: float = 0.3) -> np.ndarray:
    """How a strategy moves weights of zero."""
    made = Aggregator(scenario_of(strategy=strategy, clients=len(updates), hostile=hostile), ["w"])
    stepped = made.aggregate(1, {**WEIGHTS, "w": torch.zeros(40)}, kept(*map(reply, updates)))
    assert stepped is not None
    assert stepped["count"] == 8
    return np.asarray(stepped["w"])


def scores(updates: np.ndarray, hostile: int) -> np.ndarray:
    """Blanchard et al., NeurIPS 2017: of each, the squared distances to its n - f - 2 nearest others."""
    distances = np.square(updates[:, None].astype(np.float64) - updates[None]).sum(-1)
    return np.sort(distances, axis=1)[:, 1 : len(updates) - hostile - 1].sum(1)


def expected(strategy: str, updates: np.ndarray, hostile: int) -> np.ndarray:
    best = np.argsort(scores(updates, min(hostile, (len(updates) - 3) // 2)))
    return {
        "median": lambda: np.median(updates, axis=0),
        "trimmed_mean": lambda: trim_mean(updates, (hostile + 0.5) / len(updates) if hostile else 0, axis=0),
        "krum": lambda: updates[best[0]],
        "multi_krum": lambda: updates[best[: len(updates) - hostile]].mean(0),
    }[strategy]()


@pytest.mark.parametrize("strategy", ROBUST)
@pytest.mark.parametrize(("clients", "hostile"), [(10, 3), (10, 0), (7, 3), (4, 2)])
def test_a_robust_strategy_is_its_papers_formula(strategy: str, clients: int, hostile: int) -> None:
    updates = HONEST[:clients].copy()
    if clients == CLIENTS and hostile:
        updates[:hostile] *= -9
    cut = min(hostile, (clients - 1) // 2) if strategy == "trimmed_mean" else hostile
    share = {(10, 3): 0.3, (10, 0): 0.0, (7, 3): 0.4, (4, 2): 0.4}[clients, hostile]
    found = step(strategy, updates, share)
    assert np.allclose(found, expected(strategy, updates, cut), atol=1e-9)


@pytest.mark.parametrize("strategy", ROBUST)
def test_weights_much_longer_than_updates_do_not_blur_them(strategy: str) -> None:
    made = Aggregator(scenario_of(strategy=strategy, clients=CLIENTS), ["w"])
    stepped = made.aggregate(1, WEIGHTS, kept(*map(reply, HONEST)))
    assert stepped is not None
    assert torch.allclose(stepped["w"] - 1e3, torch.as_tensor(step(strategy, HONEST)), atol=1e-4)


@pytest.mark.parametrize("strategy", ["median", "trimmed_mean"])
@pytest.mark.parametrize("values", [1, 7, 48])
def test_values_that_are_read_a_few_at_a_time_give_the_same_bits(
    strategy: str, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped() -> dict[str, torch.Tensor] | None:
        made = Aggregator(scenario_of(strategy=strategy, clients=CLIENTS, hostile=0.3), ["w", "b", "scale"])
        others = [{"b": torch.tensor(update[:6]).view(2, 3), "scale": torch.tensor(update[9])} for update in HONEST]
        updates = [reply(update, **more) for update, more in zip(HONEST, others, strict=True)]
        return made.aggregate(1, {**WEIGHTS, "b": torch.ones(2, 3), "scale": torch.tensor(1.0)}, kept(*updates))

    whole = stepped()
    monkeypatch.setattr(aggregation, "MOST_VALUES", values * CLIENTS)
    parts = stepped()
    assert whole is not None
    assert parts is not None
    assert {name: value.tolist() for name, value in parts.items()} == {n: value.tolist() for n, value in whole.items()}


def test_an_update_waits_on_the_disk_until_its_round_is_over(tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "0.safetensors").touch()  # of a killed run
    shelf = Shelf(tmp_path / "shelf")
    assert not (tmp_path / "shelf").exists()
    update = shelf.keep(reply(HONEST[0], examples=5))
    assert set(update.reply.content) == {METRICS}
    assert update.metrics[EXAMPLES] == 5
    assert np.array_equal(update.tensors()["w"], HONEST[0])
    assert update.tensors(BUFFERS) == {"count": 8}
    shelf.clear()
    assert not (tmp_path / "shelf").exists()
    (tmp_path / "shelf").write_text("a file")
    with pytest.raises(FederationError, match=r"an update cannot wait in .*shelf: "):
        shelf.keep(reply(HONEST[0]))


@pytest.mark.parametrize("strategy", ROBUST)
def test_hostile_running_statistics_are_outvoted(strategy: str) -> None:
    made = Aggregator(scenario_of(strategy=strategy, clients=3), ["w"])
    stepped = made.aggregate(1, WEIGHTS, kept(reply(HONEST[0]), reply(HONEST[1]), reply(HONEST[2], count=10**12)))
    assert stepped is not None
    assert stepped["count"] == 8


def test_every_strategy_has_one_list() -> None:
    assert set(aggregation.ROBUST) == set(ROBUST)
    offered = next(choice for choice in get_args(get_args(StrategyIfAny)[0]) if choice is not type(None))
    assert get_args(offered) == get_args(Strategy)


def test_robust_strategies_need_three_updates_and_bounds_leave_the_median() -> None:
    with pytest.raises(ConfigError, match="strategy median takes 3 updates in a round, and there are 2"):
        scenario_of(strategy="median", clients=2)
    with pytest.raises(ConfigError, match=r"max_norm=0\.5 would refuse the median update itself"):
        scenario_of(max_norm=0.5)


def test_who_is_too_long_is_named_with_the_reason() -> None:
    replies = {client: reply(HONEST[client]) for client in range(CLIENTS)}
    assert find_long_updates(replies, 10.0) == {}
    for client in (1, 4, 7):
        replies[client] = reply(HONEST[client] * 1e4)
    found = find_long_updates(replies, 10.0)
    assert sorted(found) == [1, 4, 7]
    assert found[4].startswith("its update is ")
    assert found[4].endswith("times as long as is usual in its round; max_norm=10 allows 10 times")
    assert find_long_updates(replies, 0.0) == {}, "0 is no bound"
    assert find_long_updates({client: replies[client] for client in (0, 1)}, 10.0) == {}, "of two, nobody is odd"


def test_one_tensor_and_one_buffer_can_be_too_long() -> None:
    small = {client: reply(HONEST[client], bias=torch.full((4,), 1e-5)) for client in range(4)}
    small[2] = reply(HONEST[2], bias=torch.full((4,), 0.02))
    assert find_long_updates(small, 10.0)[2].startswith("tensor 'bias' of its update is ")
    assert list(find_long_updates(small, 10.0)) == [2]
    counts = {client: reply(HONEST[client], count=10**9 if client == 1 else 8) for client in range(4)}
    reason = "the change of buffer 'count' is 1e+09 times as long as is usual in its round; max_norm=10 allows 10 times"
    assert find_long_updates(counts, 10.0) == {1: reason}
    still = int(WEIGHTS["count"])
    moved = {client: reply(HONEST[client], count=10**9 if client == 3 else still) for client in range(4)}
    assert list(find_long_updates(moved, 10.0)) == [3], "of the others no buffer moves at all"


def test_pruned_updates_that_are_zero_elsewhere_are_honest() -> None:
    pruned = {}
    for client in range(4):
        tensors = {f"t{other}": torch.zeros(40) for other in range(4)}
        pruned[client] = reply(np.zeros(40, np.float32), **{**tensors, f"t{client}": torch.ones(40)})
    assert find_long_updates(pruned, 10.0) == {}


def test_numbers_of_pictures_that_nobody_knows_are_bounded() -> None:
    replies = {client: MetricRecord({EXAMPLES: count}) for client, count in enumerate([10, 12, 30, 2**31])}
    assert bound_examples(replies) == {3: 2**31}
    assert [told[EXAMPLES] for told in replies.values()] == [10, 12, 30, 36]
    assert bound_examples({}) == {}
