"""Federated training without Flower's engine: the real server loop with real clients in this process."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedmjp.benchmarks.federation.training import play_again
from fedmjp.errors import CheckpointError, FederationError, QuorumError
from fedmjp.learning import ROBUST, Training
from fedmjp.server.aggregation import Aggregator
from fedmjp.server.loop import Federation
from fedmjp.server.refusals import RefusalFile
from fedmjp.server.roster import Roster
from fedmjp.training.run_folder import TrainingFolder
from fedmjp.wire import ARRAYS, METRICS
from tests.federations import Answer, InProcess, pictures, play, prepare, scenario_of

Weights = dict[str, torch.Tensor]


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def initial(root: Path) -> Weights:
    """The weights before the first round: those of a run in which nobody answers."""
    return play(scenario_of(rounds=1), root, answer=lambda *_: None)[0]


def history(root: Path) -> pd.DataFrame:
    return pd.read_csv(TrainingFolder(root).history)


def test_the_same_seed_gives_the_same_bits_whatever_the_nodes_are(tmp_path: Path) -> None:
    three = {"clients": 3}
    first, _ = play(scenario_of(**three), tmp_path / "first", nodes=(71, 5, 8))
    second, _ = play(scenario_of(**three), tmp_path / "second", nodes=(3, 99, 2))
    other, _ = play(scenario_of(**three, seed=1), tmp_path / "other")
    assert same(first, second)
    assert not same(first, other)
    columns = ["round", "loss", "top1", "validation_loss"]
    assert history(tmp_path / "first")[columns].equals(history(tmp_path / "second")[columns])


@pytest.mark.parametrize(
    "strategy",
    [{"strategy": "fedavg"}, {"strategy": "fedavgm"}, {"strategy": "fedadam", "server_learning_rate": 0.01}],
    ids=lambda values: values["strategy"],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path, strategy: dict[str, Any]) -> None:
    scenario = scenario_of(rounds=4, participation=0.5, checkpoint_every=2, **strategy)

    def stop(server_round: int, _client: int, reply: Message) -> Message:
        if server_round == 4:
            raise KeyboardInterrupt
        return reply

    uninterrupted, _ = play(scenario, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        play(scenario, tmp_path / "stopped", answer=stop)
    assert history(tmp_path / "stopped")["round"].tolist() == [1, 2, 3], "round 3 is not in the checkpoint"
    resumed, grid = play(scenario, tmp_path / "stopped")
    assert sorted({server_round for server_round, _ in grid.replies}) == [3, 4]
    assert same(resumed, uninterrupted)
    assert history(tmp_path / "stopped")["round"].tolist() == [1, 2, 3, 4]


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    play(scenario_of(rounds=1), tmp_path)
    with pytest.raises(CheckpointError, match="another configuration"):
        play(scenario_of(rounds=2), tmp_path)


def test_a_clients_learning_rate_runs_over_the_rounds(tmp_path: Path) -> None:
    play(scenario_of(rounds=3), tmp_path)  # two steps of two pictures in each
    top, low = 0.05 * 2 / 512, 5e-6 * 2 / 512
    expected = [low + (top - low) * (1 + math.cos(math.pi * step / 6)) / 2 for step in (1, 3, 5)]
    assert history(tmp_path)["learning_rate"].tolist() == pytest.approx(expected, rel=1e-6)


def test_a_mean_that_is_not_finite_leaves_the_weights_and_is_noted(tmp_path: Path) -> None:
    def huge(server_round: int, _client: int, reply: Message) -> Message:
        if server_round == 2:
            arrays = reply.content.array_records[ARRAYS].to_torch_state_dict()
            reply.content[ARRAYS] = ArrayRecord({name: value * 0 + 3e38 for name, value in arrays.items()})
        return reply

    scenario = scenario_of(rounds=2, strategy="fedsgd", server_learning_rate=1.2)
    found, _ = play(scenario, tmp_path / "huge", answer=huge)
    first, _ = play(scenario_of(rounds=1, strategy="fedsgd", server_learning_rate=1.2), tmp_path / "first")
    assert same(found, first)
    (noted,) = RefusalFile.of_run(tmp_path / "huge").read()
    assert (noted.round, noted.client) == (2, None)
    assert "not finite" in noted.reason or "their mean is not" in noted.reason


def test_fedavg_is_the_mean_of_the_clients_weights_by_their_pictures(tmp_path: Path) -> None:
    found, grid = play(scenario_of(rounds=1, clients=3), tmp_path / "run")
    before = initial(tmp_path / "start")
    contents = [grid.replies[1, client].content for client in range(3)]
    counts = [float(content[METRICS]["num-examples"]) for content in contents]  # type: ignore[arg-type, index]
    assert sorted(counts) == [2, 3, 3]
    sent = [content.array_records[ARRAYS].to_torch_state_dict() for content in contents]
    for name, value in found.items():
        mean = sum(count * each[name].double() for count, each in zip(counts, sent, strict=True)) / sum(counts)
        assert torch.allclose(value.double(), before[name] + mean, atol=1e-6)


def test_fedsgd_steps_down_the_gradient_of_each_clients_next_batch(tmp_path: Path) -> None:
    found, grid = play(scenario_of(rounds=1, strategy="fedsgd", server_learning_rate=0.3), tmp_path / "run")
    before = initial(tmp_path / "start")
    sent = [grid.replies[1, client].content.array_records[ARRAYS].to_torch_state_dict() for client in range(2)]
    for name, value in found.items():
        assert torch.allclose(value, before[name] - 0.3 * (sent[0][name] + sent[1][name]) / 2, atol=1e-6)


def test_fedprox_holds_clients_to_the_weights_that_they_were_sent(tmp_path: Path) -> None:
    before = initial(tmp_path / "start")

    def moved(name: str, **values: Any) -> float:
        after, _ = play(scenario_of(rounds=1, local_epochs=4, **values), tmp_path / name)
        return math.sqrt(sum(float((after[key] - before[key]).square().sum()) for key in before))

    assert moved("held", strategy="fedprox", proximal_mu=100.0) < 0.9 * moved("free")


def test_participants_are_drawn_from_the_seed_and_all_get_their_turn() -> None:
    scenario = scenario_of(clients=8, participation=0.25)
    drawn = [scenario.participants(server_round) for server_round in range(1, 101)]
    assert all(len(set(each)) == 2 and each == sorted(each) for each in drawn)
    assert drawn == [scenario.participants(server_round) for server_round in range(1, 101)]
    counts = np.bincount(np.concatenate(drawn), minlength=8)
    assert counts.min() >= 10, "25 are expected of each"
    assert scenario_of(clients=8, participation=0.01).participants(1) != []


def poisoned(server_round: int, client: int, reply: Message) -> Message | None:
    """Client 0 sends NaN in round 1 and is silent in round 2; in round 3 both send a tensor too few."""
    arrays = reply.content.array_records[ARRAYS].to_torch_state_dict()
    if server_round == 2 and client == 0:
        return None
    if server_round == 1 and client == 0:
        arrays = {name: value * float("nan") for name, value in arrays.items()}
    if server_round == 3:
        arrays.popitem()
    reply.content[ARRAYS] = ArrayRecord(arrays)
    return reply


def test_the_run_goes_on_without_clients_that_send_nonsense(tmp_path: Path) -> None:
    weights, _ = play(scenario_of(rounds=4, round_seconds=60), tmp_path, answer=poisoned)
    refused = RefusalFile.of_run(tmp_path).read()
    assert [(each.round, each.client) for each in refused] == [(1, 0), (2, 0), (3, 0), (3, 1)]
    assert "NaN" in refused[0].reason
    assert refused[1].reason == "no answer within 60 seconds"
    rows = history(tmp_path)
    assert rows["clients"].tolist() == [1, 1, 0, 2]
    assert rows["refused"].tolist() == [1, 1, 2, 0]
    assert rows["loss"].isna().tolist() == [False, False, True, False]
    assert rows["top1"].tolist()[1] == rows["top1"].tolist()[2], "nobody was left in round 3, so nothing moved"
    assert all(torch.isfinite(value).all() for value in weights.values())


def scaled(factor: float, *, at: int) -> Answer:
    """Client 0 sends a finite update that is so many times as long in a round."""

    def answer(server_round: int, client: int, reply: Message) -> Message:
        if (server_round, client) == (at, 0):
            arrays = reply.content.array_records[ARRAYS].to_torch_state_dict()
            reply.content[ARRAYS] = ArrayRecord({name: value * factor for name, value in arrays.items()})
        return reply

    return answer


def test_a_finite_update_out_of_all_proportion_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    scenario = scenario_of(rounds=2, clients=3)
    weights, _ = play(scenario, tmp_path / "scaled", answer=scaled(1e4, at=2))
    silent, _ = play(
        scenario,
        tmp_path / "silent",
        answer=lambda number, client, reply: None if (number, client) == (2, 0) else reply,
    )
    assert same(weights, silent)
    (refused,) = RefusalFile.of_run(tmp_path / "scaled").read()
    assert (refused.round, refused.client) == (2, 0)
    assert "times as long as is usual in its round; max_norm=10 allows 10 times" in refused.reason
    assert history(tmp_path / "scaled")["refused"].tolist() == [0, 1]


def test_a_step_that_spoils_the_model_is_not_taken_and_the_last_good_weights_stay(tmp_path: Path) -> None:
    scenario = scenario_of(rounds=3, clients=2, strategy="fedavgm", max_norm=0)
    play(scenario, tmp_path, answer=scaled(1e4, at=2))
    (noted,) = RefusalFile.of_run(tmp_path).read()
    assert (noted.round, noted.client) == (2, None)
    assert re.fullmatch(
        r"the step takes the validation loss from 1\.\d+ to \S+ and Top-1 from .*; weights stay", noted.reason
    )
    rows = history(tmp_path)
    assert rows["validation_loss"].tolist()[1] == rows["validation_loss"].tolist()[0]
    assert rows["clients"].tolist() == [2, 2, 2], "nobody was refused afterwards"
    assert rows["validation_loss"].max() < 3


def silent_from(first: int) -> Answer:
    """Nobody answers from a round on."""
    return lambda server_round, _client, reply: None if server_round >= first else reply


def test_a_round_with_too_few_updates_does_not_count_and_says_why(tmp_path: Path) -> None:
    scenario = scenario_of(rounds=3, quorum=0.5)
    with pytest.raises(QuorumError, match=r"in round 2 0 of 2 clients gave an update .*quorum=0\.5"):
        play(scenario, tmp_path, answer=silent_from(2))
    assert history(tmp_path)["round"].tolist() == [1]
    interrupted, _ = play(scenario, tmp_path)
    undisturbed, _ = play(scenario, tmp_path / "again")
    assert all(torch.equal(interrupted[name], value) for name, value in undisturbed.items())
    assert history(tmp_path)["clients"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("strategy", ROBUST)
@pytest.mark.parametrize("quorum", [0.0, 0.5])
def test_two_updates_are_no_round_of_a_strategy_that_outvotes(strategy: str, quorum: float, tmp_path: Path) -> None:
    """Of two, one of which is hostile and not compared, the step could be the hostile one."""
    scenario = scenario_of(rounds=2, clients=3, strategy=strategy, quorum=quorum)
    with pytest.raises(QuorumError, match=rf"in round 1 2 of 3 clients .*, and strategy {strategy} takes 3; the last"):
        play(scenario, tmp_path, answer=lambda _round, client, reply: None if client == 2 else reply)
    assert not (tmp_path / "history.csv").exists()


def test_half_of_the_clients_are_enough_by_default() -> None:
    assert Training.model_fields["quorum"].default == 0.5


@pytest.mark.parametrize(("ended", "plays"), [([0, 0, 0], 3), ([1, 1, 2, 2, 2], 5), ([0, 0, 9], 3)])
def test_a_run_is_played_again_until_three_times_nothing_comes_of_it(ended: list[int], plays: int) -> None:
    """``ended`` is the last round that counts after each play; 9 of 9 is the end."""
    done = [0]
    told: list[str] = []

    def run() -> None:
        done.append(ended[len(done) - 1])
        if done[-1] < 9:
            raise QuorumError("too few")

    if ended[-1] == 9:
        play_again(run, lambda: done[-1], told.append)
    else:
        with pytest.raises(QuorumError):
            play_again(run, lambda: done[-1], told.append)
    assert len(done) - 1 == plays
    assert told == ["too few"] * (plays - 1), "each is told but the last, which is the command's error"


def test_a_client_whose_training_diverges_is_refused_with_its_own_words(tmp_path: Path) -> None:
    recipe = scenario_of().training.recipe.model_dump() | {"weight_decay": 1e38}
    weights, _ = play(scenario_of(rounds=2, recipe=recipe), tmp_path / "run")
    refused = RefusalFile.of_run(tmp_path / "run").read()
    assert {(each.round, each.client) for each in refused} >= {(2, 0), (2, 1)} or len(refused) == 4
    assert all("recipe.learning_rate" in each.reason or "NaN" in each.reason for each in refused)
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_pictures_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(pictures(), data)
    (data / "class-1" / "damaged.png").write_bytes(b"no picture")
    play(scenario_of(data=str(data)), tmp_path / "run")
    rows = history(tmp_path / "run")
    assert rows["validation_pictures"].tolist() == [8, 8, 8], "of 9"
    assert rows["skipped"].max() == 1
    assert rows["refused"].sum() == 0


def test_a_client_of_a_deployment_trains_on_all_pictures_of_its_own(tmp_path: Path) -> None:
    shutil.copytree(pictures(), tmp_path / "own", ignore=shutil.ignore_patterns("class-3"))
    _, grid = play(scenario_of(rounds=1), tmp_path / "run", own={1: str(tmp_path / "own")})
    counts = [grid.replies[1, client].content.metric_records[METRICS]["num-examples"] for client in range(2)]
    assert counts == [4, 6]


def test_a_site_numbers_its_classes_as_the_run_does(tmp_path: Path) -> None:
    """By themselves its folders would be 0 and 1. The gradient of the head's bias is negative at labels alone."""
    shutil.copytree(pictures(), tmp_path / "own", ignore=shutil.ignore_patterns("class-0", "class-2"))
    _, grid = play(scenario_of(rounds=1, strategy="fedsgd"), tmp_path / "run", own={1: str(tmp_path / "own")})
    gradient = grid.replies[1, 1].content.array_records[ARRAYS].to_torch_state_dict()["backbone.head.bias"]
    assert set((gradient < 0).nonzero().flatten().tolist()) <= {1, 3}


