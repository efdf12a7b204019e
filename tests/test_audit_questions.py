"""The audit's three questions in numbers: membership, labels, and what fewer pictures or steps would give away."""

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, RecordDict
from scipy.stats import beta
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn

from fedmjp.benchmarks.audit import membership
from fedmjp.benchmarks.audit.app_loss import AppLoss, Examples, entries, read_examples
from fedmjp.benchmarks.audit.counterfactual import Rerun, trace_curve
from fedmjp.benchmarks.audit.evaluating import read_private, read_trained
from fedmjp.benchmarks.audit.intervals import area_interval, area_under_curve, rate_at, rate_interval
from fedmjp.benchmarks.audit.labels import LabelCase, batch_statistics, count_update, judge_labels
from fedmjp.benchmarks.audit.membership import REGRESSION, RIDGE, ClientUpdate, Scorer, judge_membership
from fedmjp.benchmarks.audit.network import by_name, take_in
from fedmjp.benchmarks.audit.noise import measure_change
from fedmjp.benchmarks.audit.probe import estimators, watching
from fedmjp.benchmarks.audit.recipe import read_recipe, threat_of, unreadable
from fedmjp.benchmarks.audit.running import Records, lines
from fedmjp.benchmarks.audit.sums import SUM, read_sum
from fedmjp.threat import ThreatModel
from tests.test_audit_recipe import hooks

assert hooks  # a fixture
LossFunction = Callable[[Tensor, Tensor], Tensor]
WIDTH, RECORDS = 200, 30


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def train_client(
    root: Path,
    network: nn.Module,
    data: tuple[Tensor, Tensor],
    loss: LossFunction,
    *,
    node: int,
    steps: int = 100,
    evaluates: bool = True,
) -> ClientUpdate:
    """Train a copy of a network under the probe's watch, and maybe evaluate it on records that nobody trained with."""
    records, module = Records(root), copy.deepcopy(network)
    content = RecordDict({"arrays": ArrayRecord(module.state_dict())})
    about = SimpleNamespace(message_id=f"m{node}", dst_node_id=node)
    inputs, targets = data
    with watching.MessageWatch(records.evaluator, records.model, SimpleNamespace(metadata=about, content=content)) as w:  # type: ignore[arg-type]
        optimiser = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(steps):
            optimiser.zero_grad()
            loss(module(inputs[:RECORDS]), targets[:RECORDS]).backward()
            optimiser.step()
        module.eval()
        with torch.no_grad():
            if evaluates:
                loss(module(inputs[RECORDS:]), targets[RECORDS:])
    reply: Any = SimpleNamespace(has_error=lambda: False, content=RecordDict())
    w.keep(reply)
    sent = network.state_dict()
    return ClientUpdate(f"m{node}", node, 1, False, {n: v - sent[n] for n, v in module.state_dict().items()})


def two_clients(
    root: Path, network: nn.Module, targets: Callable[[int], Tensor], loss: LossFunction, **options: Any
) -> tuple[list[ClientUpdate], Records, Mapping[str, Any]]:
    updates = [
        train_client(root, network, (drawn(100, WIDTH, seed=node), targets(node)), loss, node=node, **options)
        for node in (1, 2)
    ]
    records = Records(root)
    return updates, records, lines(records.evaluator / "seen.jsonl")[0]["loss"]


def classes_of(node: int) -> Tensor:
    return torch.randint(0, 3, (100,), generator=torch.Generator().manual_seed(10 + node))


def answer(updates: list[ClientUpdate], network: nn.Module, records: Records, loss: Mapping[str, Any]) -> Any:
    return judge_membership([(network.eval(), updates)], records, {"loss": loss})


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)  # as it is patched when this is called


