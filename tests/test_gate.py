"""The upload gate as a mod, on apps of torchvision, transformers and plain torch as their documentation teaches."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import fitins_to_recorddict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

from fedmjp.clients.gate.ledger import Entry, GateLedger, compose_epsilon
from fedmjp.clients.gate.policy import Policy
from fedmjp.clients.gate.reasons import Reason, RefusedError
from fedmjp.clients.gate.watching import TrainingWatch
from fedmjp.clients.mods import UploadGate
from fedmjp.defences.accounting import composed_epsilon
from fedmjp.errors import ConfigError, DefenceError
from fedmjp.facade import bundled_pictures
from fedmjp.seeds import scoped_randomness
from fedmjp.wire import REFUSED
from tests.conftest import ROOT

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
SIZE, CLASSES = 32, 20
PICTURES = torch.stack([picture.image for picture in bundled_pictures(8, size=SIZE)])


def of_torchvision() -> nn.Module:
    shape = {"num_layers": 1, "num_heads": 2, "hidden_dim": 64, "mlp_dim": 64, "num_classes": CLASSES}
    model = torchvision.models.VisionTransformer(image_size=SIZE, patch_size=8, **shape)
    nn.init.trunc_normal_(model.heads.head.weight, std=0.02)  # torchvision begins with a head of zeros
    return model


def of_transformers() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(image_size=SIZE, patch_size=8, num_labels=CLASSES, **shape))


def of_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 14**2, 32), nn.ReLU(),
        nn.Linear(32, CLASSES),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision": of_torchvision,
    "transformers": of_transformers,
    "convolutions": of_convolutions,
}


def made(name: str) -> nn.Module:
    with scoped_randomness(1):
        return MODELS[name]()


def batch_of(count: int) -> tuple[Tensor, Tensor]:
    """Distinct pictures: those of the package, and turned and mirrored ones."""
    turned = torch.cat([PICTURES, PICTURES.flip(-1), PICTURES.flip(-2), PICTURES.mT])[:count]
    return (turned - 0.5) / 0.25, torch.arange(count) % CLASSES


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], *, lr: float = 0.1, optimiser: str = "SGD") -> float:
    """A loop as Flower's own examples have it."""
    model.train()
    chosen, loss = getattr(torch.optim, optimiser)(model.parameters(), lr=lr), torch.zeros(())
    for images, labels in batches:
        chosen.zero_grad()
        if hasattr(model, "config"):  # one of transformers
            loss = model(pixel_values=images, labels=labels).loss
        else:
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        chosen.step()
    return float(loss.detach())