def test_a_site_with_a_class_that_the_run_lacks_is_refused_by_its_name(tmp_path: Path) -> None:
    shutil.copytree(pictures(), tmp_path / "own", ignore=shutil.ignore_patterns("class-0"))
    (tmp_path / "own" / "class-2").rename(tmp_path / "own" / "klass-2")
    play(scenario_of(rounds=1), tmp_path / "run", own={1: str(tmp_path / "own")})
    (refused,) = RefusalFile.of_run(tmp_path / "run").read()
    assert refused.client == 1
    assert "pictures of class 'klass-2', which is none of the run's 4: did you mean 'class-2'?" in refused.reason


def test_a_site_does_not_guess_what_labels_mean(tmp_path: Path) -> None:
    scenario = scenario_of(rounds=1)
    prepare(scenario, TrainingFolder(tmp_path))
    grid = InProcess(scenario, TrainingFolder(tmp_path), own={1: pictures()})
    grid.run = grid.run.model_copy(update={"class_names": ""})
    Federation(grid, scenario, grid.run).play()  # type: ignore[arg-type]
    (refused,) = RefusalFile.of_run(tmp_path).read()
    assert "the run does not say which label is which class" in refused.reason


def test_a_run_in_which_no_client_can_answer_says_why(tmp_path: Path) -> None:
    scenario = scenario_of(rounds=1)
    prepare(scenario, TrainingFolder(tmp_path))
    grid = InProcess(scenario, TrainingFolder(tmp_path))
    grid.query = lambda message, _context: Message(Error(code=2, reason="Traceback\nImportError: x"), reply_to=message)
    with pytest.raises(FederationError, match="no client can answer: ImportError: x"):
        Federation(grid, scenario, grid.run).play()  # type: ignore[arg-type]