def binary(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy(torch.sigmoid(output).squeeze(1), target)


def square(output: Tensor, target: Tensor) -> Tensor:
    return 0.3 * F.mse_loss(output, target)


@pytest.mark.usefixtures("hooks")
def test_a_masked_sum_is_one_upload_of_all_clients_together(tmp_path: Path) -> None:
    """One step of each client: their average is a step on the gradient of all records, by linearity."""
    network = nn.Sequential(nn.Linear(WIDTH, 3))
    updates, records, stated = two_clients(tmp_path, network, classes_of, entropy, steps=1)
    start = {name: value.numpy() for name, value in network.state_dict().items()}
    records.server.mkdir()
    arrays = {"arrays": {"kind": "arrays", "entries": {"0.weight": ["float32", [3, WIDTH], 0]}}}
    for number in (1, 2):
        halves = {name: sum(update.update[name] for update in updates).numpy() / 2 for name in start}  # type: ignore[union-attr]
        weights = {f"arrays/{name}": value + (number - 1) * halves[name] for name, value in start.items()}
        np.savez(records.server / f"{number}.npz", **weights)
        with (records.server / "wire.jsonl").open("a") as file:
            for node in (1, 2):
                line = {"way": "down", "type": "train", "node": node, "round": number, "records": arrays}
                file.write(json.dumps({**line, "id": f"m{node}", "file": f"{number}.npz"}) + "\n")
    summed = read_sum(records)
    assert summed is not None
    whole, total, clients = summed
    assert clients == 2
    private = read_private(whole.evaluator, total.message, [0.0], [1.0])
    assert private is not None
    inputs = torch.cat([drawn(100, WIDTH, seed=node)[:RECORDS] for node in (1, 2)])
    labels = torch.cat([classes_of(node)[:RECORDS] for node in (1, 2)])
    torch.testing.assert_close(torch.cat(private.entered), inputs)
    assert private.labels is not None
    assert private.labels.tolist() == labels.tolist()
    recipe = read_recipe(whole, total.message)
    assert (recipe["examples"], recipe["batch_size"], recipe["steps"]) == (2 * RECORDS, 2 * RECORDS, 1)
    module = copy.deepcopy(network)
    F.cross_entropy(module(inputs), labels).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(total.update[name], -0.5 * parameter.grad, atol=1e-6, rtol=1e-4)  # type: ignore[operator]
    change = measure_change(total, whole.evaluator)
    assert change is not None
    assert abs(change.factor - 1) < 1e-4
    case = LabelCase(SUM, module, total.update, total.update, ThreatModel(update="delta"), True, False)
    judged = judge_labels([case], whole, {**recipe, "loss": stated})
    assert (judged["examples"], judged["classes"]) == (2 * RECORDS, 3)


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(
    ("outputs", "targets", "loss", "least"),
    [
        (3, classes_of, entropy, 0.99),
        (1, lambda node: (classes_of(node) > 0).float(), binary, 0.99),
        (2, lambda node: drawn(100, 2, seed=20 + node), square, 0.9),  # some targets are near to the first output
    ],
    ids=["cross_entropy", "binary", "regression"],
)
def test_members_of_an_overfit_model_are_told_from_records_it_never_saw(
    outputs: int, targets: Callable[[int], Tensor], loss: LossFunction, least: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)  # noqa: TID251 (initial weights)
    network = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, outputs))
    updates, records, stated = two_clients(tmp_path, network, targets, loss)
    told = answer(updates, network, records, stated)
    assert told["answered"], told["why"]
    assert told["auc"] > least
    assert (told["members"], told["others"]) == (RECORDS, 140)
    assert told["tpr_at_1_percent"][0] > 0.6
    assert told["tpr_at_01_percent"] is None
    assert told["control_auc"] > 0.8
    assert abs(told["other_client_auc"] - 0.5) < 0.15


@pytest.mark.usefixtures("hooks")
def test_too_little_time_for_gradients_leaves_membership_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "SECONDS", 0.0)
    monkeypatch.setattr(AppLoss, "gradients", lambda *_, **__: torch.zeros(1, 3))
    network = nn.Sequential(nn.Linear(WIDTH, 3))
    updates, records, stated = two_clients(tmp_path, network, classes_of, entropy, steps=1)
    told = answer(updates, network, records, stated)
    assert (told["answered"], told["why"]) == (False, "0 seconds gave gradients of 1 of 200 records: too few")