def app_of(name: str, batches: list[tuple[Tensor, Tensor]], gate: UploadGate, **recipe: Any) -> ClientApp:
    app = ClientApp(mods=[gate])

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        model = made(name)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loss = train(model, batches, **recipe)
        metrics = MetricRecord({"train_loss": loss, "num-examples": sum(len(labels) for _, labels in batches)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


def context() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def message_of(content: RecordDict, kind: str = "train") -> Message:
    message = Message(content=content, message_type=kind, dst_node_id=1, group_id="3")
    message.metadata.__dict__["_message_id"] = "message"
    return message


def asked(name: str, **config: Any) -> Message:
    state = ArrayRecord(made(name).state_dict())
    return message_of(RecordDict({"arrays": state, "config": ConfigRecord({"server-round": 3, **config})}))


def gate_of(folder: Path, **values: Any) -> UploadGate:
    return UploadGate(Policy.parse(values), ledger=folder / "gate.jsonl")


def last(gate: UploadGate) -> Entry:
    return gate.ledger.entries()[-1]


def reason_of(reply: Message) -> str:
    assert reply.has_error()
    assert reply.error.code == REFUSED
    return str(reply.error.reason)


@pytest.mark.parametrize("optimiser", ["SGD", "Adam"])
@pytest.mark.parametrize("name", MODELS)
def test_an_upload_of_one_picture_does_not_leave(name: str, optimiser: str, tmp_path: Path) -> None:
    gate = gate_of(tmp_path)
    reply = app_of(name, [batch_of(1)] * 2, gate, optimiser=optimiser, lr=0.01)(asked(name), context())
    assert reason_of(reply) == "the site's upload gate: too few pictures behind the upload"
    assert (last(gate).verdict, last(gate).pictures, last(gate).steps) == ("refused", 1, 2)


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_back_of_one_picture_is_the_picture_or_its_feature(name: str, tmp_path: Path) -> None:
    gate = gate_of(tmp_path, fewest_pictures=1, features="refuse")
    reply = app_of(name, [batch_of(1)], gate)(asked(name), context())
    kind = "features" if name == "convolutions" else "pictures"
    assert reason_of(reply).endswith(f"{kind} come back")
    assert kind in {outcome.of for outcome in last(gate).outcomes if outcome.came_back}


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_eight_passes_and_the_ledger_says_what_of_labels_and_features_leaves(
    name: str, tmp_path: Path
) -> None:
    gate = gate_of(tmp_path)
    images, labels = batch_of(8)
    reply = app_of(name, [(images, labels)], gate)(asked(name), context())
    assert not reply.has_error(), reply.error.reason
    outcomes = {(outcome.attack, outcome.of): outcome for outcome in last(gate).outcomes}
    assert outcomes["labels", "labels"].came_back >= 6
    if name != "convolutions":
        separated = outcomes["class_token", "features"]
        assert (separated.came_back, separated.among) == (8, 8)
    assert last(gate).verdict == "passed"


def clip(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    F.cross_entropy(model(images), labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def accumulate(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    for few, of in zip(images.split(2), labels.split(2), strict=True):
        F.cross_entropy(model(few), of).backward()


def add_up(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    F.cross_entropy(model(images), labels, reduction="sum").backward()


def keep_loss_scale(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    (64 * F.cross_entropy(model(images), labels)).backward()


@pytest.mark.parametrize("backward", [clip, accumulate, add_up, keep_loss_scale])
def test_a_factor_on_the_gradient_lets_no_feature_out(backward: Any, tmp_path: Path) -> None:
    gate = gate_of(tmp_path, features="refuse", kind="weights")
    app, (images, _) = ClientApp(mods=[gate]), batch_of(8)

    @app.train()
    def answer(message: Message, _: Context) -> Message:
        model = made("torchvision").train()
        backward(model, images, torch.tensor([3, 3, 3, 1, 1, 7, 7, 9]))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        metrics = MetricRecord({"num-examples": 8})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    assert reason_of(app(asked("torchvision"), context())).endswith("features come back")
    right = {(outcome.attack, outcome.of): outcome.came_back for outcome in last(gate).outcomes}
    assert right["labels", "labels"] == right["class_token", "labels"] == right["class_token", "features"] == 8


def test_labels_of_all_batches_are_seen_and_pictures_of_the_first_ones() -> None:
    images, _ = batch_of(24)
    labels = [torch.full((24,), label) for label in range(4)]
    with TrainingWatch().watching() as seen:
        train(made("torchvision"), [(images, target) for target in labels])
    assert torch.equal(torch.cat(seen.labels), torch.cat(labels))
    assert [len(kept) for kept in (*seen.images, *seen.features)] == [24, 24, 24, 24]


def nll(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(model(images), 1), labels)


def compiled(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(torch.compile(model, backend="eager")(images), labels)


def in_double(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.double()(images.double()), labels)


@pytest.mark.parametrize("loss", [nll, compiled, in_double])
def test_pictures_and_labels_are_seen_however_the_loss_is_computed(loss: Any, tmp_path: Path) -> None:
    gate = gate_of(tmp_path, model_checks="refuse")
    images, labels = batch_of(8)
    app = ClientApp(mods=[gate])

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        model = made("torchvision").train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        loss(model, images, labels).backward()
        optimiser.step()
        arrays = ArrayRecord(model.float().state_dict())
        return Message(
            content=RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 8})}), reply_to=message
        )

    assert not app(asked("torchvision"), context()).has_error()
    assert last(gate).pictures == 8
    assert {(one.of, one.came_back, one.reason) for one in last(gate).outcomes if one.of == "labels"} == {
        ("labels", 8, "")
    }


@pytest.mark.parametrize("count", [1, 8])
def test_a_search_is_tried_in_the_rounds_that_the_policy_names(count: int, tmp_path: Path) -> None:
    search = {"every": 1, "attack": "patch_embedding_wiener"}
    gate = gate_of(tmp_path, fewest_pictures=1, pictures="say", search=search)
    assert not app_of("torchvision", [batch_of(count)], gate)(asked("torchvision"), context()).has_error()
    (tried,) = [outcome for outcome in last(gate).outcomes if outcome.attack == "patch_embedding_wiener"]
    assert (tried.of, tried.came_back) == ("pictures", 1 if count == 1 else 0)


def test_several_steps_of_adam_pass_and_the_ledger_says_why_nothing_applies(tmp_path: Path) -> None:
    gate = gate_of(tmp_path)
    batches = [batch_of(8), batch_of(16)]
    reply = app_of("torchvision", batches, gate, optimiser="AdamW", lr=1e-3)(asked("torchvision"), context())
    assert not reply.has_error()
    reasons = {outcome.attack: outcome.reason for outcome in last(gate).outcomes}
    assert reasons["labels"] == "changes by AdamW are no gradients"
    assert reasons["class_token"] == "2 steps are not one gradient"


def test_a_reply_of_gradients_is_read_as_gradients(tmp_path: Path) -> None:
    app = ClientApp(mods=[gate := gate_of(tmp_path, kind="gradient", fewest_pictures=1)])

    @app.train()
    def answer(message: Message, _: Context) -> Message:
        model = made("torchvision").train()
        images, labels = batch_of(1)
        nn.CrossEntropyLoss()(model(images), labels).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return Message(content=RecordDict({"arrays": ArrayRecord(gradients)}), reply_to=message)

    reply = app(asked("torchvision"), context())
    assert reason_of(reply).endswith("pictures come back"), last(gate)
    shown = next(outcome for outcome in last(gate).outcomes if outcome.attack == "closed form")
    assert (shown.of, shown.came_back, shown.among) == ("pictures", 1, 1)


@pytest.mark.parametrize("count", [1, 8])
def test_an_app_of_numpy_clients_is_gated_like_any_other(count: int, tmp_path: Path) -> None:
    gate, model = gate_of(tmp_path), made("torchvision")

    class Client(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            names = model.state_dict().keys()
            state = {name: torch.tensor(value) for name, value in zip(names, parameters, strict=True)}
            model.load_state_dict(state)
            loss = train(model, [batch_of(count)])
            return [value.numpy() for value in model.state_dict().values()], count, {"loss": loss}

    parameters = ndarrays_to_parameters([value.numpy() for value in made("torchvision").state_dict().values()])
    app = ClientApp(client_fn=lambda _context: Client().to_client(), mods=[gate])
    reply = app(message_of(fitins_to_recorddict(FitIns(parameters, {}), keep_input=True)), context())
    assert reply.has_error() == (count == 1)
    assert last(gate).verdict == ("refused" if count == 1 else "passed")
    separated = next(
        outcome for outcome in last(gate).outcomes if outcome.attack == "class_token" and outcome.of == "features"
    )
    assert (separated.came_back, separated.among) == (count, count)


@pytest.mark.parametrize(
    ("policy", "examples", "said"),
    [({}, 8, ""), ({"unseen": "refuse"}, 8, "were not seen"), ({}, 7, "too few pictures"), ({}, 0, "")],
)
def test_what_is_not_seen_leaves_unless_the_policy_or_the_number_of_examples_forbids_it(
    policy: dict[str, Any], examples: int, said: str, tmp_path: Path
) -> None:
    gate = gate_of(tmp_path, **policy)
    app = ClientApp(mods=[gate])

    @app.train()
    def answer(message: Message, _: Context) -> Message:
        moved = {name: t * 1.001 for name, t in message.content["arrays"].to_torch_state_dict().items()}
        metrics = MetricRecord({"num-examples": examples})
        return Message(content=RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    reply = app(asked("torchvision"), context())
    assert said in reason_of(reply) if said else not reply.has_error()
    assert Reason.UNSEEN in last(gate).reasons or examples == 7


def replying(gate: UploadGate, make: Callable[[Message], Message | RecordDict]) -> Message:
    def app(message: Message, _: Context) -> Message:
        made = make(message)
        return made if isinstance(made, Message) else Message(content=made, reply_to=message)

    return gate(asked("convolutions"), context(), app)


def raising(*_: object) -> RecordDict:
    raise ValueError("the pixel is 0.123")


def metrics_of_pixels(message: Message) -> RecordDict:
    return RecordDict({"arrays": message.content["arrays"], "m": MetricRecord({"p": [0.5] * 3072})})


def bytes_of_pixels(message: Message) -> RecordDict:
    return RecordDict({"arrays": message.content["arrays"], "c": ConfigRecord({"p": bytes(3072)})})


def odd_dtype(message: Message) -> RecordDict:
    record = ArrayRecord({"w": Array(dtype="float4", shape=(2,), stype="numpy.ndarray", data=b"xy")})
    return RecordDict({"arrays": record})


def more_records(message: Message) -> RecordDict:
    return RecordDict({"arrays": message.content["arrays"], "more": ArrayRecord({"w": Array(np.zeros(3))})})


def error_with_pixels(message: Message) -> Message:
    return Message(Error(code=7, reason="pixels 0.123 0.456"), reply_to=message)


@pytest.mark.parametrize(
    "make", [raising, metrics_of_pixels, bytes_of_pixels, odd_dtype, more_records, error_with_pixels]
)
def test_whatever_cannot_be_judged_is_refused_and_no_reason_holds_data(make: Any, tmp_path: Path) -> None:
    gate = gate_of(tmp_path, unseen="say")
    reason = reason_of(replying(gate, make))
    assert not any(digit in reason for digit in "0123456789")
    assert "0.123" not in (tmp_path / "gate.jsonl").read_text()
    assert last(gate).verdict == "refused"


@pytest.mark.parametrize(
    ("make", "said"), [(raising, "ValueError: the pixel is 0.123"), (error_with_pixels, "pixels 0.123 0.456")]
)
def test_the_log_at_the_site_tells_an_apps_error(make: Any, said: str, tmp_path: Path) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    flower = logging.getLogger("flwr")
    flower.addHandler(handler)
    try:
        assert "0.123" not in reason_of(replying(gate_of(tmp_path, unseen="say"), make))
    finally:
        flower.removeHandler(handler)
    assert told == [f"The app's error, which stays at this site: {said}"]


def test_counters_that_carry_data_are_refused(tmp_path: Path) -> None:
    content = RecordDict({"arrays": ArrayRecord({"w": torch.ones(4), "n": torch.zeros(500, dtype=torch.int64)})})
    reply = ArrayRecord({"w": torch.ones(4) * 1.01, "n": torch.arange(500)})

    def app(message: Message, _: Context) -> Message:
        return Message(content=RecordDict({"arrays": reply}), reply_to=message)

    gated = gate_of(tmp_path, unseen="say")(message_of(content), context(), app)
    assert "more numbers in clear" in reason_of(gated)


@pytest.mark.parametrize("config", [{"lr": 3.0}, {"learning_rate": float("nan")}, {"lr": "0.1"}])
def test_settings_out_of_bounds_are_refused_before_training(config: dict[str, Any], tmp_path: Path) -> None:
    def app(*_: object) -> Message:
        raise AssertionError("trained")

    gate = gate_of(tmp_path)
    assert "out of bounds" in reason_of(gate(asked("convolutions", **config), context(), app))


def test_a_suspicious_model_is_not_trained_on_even_if_the_app_goes_on(tmp_path: Path) -> None:
    gate, model = gate_of(tmp_path, model_checks="refuse"), made("torchvision")
    with torch.no_grad():
        head = model.heads.head
        head.weight[1:] = 0
        head.bias[0] = -1e4
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "config": ConfigRecord({"server-round": 1})})
    steps = []

    def stubborn(message: Message, _: Context) -> Message:
        try:
            train(model, [batch_of(8)] * 2)
        except RefusedError as error:
            steps.append(str(error.reason))
        metrics = MetricRecord({"num-examples": 8})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    reply = gate(message_of(content), context(), stubborn)
    assert reason_of(reply) == "the site's upload gate: the model that came in is suspicious"
    assert steps == [Reason.MODEL]
    assert last(gate).checks


def test_an_optimiser_out_of_bounds_is_refused_whatever_the_message_said(tmp_path: Path) -> None:
    gate = gate_of(tmp_path)
    reply = app_of("convolutions", [batch_of(8)], gate, lr=2.0)(asked("convolutions"), context())
    assert "learning rate is out of bounds" in reason_of(reply)


def test_defended_uploads_leave_and_their_epsilon_composes_over_restarts(tmp_path: Path) -> None:
    policy = {"pictures": "defend", "defences": ["local_dp:epsilon=4"], "budget": 6.0}
    sent, verdicts = asked("torchvision"), []
    for _ in range(3):
        gate = gate_of(tmp_path, **policy)  # as after a restart
        reply = app_of("torchvision", [batch_of(1)], gate)(sent, context())
        verdicts.append(last(gate).verdict)
        if verdicts[-1] == "defended":
            before, after = (part["arrays"].to_torch_state_dict() for part in (sent.content, reply.content))
            noise = torch.cat([(after[name] - before[name]).flatten() for name in before])
            assert float(noise.std()) == pytest.approx(2 * gate.policy.multiplier, rel=0.05)
    assert verdicts == ["defended", "defended", "refused"]
    spent = compose_epsilon(gate.ledger.entries(), 1e-5)
    assert spent == pytest.approx(composed_epsilon(gate.policy.multiplier, 1e-5, 2), rel=1e-6)


def test_noise_where_the_equations_of_a_head_of_zeros_overflow_is_defended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh() -> nn.Module:  # as torchvision makes it
        model = of_torchvision()
        nn.init.zeros_(model.heads.head.weight)
        return model

    monkeypatch.setitem(MODELS, "fresh", fresh)
    defences = [{"name": "local_dp", "epsilon": 8, "clipping_norm": 1, "rounds": 10}]
    gate = gate_of(tmp_path, pictures="defend", defences=defences)
    assert not app_of("fresh", [batch_of(1)], gate)(asked("fresh"), context()).has_error()
    assert last(gate).verdict == "defended"


@pytest.mark.parametrize(("defend", "verdict"), [("where_needed", "passed"), ("always", "defended")])
def test_an_upload_that_the_gate_reads_nothing_of_leaves_undefended_unless_defended_always(
    defend: str, verdict: str, tmp_path: Path
) -> None:
    policy = {"pictures": "defend", "defences": ["local_dp"], "defend": defend}
    gate = gate_of(tmp_path, **policy)
    assert not app_of("convolutions", [batch_of(8)], gate)(asked("convolutions"), context()).has_error()
    assert last(gate).verdict == verdict


@pytest.mark.parametrize(("defence", "verdict"), [("local_dp", "defended"), ("clip:norm=100", "refused")])
def test_what_comes_back_counts_for_the_defended_upload_where_all_are(
    defence: str, verdict: str, tmp_path: Path
) -> None:
    gate = gate_of(tmp_path, defend="always", defences=[defence])  # pictures: refuse, by default
    app_of("torchvision", [batch_of(1)], gate)(asked("torchvision"), context())
    assert last(gate).verdict == verdict


def test_a_defence_that_does_not_help_is_a_refusal(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, pictures="defend", defences=["clip:norm=100"])
    reply = app_of("torchvision", [batch_of(1)], gate)(asked("torchvision"), context())
    assert reason_of(reply).endswith("the defended upload still gives pictures back")


def test_a_damaged_ledger_or_a_full_disk_lets_nothing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of(tmp_path, pictures="defend", defences=["local_dp"])
    (tmp_path / "gate.jsonl").write_text("no line of ours\n")
    app = app_of("torchvision", [batch_of(8)], gate)
    with pytest.raises(DefenceError, match="damaged in line 1"):
        gate.ledger.entries()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert reason_of(app(asked("torchvision"), context())).endswith("the ledger cannot be written")


def test_a_line_that_a_crash_cut_off_is_of_nothing_that_left(tmp_path: Path) -> None:
    ledger = GateLedger(tmp_path / "gate.jsonl")
    first = Entry(run=1, round="1", kind="train", verdict="passed")
    ledger.append(first)
    with ledger.path.open("a") as file:
        file.write('{"run":1,"rou')
    assert [entry.run for entry in ledger.entries()] == [1]
    ledger.append(first)
    assert [entry.model_copy(update={"time": ""}) for entry in ledger.entries()] == [first] * 2
    assert all(json.loads(line)["time"] for line in ledger.path.read_text().splitlines())


def test_the_readme_shows_the_default_policy(tmp_path: Path) -> None:
    page = (ROOT / "clients" / "gate" / "README.md").read_text()
    (tmp_path / "policy.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    shown, ledger = Policy.read(tmp_path / "policy.yaml")
    assert shown == Policy()
    assert ledger == tmp_path / "gate.jsonl"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fewest_picture: 4", "did you mean 'fewest_pictures'"),
        ("clear: {value: 3}", "did you mean 'clear.values'"),
        ("pictures: defend", "defend needs defences"),
        ("defend: always", "always needs defences"),
        ("defences: [mjp]", "does not work on updates"),
        ("bundles: [abc]", "bundles.0"),
        ("budget: 3", "needs local_dp"),
        ("- pictures", "a policy is a group of keys"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        UploadGate(path)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