def test_nodes_that_do_not_say_which_client_they_are_are_left_out_and_noted(tmp_path: Path) -> None:
    scenario = scenario_of(rounds=2, clients=4)
    prepare(scenario, TrainingFolder(tmp_path))
    grid = InProcess(scenario, TrainingFolder(tmp_path), nodes=(1, 2, 3, 4, 5, 6, 7))
    answers: dict[int, dict[str, Any]] = {
        1: {"config": ConfigRecord({"partition-id": 0})},
        2: {},
        3: {"config": ConfigRecord()},
        4: {"config": ConfigRecord({"partition-id": "two\nlines"})},
        5: {"config": ConfigRecord({"partition-id": 0})},
        6: {"config": ConfigRecord({"partition-id": 77})},
        7: {"config": MetricRecord({"partition-id": 3})},
    }
    grid.query = lambda message, context: Message(RecordDict(answers[context.node_id]), reply_to=message)
    Federation(grid, scenario, grid.run).play()  # type: ignore[arg-type]
    noted = [each for each in RefusalFile.of_run(tmp_path).read() if each.client is None]
    assert [each.round for each in noted] == [1] * 6, "told once"
    assert [each.reason.split(" ")[1] for each in noted] == ["2", "3", "4", "5", "6", "7"]
    assert "like node 1; give it its own" in noted[3].reason
    assert "77; there are 0 to 3" in noted[4].reason
    assert "round 1: node 2" in str(noted[0])