@pytest.mark.usefixtures("hooks")
def test_parts_that_are_called_one_behind_the_other_are_one_network(tmp_path: Path) -> None:
    """As in an autoencoder whose training step calls its encoder, then its decoder."""
    whole = nn.ModuleDict({"encoder": nn.Linear(6, 2), "decoder": nn.Linear(2, 6)})
    records, inputs = Records(tmp_path), drawn(8, 6, seed=1)
    about = SimpleNamespace(message_id="m", dst_node_id=1)
    content = RecordDict({"arrays": ArrayRecord(whole.state_dict())})
    sent = copy.deepcopy(whole)
    optimiser = torch.optim.Adam(whole.parameters())

    def loss(batch: Tensor) -> float:
        optimiser.zero_grad()
        value = F.mse_loss(whole["decoder"](whole["encoder"](batch)), batch)
        value.backward()
        return float(value)

    with watching.MessageWatch(records.evaluator, records.model, SimpleNamespace(metadata=about, content=content)) as w:  # type: ignore[arg-type]
        for batch in inputs.split(4):
            optimiser.step(partial(loss, batch))  # the step begins before the forward pass, as in Lightning
        with torch.no_grad():
            F.mse_loss(whole["decoder"](whole["encoder"](2 * inputs)), 2 * inputs)
    reply: Any = SimpleNamespace(has_error=lambda: False, content=RecordDict())
    w.keep(reply)
    recipe = read_recipe(records)
    assert (recipe["forwards"], recipe["examples"], recipe["batch_sizes"]) == (2, 8, {"4": 2})
    network = torch.load(records.model, weights_only=False)
    assert recipe["groups"][0]["names"] == recipe["moved"] == [name for name, _ in network.named_parameters()]
    assert list(by_name(network.state_dict(), sent.state_dict())) == recipe["moved"]
    for file, expected in (("m.npz", inputs), ("evaluated-1.npz", 2 * inputs)):
        examples = read_examples(records.evaluator / file)
        assert examples is not None
        outputs = sent["decoder"](sent["encoder"](expected))
        losses = AppLoss(network, recipe["loss"]).losses(examples)
        torch.testing.assert_close(losses.float(), F.mse_loss(outputs, expected, reduction="none").mean(1))


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("classes", [2, 3])
def test_a_logistic_regression_is_watched_as_the_layer_that_it_is(
    classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fit", "score"):
        monkeypatch.setattr(LogisticRegression, name, getattr(LogisticRegression, name))
    monkeypatch.setattr(estimators, "_patched", False)
    estimators.watch_estimators()
    records, inputs, labels = Records(tmp_path), drawn(60, 5, seed=1), torch.arange(60) % classes
    names = np.array(["a", "b", "c"])[labels]
    model = LogisticRegression(C=1e9, tol=1e-8, max_iter=1000)
    content = RecordDict({"arrays": ArrayRecord([np.zeros((classes if classes > 2 else 1, 5))])})
    about = SimpleNamespace(message_id="m", dst_node_id=1)
    with watching.MessageWatch(records.evaluator, records.model, SimpleNamespace(metadata=about, content=content)) as w:  # type: ignore[arg-type]
        model.fit(inputs.numpy(), names)
        model.score(2 * inputs.numpy(), names)
    reply: Any = SimpleNamespace(has_error=lambda: False, content=RecordDict())
    w.keep(reply)
    recipe, private = read_recipe(records), read_private(records.evaluator, "m", [0.0], [1.0])
    assert (recipe["examples"], recipe["moved"]) == (60, ["weight", "bias"])
    assert "scikit-learn's lbfgs, which is not torch's" in str(unreadable(recipe, "weights"))
    assert private is not None
    assert private.labels is not None
    assert private.labels.tolist() == labels.tolist()
    torch.testing.assert_close(private.entered[0], inputs)
    weights, evaluated = read_trained(records.evaluator, "m"), read_examples(records.evaluator / "evaluated-1.npz")
    np.testing.assert_allclose(weights["weight"], model.coef_, rtol=1e-5)
    assert evaluated is not None
    losses = AppLoss(torch.load(records.model, weights_only=False), recipe["loss"]).losses(evaluated, weights)
    expected = log_loss(names, model.predict_proba(2 * inputs.numpy()))
    assert abs(float(losses.mean()) - expected) < 1e-4 * expected


@pytest.mark.usefixtures("hooks")
def test_the_order_that_a_solver_draws_is_no_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two repeats of a message give the same weights, so nothing is measured as protection."""
    for name in ("fit", "score"):
        monkeypatch.setattr(LogisticRegression, name, getattr(LogisticRegression, name))
    monkeypatch.setattr(estimators, "_patched", False)
    estimators.watch_estimators()
    content = RecordDict({"arrays": ArrayRecord([np.zeros((3, 5))])})
    about: Any = SimpleNamespace(metadata=SimpleNamespace(message_id="m", dst_node_id=1), content=content)
    reply: Any = SimpleNamespace(has_error=lambda: False, content=RecordDict())
    weights = []
    for number in range(2):
        model = LogisticRegression(solver="saga", max_iter=1)
        with warnings.catch_warnings(), watching.MessageWatch(tmp_path, tmp_path / "model.pt", about, number) as watch:
            warnings.simplefilter("ignore")  # one pass does not converge
            model.fit(drawn(60, 5, seed=1).numpy(), np.arange(60) % 3)
        watch.keep(reply)
        weights.append(model.coef_)
    assert np.array_equal(*weights)
    recipe = {**lines(tmp_path / "seen.jsonl")[0], "repeat": None}
    (tmp_path / "evaluator").mkdir()
    (tmp_path / "evaluator" / "seen.jsonl").write_text(json.dumps(recipe))
    assert threat_of(read_recipe(Records(tmp_path)), "weights").local_learning_rate > 0


@pytest.mark.usefixtures("hooks")
def test_a_loss_inside_of_a_network_called_by_keywords_is_computed_again(tmp_path: Path) -> None:
    """As transformers' networks do, beside a batch norm and a class weight."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm, self.head = nn.Embedding(50, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(self.norm(self.words(input_ids).mean(1)))
            loss = F.cross_entropy(logits.view(-1, 3), labels.view(-1), weight=torch.tensor([1.0, 2.0, 3.0]))
            return {"loss": loss, "logits": logits}

    def call(module: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda inputs: module(input_ids=inputs.long(), labels=labels[: len(inputs)])["loss"]

    labels, words = torch.arange(30) % 3, torch.arange(240).view(30, 8) % 47
    records, network = Records(tmp_path), Tagger()
    about = SimpleNamespace(message_id="m", dst_node_id=1)
    content = RecordDict({"arrays": ArrayRecord(network.state_dict())})
    sent = copy.deepcopy(network)
    with watching.MessageWatch(records.evaluator, records.model, SimpleNamespace(metadata=about, content=content)) as w:  # type: ignore[arg-type]
        call(network)(words).backward()
    reply: Any = SimpleNamespace(has_error=lambda: False, content=RecordDict())
    w.keep(reply)
    stated, examples = lines(records.evaluator / "seen.jsonl")[0]["loss"], read_examples(records.evaluator / "m.npz")
    assert examples is not None
    losses = AppLoss(sent.eval(), stated).losses(examples)
    logits = sent(input_ids=words, labels=labels)["logits"]
    expected = F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]), reduction="none")
    assert torch.allclose(losses.float(), expected, atol=1e-5)


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("trains_with_them", [True, False])
def test_clients_with_other_classes_are_told_apart_by_their_records_alone(
    trains_with_them: bool, tmp_path: Path
) -> None:
    """Without records of evaluation the other client's are compared, whose classes differ: these raise no alarm."""
    centres, alarms = drawn(3, WIDTH, seed=99), 0
    for number in range(3):
        network, sides = nn.Linear(WIDTH, 3), []
        for draw in (0, 1):
            updates = []
            for node in (1, 2):
                seed = 1000 * number + 10 * draw + node
                share = torch.tensor([0.7, 0.2, 0.1] if node == 1 else [0.1, 0.2, 0.7])
                labels = torch.multinomial(share, 100, True, generator=torch.Generator().manual_seed(seed))
                data = (0.3 * centres[labels] + drawn(100, WIDTH, seed=seed), labels)
                root = tmp_path / f"{number}-{draw}"
                updates.append(train_client(root, network, data, entropy, node=node, steps=20, evaluates=False))
            sides.append(updates)
        records = Records(tmp_path / f"{number}-0")
        stated = lines(records.evaluator / "seen.jsonl")[0]["loss"]
        result = answer(sides[0] if trains_with_them else sides[1], network, records, stated)
        assert result["answered"], result["why"]
        assert any("within their class" in caveat for caveat in result["caveats"])
        alarms += result["interval"][0] > 0.5
    assert alarms == (3 if trains_with_them else 0)


@pytest.mark.usefixtures("hooks")
def test_an_update_of_noise_raises_no_alarm(tmp_path: Path) -> None:
    network = nn.Linear(WIDTH, 3)
    updates, records, stated = two_clients(tmp_path, network, classes_of, entropy)
    alarms = 0
    for number in range(4):
        noisy = [
            ClientUpdate(
                u.message, u.node, 1, False, {n: 0.1 * drawn(*v.shape, seed=number) for n, v in u.update.items()}
            )
            for u in updates
        ]
        told = answer(noisy, network, records, stated)
        assert told["answered"] or "another client's update" in told["why"]
        alarms += bool(told["answered"] and told["interval"][0] > 0.5)
    assert alarms <= 1, "95 % intervals"


def test_areas_and_rates_are_those_of_scikit_learn_scipy_and_all_pairs() -> None:
    members, others = drawn(40, seed=0).round(decimals=1) + 2.0, drawn(200, seed=1).round(decimals=1)
    pairs = members[:, None] - others[None]
    area = area_under_curve(members, others)
    assert area == pytest.approx(float((pairs > 0).float().mean() + 0.5 * (pairs == 0).float().mean()), abs=1e-6)
    truth = torch.cat([torch.ones(40), torch.zeros(200)])
    assert area == pytest.approx(roc_auc_score(truth, torch.cat([members, others])))
    assert rate_interval(7, 40) == pytest.approx((beta.ppf(0.025, 7, 34), beta.ppf(0.975, 8, 33)))
    assert rate_at(members, others[:99], 0.01) is None
    rate = rate_at(members, others, 0.01)
    assert rate is not None
    bars = [bar for bar in torch.cat([members, others]) if int((others > bar).sum()) <= 2]  # two of 200
    assert rate[0] == pytest.approx(max(float((members > bar).float().mean()) for bar in bars), abs=1e-4)
    assert rate[1] < rate[0] < rate[2]