def test_a_client_that_comes_back_as_another_node_is_known_again(tmp_path: Path) -> None:
    scenario = scenario_of(rounds=1)
    grid = InProcess(scenario, TrainingFolder(tmp_path), nodes=(20, 21))
    roster = Roster(grid, 2)  # type: ignore[arg-type]
    roster.wait(60.0)
    assert roster.nodes(60.0) == ({0: 20, 1: 21}, [])
    grid.nodes = (5, 21)
    assert roster.nodes(60.0) == ({0: 5, 1: 21}, [])


def test_absurd_reports_leave_gaps_in_the_history_and_the_run_goes_on(tmp_path: Path) -> None:
    def lie(server_round: int, client: int, reply: Message) -> Message:
        told: Any = reply.content.metric_records[METRICS]
        told["seconds"], told["learning-rate"], told["pictures"] = 1e308, float("inf"), 1e308
        told["skipped"] = [1.0] * client
        if server_round == 1 or client == 0:
            told["loss"] = float("nan")
        if server_round == 2 and client == 1:
            told["num-examples"] = 1e30
        return reply

    play(scenario_of(rounds=3), tmp_path, answer=lie)
    rows = history(tmp_path)
    assert rows["loss"].isna().tolist() == [True, True, False]
    assert rows["learning_rate"].isna().all()
    assert rows["pictures"].tolist() == rows["skipped"].tolist() == [0, 0, 0]
    (refused,) = RefusalFile.of_run(tmp_path).read()
    assert (refused.round, refused.client) == (2, 1)
    assert refused.reason == "reported num-examples = 1e+30, not a whole number from 1 to 4"


def test_a_client_refuses_weights_of_another_architecture_and_a_federation_of_another_size(tmp_path: Path) -> None:
    scenario = scenario_of(rounds=1)
    play(scenario, tmp_path)
    grid = InProcess(scenario, TrainingFolder(tmp_path))
    grid.nodes = (10, 11, 12)
    aggregator = Aggregator(scenario, ["w"])
    messages = aggregator.messages(1, {ARRAYS: ArrayRecord({"w": torch.ones(1)})}, [10])
    (reply,) = grid.send_and_receive(messages)
    assert "clients = 2, but the federation has 3" in reply.error.reason
    grid.nodes = (10, 11)
    (reply,) = grid.send_and_receive(aggregator.messages(1, {ARRAYS: ArrayRecord({"w": torch.ones(1)})}, [10]))
    assert "the server's weights do not fit deit_micro-none" in reply.error.reason
    assert "\n" not in reply.error.reason