@pytest.mark.parametrize("shift", [0.0, 1.0, 4.0])
def test_intervals_of_areas_hold_the_true_one_in_19_of_20_draws(shift: float) -> None:
    generator, held = torch.Generator().manual_seed(0), 0
    true = float(torch.special.ndtr(torch.tensor(shift / 2**0.5)))
    for _ in range(400):
        members, others = torch.randn(20, generator=generator) + shift, torch.randn(60, generator=generator)
        low, high = area_interval(area_under_curve(members, others), 20, 60)
        held += low <= true <= high
        assert high > low
    assert held >= 0.93 * 400


class Wrapped(nn.Module):
    """A network with a head as PEFT leaves it: an original that is not trained, and the copy that is."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": nn.ModuleDict({"body": nn.Linear(WIDTH, 16), "head": nn.Module()})})
        self.base_model["model"]["head"].original_module = nn.Linear(16, outputs)
        self.base_model["model"]["head"].modules_to_save = nn.ModuleDict({"default": nn.Linear(16, outputs)})

    def forward(self, inputs: Tensor) -> Tensor:
        parts = self.base_model["model"]
        return parts["head"].modules_to_save["default"](torch.relu(parts["body"](inputs)))  # type: ignore[no-any-return]


def label_case(module: nn.Module, loss: Tensor, names: Mapping[str, str] | None, pictures: int) -> LabelCase:
    """An update of one step on a loss, by the names in which PEFT sends it."""
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    update = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    if names is not None:
        update = by_name(module.state_dict(), {sent: update[name] for name, sent in names.items()})
    return LabelCase("m", module, update, update, ThreatModel(batch_size=pictures), True, True)


@pytest.mark.parametrize(("outputs", "with_bias"), [(10, True), (10, False), (2, True)])
def test_labels_are_counted_in_heads_that_peft_has_renamed(outputs: int, with_bias: bool) -> None:
    torch.manual_seed(0)  # noqa: TID251 (initial weights)
    module, labels = Wrapped(outputs), torch.arange(16) % min(outputs, 7)
    loss = F.cross_entropy(module(0.1 * drawn(16, WIDTH, seed=0)), labels)
    head = "base_model.model.head.modules_to_save.default"
    sent = {f"{head}.weight": "base_model.model.head.weight", f"{head}.bias": "base_model.model.head.bias"}
    case = label_case(module, loss, sent if with_bias else dict(list(sent.items())[:1]), 16)
    counts, _ = count_update(case, 16, {"loss": {"shape": [16, outputs]}})
    wrong = float((counts - torch.bincount(labels, minlength=outputs)).abs().sum()) / 2
    assert int(counts.sum()) == 16
    assert wrong <= (1 if with_bias else 3)


def test_updates_that_no_arithmetic_survives_leave_labels_open(tmp_path: Path) -> None:
    network = nn.Linear(WIDTH, 3)
    (tmp_path / "evaluator").mkdir()
    (tmp_path / "evaluator" / "seen.jsonl").write_text('{"id": "m", "node": 1, "labels": {"0": 4}, "examples": 4}')
    loss = {"name": "cross_entropy", "shape": [4, 3]}
    for value in (torch.nan, torch.inf, 0.0):
        update = {name: torch.full_like(tensor, value) for name, tensor in network.state_dict().items()}
        case = LabelCase("m", network, update, update, ThreatModel(batch_size=4), True, True)
        answered = judge_labels([case], Records(tmp_path), {"loss": loss, "forwards": 1})
        assert answered["why"] or answered["right"] is not None


@pytest.mark.parametrize("ones", [0, 3, 16])
def test_one_logit_counts_two_classes(ones: int) -> None:
    torch.manual_seed(0)  # noqa: TID251 (initial weights)
    module, labels = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 1)), (torch.arange(16) < ones).float()
    loss = F.binary_cross_entropy_with_logits(module(0.1 * drawn(16, WIDTH, seed=0)).squeeze(1), labels)
    counts, _ = count_update(label_case(module, loss, None, 16), 16, {"loss": {"shape": [16]}})
    assert counts.tolist() == pytest.approx([16 - ones, ones], abs=1)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_tell_those_of_the_private_batch(momentum: float | None) -> None:
    layer, batches = nn.BatchNorm1d(5, momentum=momentum), [drawn(32, 5, seed=seed) + seed for seed in range(4)]
    layer(batches[0])
    assert layer.num_batches_tracked is not None
    for count in (1, 3):
        module = copy.deepcopy(layer)
        for batch in batches[1 : 1 + count]:
            module(batch)
        weights = torch.tensor([0.9 ** (count - 1 - place) if momentum else 1.0 for place in range(count)])
        for name, statistic in (("running_mean", torch.mean), ("running_var", torch.var)):
            old, new = layer.get_buffer(name), module.get_buffer(name)
            solved = batch_statistics(old, new - old, momentum, count, 1)
            truth = torch.stack([statistic(batch, dim=0) for batch in batches[1 : 1 + count]])
            assert torch.allclose(solved.float(), (weights[:, None] * truth).sum(0) / weights.sum(), atol=1e-4)


@pytest.mark.usefixtures("hooks")
def test_labels_of_watched_clients_are_scored_beside_a_guess(tmp_path: Path) -> None:
    network = nn.Linear(WIDTH, 3)
    updates, records, stated = two_clients(tmp_path, network, lambda node: torch.full((100,), node), entropy, steps=1)
    threat = ThreatModel(update="delta", batch_size=RECORDS, local_learning_rate=0.5)
    cases = [LabelCase(u.message, network, u.update, u.update, threat, True, False) for u in updates]
    told = judge_labels(cases, records, {"loss": stated, "forwards": 1})
    assert told["answered"], told["why"]
    assert told["right"] > 0.9
    assert (told["examples"], told["classes"], told["batch_norm"]) == (2 * RECORDS, 3, None)
    assert told["interval"][0] < told["right"] <= told["interval"][1]
    two_rounds = judge_labels(cases * 2, records, {"loss": stated, "forwards": 1})
    assert two_rounds["interval"] == told["interval"], "the same records again are no further evidence"
    told = judge_labels(cases, records, {"loss": {"name": "mse_loss"}, "forwards": 1})
    assert "no classes" in told["why"]


@pytest.mark.usefixtures("hooks")
def test_an_autoencoder_has_no_labels_to_read(tmp_path: Path) -> None:
    network, inputs = nn.Linear(WIDTH, WIDTH), drawn(100, WIDTH, seed=1)
    update = train_client(tmp_path, network, (inputs, inputs), square, node=1, steps=1)
    case = LabelCase(update.message, network, update.update, update.update, ThreatModel(), True, False)
    answered = judge_labels([case], Records(tmp_path), {"loss": {"name": "mse_loss"}, "forwards": 1})
    assert (answered["targets_are_inputs"], answered["right"]) == (True, None)


@pytest.mark.parametrize(("classes", "steps"), [(2, 1), (2, 3), (10, 5)])
def test_labels_read_from_steps_of_adam_are_better_than_a_guess(classes: int, steps: int) -> None:
    """An equal guess is the baseline, over shares of classes from nearly one alone to nearly equal."""
    recipe = {"optimiser": "Adam", "learning_rates": [1e-3], "steps": steps, "loss": {"shape": [1, classes]}}
    gains = []
    for seed in range(12):
        torch.manual_seed(seed)  # noqa: TID251 (initial weights)
        shares = np.random.default_rng(seed).dirichlet([(0.3, 1.0, 10.0)[seed % 3]] * classes)
        labels = torch.multinomial(torch.from_numpy(shares), 64, replacement=True)
        inputs = drawn(classes, WIDTH, seed=seed)[labels] + drawn(64, WIDTH, seed=100 + seed)
        network = nn.Linear(WIDTH, classes)
        trained = copy.deepcopy(network)
        optimiser = torch.optim.Adam(trained.parameters(), lr=1e-3)
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(trained(0.1 * inputs), labels).backward()
            optimiser.step()
        sent = network.state_dict()
        update = {name: value - sent[name] for name, value in trained.state_dict().items()}
        counts, _ = count_update(LabelCase("m", network, update, update, ThreatModel(), False, False), 64, recipe)
        truth = torch.bincount(labels, minlength=classes).double()
        gains.append(float(torch.minimum(counts, truth).sum() - truth.clamp_max(64 / classes).sum()) / 64)
    assert np.mean(gains) > 0.03


def test_weights_in_the_regression_are_those_of_ridge_with_a_record_left_out() -> None:
    """Against scikit-learn: how much better the update is explained with a record than without, with its sign."""
    torch.manual_seed(0)  # noqa: TID251 (initial weights)
    network = nn.Linear(5, 3)
    examples = Examples({"input-0": drawn(12, 5, seed=0)}, torch.arange(12) % 3)
    stated: dict[str, Any] = {
        "name": "cross_entropy",
        "link": {"output": "output", "link": "identity"},
        "shape": [12, 3],
        "options": {},
    }
    loss = AppLoss(network, stated)
    step = {name: -0.1 * gradient for name, gradient in loss.gradient(examples[:5]).items()}
    scores = Scorer(loss, examples, step).score(step)[REGRESSION]
    rows = torch.stack([entries(loss.gradient(examples[[place]]), list(step), 1) for place in range(12)]).double()
    update, ridge = -entries(step, list(step), 1).double(), RIDGE * float((rows @ rows.mT).diag().mean())

    def misfit(places: list[int]) -> tuple[float, np.ndarray[Any, Any]]:
        model = Ridge(alpha=ridge, fit_intercept=False).fit(rows[places].mT.numpy(), update.numpy())
        squares = float(((rows[places].mT.numpy() @ model.coef_ - update.numpy()) ** 2).sum())
        return squares + ridge * float((model.coef_**2).sum()), model.coef_

    whole, weights = misfit(list(range(12)))
    gains = [misfit([number for number in range(12) if number != place])[0] - whole for place in range(12)]
    assert scores.numpy() == pytest.approx(np.sign(weights) * np.sqrt(gains), rel=1e-3)


@pytest.mark.usefixtures("hooks")
def test_the_curve_is_of_the_apps_own_step(tmp_path: Path) -> None:
    """One step of one record gives it all away: its label, its membership, and the first layer's input."""
    torch.manual_seed(0)  # noqa: TID251 (initial weights)
    network = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 3))
    _, records, _ = two_clients(tmp_path, network, classes_of, entropy, steps=1)
    examples, private = read_examples(tmp_path / "evaluator" / "m1.npz"), read_private(records.evaluator, "m1", [], [])
    assert examples is not None
    assert private is not None
    seen = take_in(network, {}, mean=[0.0] * 3, std=[1.0] * 3, side=1, record=examples.inputs["input-0"][0])
    rows = trace_curve(Rerun(seen, read_recipe(records), "weights", examples, private))
    assert {(1, 1), (8, 1), (1, 8)} <= {(row["pictures"], row["steps"]) for row in rows}
    first = rows[0]
    assert (first["pictures"], first["steps"], first["labels_right"], first["membership_auc"]) == (1, 1, 1.0, 1.0)
    assert first["came_back"] == 1
    assert first["best"] < 1e-3
