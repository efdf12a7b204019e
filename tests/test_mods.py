"""Defences as Flower mods, against Flower's own mods: their numbers where they are right, none of their defects."""

import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.clientapp.typing import Mod
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import fitins_to_recorddict, recorddict_to_fitres
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from fedmjp.clients.budget import Ledger
from fedmjp.clients.mods import REFUSED, defence_mod
from fedmjp.defences import DEFENCES
from fedmjp.errors import ConfigError, DefenceError, UnknownNameError
from fedmjp.randomness import SeededRandomness
from tests.conftest import ROOT

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

Tensors = Mapping[str, Tensor]
SENT = {"w": torch.full((3,), 10.0), "s": torch.tensor(2.0), "n": torch.tensor([4])}


class NoNoise(SeededRandomness):
    """A source of bits that stand for zero, so that what else is done can be seen."""

    def bits(self, name: str, shape: Any) -> Tensor:
        return torch.full(tuple(shape), -1)

    def of(self, *purpose: Any) -> "NoNoise":
        return self


def context() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def train_message(sent: Tensors, kind: str = "train") -> Message:
    content = RecordDict({"arrays": ArrayRecord(dict(sent)), "config": ConfigRecord({"clipping_norm": 1.0})})
    message = Message(content=content, message_type=kind, dst_node_id=1)
    message.metadata.__dict__["_message_id"] = "message"
    return message


def call(
    mod: Mod, sent: Tensors, reply: Tensors, train: Callable[[], None] = lambda: None, kind: str = "train"
) -> Message:
    def app(message: Message, _context: Context) -> Message:
        train()
        metrics = MetricRecord({"train_loss": 1.23, "num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(dict(reply)), "metrics": metrics}), reply_to=message)

    return mod(train_message(sent, kind), context(), app)


def arrays(reply: Message) -> dict[str, Tensor]:
    assert not reply.has_error(), reply.error.reason
    return dict(reply.content.array_records["arrays"].to_torch_state_dict())


def protected(mod: Mod, sent: Tensors, reply: Tensors, **fields: Any) -> dict[str, Tensor]:
    return arrays(call(mod, sent, reply, **fields))


def reason_of(reply: Message) -> str:
    assert reply.has_error()
    assert reply.error.code == REFUSED
    assert "\n" not in str(reply.error.reason)
    return str(reply.error.reason)


def weights(seed: int = 0, step: float = 0.1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sent = {"a": torch.randn(200, 5, generator=generator), "b": torch.randn(20, generator=generator)}
    reply = {name: tensor + step * torch.randn(tensor.shape, generator=generator) for name, tensor in sent.items()}
    return sent, reply


@pytest.mark.parametrize("step", [0.001, 0.1])
def test_clipping_equals_flowers_own(step: float) -> None:
    sent, reply = weights(step=step)
    ours, theirs = (protected(mod, sent, reply) for mod in (defence_mod("clip", norm=1.0), fixedclipping_mod))
    for name in sent:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [0.001, 0.1])
def test_local_dp_without_its_noise_equals_flowers_own(step: float) -> None:
    sent, reply = weights(step=step)
    ours = protected(defence_mod("local_dp", clipping_norm=0.5, randomness=NoNoise(0)), sent, reply)
    theirs = protected(cast(Mod, LocalDpMod(0.5, 0.0, 1.0, 1e-5)), sent, reply)
    for name in sent:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=0.5 * 2.0**-18)


def test_local_dp_noise_is_what_its_epsilon_needs() -> None:
    sent = {"a": torch.full((100_000,), 50.0)}
    noise = protected(defence_mod("local_dp", epsilon=2.0, clipping_norm=3.0), sent, sent)["a"] - 50.0
    accountant = PLDAccountant()
    accountant.compose(GaussianDpEvent(float(noise.std()) / (2 * 3.0)))
    assert accountant.get_epsilon(1e-5) == pytest.approx(2.0, rel=0.02)


# The table of defects of Flower's mods: ours has none of them.


def test_a_tensor_without_dimensions_is_clipped_and_gets_noise() -> None:
    sent, reply = (
        {"a": torch.full((3,), 1e5), "s": torch.tensor(1e5)},
        {"a": torch.full((3,), 1e5), "s": torch.tensor(1.05e5)},
    )
    clipped = protected(defence_mod("clip", norm=1.0), sent, reply)
    assert float(clipped["s"] - sent["s"]) == pytest.approx(1.0, abs=0.02)
    assert clipped["s"].shape == ()
    small = {"s": torch.tensor(1.0)}  # beside 1e5, one draw of noise in some hundreds is rounded away
    assert float(protected(defence_mod("local_dp"), small, small)["s"]) != 1.0


@pytest.mark.parametrize("counter", [torch.tensor([7]), torch.tensor(7), torch.tensor(2**40)])
@pytest.mark.parametrize("name", ["clip", "local_dp", "gaussian", "quantise", "sign", "round", "prune", "laplace"])
def test_whole_numbers_pass_or_do_not_move_and_do_not_count(name: str, counter: Tensor) -> None:
    sent, reply = ({"a": torch.full((3,), value), "n": n} for value, n in ((10.0, counter * 0), (10.1, counter)))
    mod, seeded = defence_mod(name, randomness=SeededRandomness(0)), defence_mod(name, randomness=SeededRandomness(0))
    made = protected(mod, sent, reply)
    assert torch.equal(made["n"], sent["n"] if name == "local_dp" else counter)
    assert torch.equal(made["a"], protected(seeded, {"a": sent["a"]}, {"a": reply["a"]})["a"])


@pytest.mark.parametrize(
    "name", [name for name in DEFENCES if "update" in DEFENCES.get(name).stages and name != "soteria"]
)
def test_an_update_of_zeros_is_protected_like_any_other(name: str) -> None:
    sent = {"conv": torch.ones(8, 3, 4, 4), "positions": torch.ones(1, 5, 8), "w": torch.ones(4, 8)}
    for tensor in protected(defence_mod(name), sent, sent).values():
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["weights", "gradient", None])
def test_one_nan_keeps_the_whole_update_from_leaving(broken: float, kind: Any) -> None:
    sent, reply = {"a": torch.full((3,), 10.0)}, {"a": torch.tensor([broken, 11.0, 12.0])}
    for name in ("local_dp", "clip"):
        assert "NaN or infinite" in reason_of(call(defence_mod(name, kind=kind), sent, reply))


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_a_gradient_is_not_taken_for_weights(scale: float) -> None:
    sent, _ = weights()
    gradient = {
        name: scale * torch.randn(t.shape, generator=torch.Generator().manual_seed(9)) for name, t in sent.items()
    }
    assert "kind=" in reason_of(call(defence_mod("clip"), sent, gradient))
    made = protected(defence_mod("clip", kind="gradient", norm=0.01), sent, gradient)
    assert math.hypot(*(float(tensor.norm()) for tensor in made.values())) == pytest.approx(0.01, rel=1e-3)
    assert torch.nn.functional.cosine_similarity(made["b"], gradient["b"], dim=0) > 0.999


def test_a_gradient_that_points_along_the_weights_is_not_taken_for_weights() -> None:
    reply = call(defence_mod("clip"), {"a": torch.full((3,), 10.0)}, {"a": torch.tensor([0.1, 0.2, 0.3])})
    assert "may be a gradient" in reason_of(reply)


def test_names_or_shapes_that_were_not_sent_are_refused_as_weights_and_taken_as_gradients() -> None:
    sent = {"a": torch.ones(3)}
    for reply in ({"b": torch.ones(3)}, {"a": torch.ones(4)}, {"a": torch.ones(3), "b": torch.ones(1)}):
        assert "names and shapes" in reason_of(call(defence_mod("clip", kind="weights"), sent, reply))
        assert "names and shapes" in reason_of(call(defence_mod("clip"), sent, reply))
        assert protected(defence_mod("clip", kind="gradient"), sent, reply).keys() == reply.keys()


def test_seeds_that_the_app_sets_do_not_determine_the_noise() -> None:
    sent = {"a": torch.full((1000,), 1e3)}

    def seeds() -> None:
        random.seed(42)
        np.random.seed(42)  # noqa: NPY002, TID251
        torch.manual_seed(42)  # noqa: TID251

    mods: list[Mod] = [defence_mod(name) for name in ("local_dp", "gaussian", "laplace", "quantise")]
    reply = {"a": sent["a"] + torch.linspace(-1, 1, 1000)}
    with torch.random.fork_rng():
        for mod in mods:
            first, second = (protected(mod, sent, reply, train=seeds)["a"] for _ in range(2))
            assert not torch.equal(first, second)
        # The same check finds Flower's defect.
        theirs = cast(Mod, LocalDpMod(1.0, 1.0, 1.0, 1e-5))
        first, second = (protected(theirs, sent, reply, train=seeds)["a"] for _ in range(2))
        assert torch.equal(first, second)


def test_the_sensitivity_cannot_be_stated_apart_from_the_clipping_norm() -> None:
    with pytest.raises(ConfigError, match="unknown key 'sensitivity'"):
        defence_mod("local_dp", clipping_norm=10.0, sensitivity=1.0)
    sent = {"a": torch.full((100_000,), 1e3)}
    small, large = (
        float((protected(defence_mod("local_dp", clipping_norm=norm), sent, sent)["a"] - 1e3).std())
        for norm in (1.0, 10.0)
    )
    assert large == pytest.approx(10 * small, rel=0.05)


def test_metrics_leave_in_clear_as_the_documentation_says() -> None:
    import fedmjp.clients.mods

    reply = call(defence_mod("clip"), SENT, SENT)
    assert dict(reply.content.metric_records["metrics"]) == {"train_loss": 1.23, "num-examples": 1}
    assert "leave in clear" in str(fedmjp.clients.mods.__doc__)


def test_only_replies_to_train_messages_are_changed() -> None:
    mod = defence_mod("sign", kind="weights")
    reply = {"w": torch.tensor([1.0, 20.0, 5.0]), "s": torch.tensor(0.0), "n": torch.tensor([4])}
    for kind in ("evaluate", "query"):
        assert torch.equal(protected(mod, SENT, reply, kind=kind)["w"], reply["w"])
    for kind in ("train", "train.local"):
        assert not torch.equal(protected(mod, SENT, reply, kind=kind)["w"], reply["w"])


def test_withheld_weights_return_as_sent_and_withheld_gradients_are_zero() -> None:
    torch_order = ["0", "1", "2", "3", "4", "5"]
    shapes = [(1, 1, 8), (1, 5, 8), (8, 3, 4, 4), (8,), (4, 8), (4,)]
    sent = {name: torch.full(shape, 2.0) for name, shape in zip(torch_order, shapes, strict=True)}
    reply = {name: tensor + 0.1 for name, tensor in sent.items()}
    made = protected(defence_mod("withhold"), sent, reply)
    assert {name for name in sent if torch.equal(made[name], sent[name])} == {"1", "2", "3"}
    torch.testing.assert_close(made["4"], reply["4"])
    made = protected(defence_mod("withhold", roles="head", kind="gradient"), sent, reply)
    assert {name for name in sent if not made[name].any()} == {"4", "5"}
    assert torch.equal(made["0"], reply["0"])


def test_an_app_that_changes_the_message_does_not_change_what_the_reply_is_compared_with() -> None:
    def app(message: Message, _context: Context) -> Message:
        message.content["arrays"] = ArrayRecord({"a": torch.full((3,), 10.5)})
        return Message(message.content, reply_to=message)

    reply = defence_mod("clip", norm=0.1)(train_message({"a": torch.full((3,), 10.0)}), context(), app)
    assert float((arrays(reply)["a"] - 10.0).norm()) == pytest.approx(0.1, rel=1e-3)


def test_half_precision_keeps_its_type() -> None:
    sent = {"a": torch.full((70_000,), 0.5).half(), "d": torch.ones(5).double()}
    reply = {"a": torch.full((70_000,), 0.6).half(), "d": torch.ones(5).double() * 1.01}
    made = protected(defence_mod("clip", norm=1.0), sent, reply)
    assert made["a"].dtype == torch.float16
    assert made["d"].dtype == torch.float64


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        ({"n": torch.tensor([3])}, "no tensors of real numbers"),
        ({"z": torch.zeros(2, dtype=torch.complex64)}, "complex"),
    ],
)
def test_what_no_defence_protects_does_not_leave(reply: Tensors, named: str) -> None:
    assert named in reason_of(call(defence_mod("clip", kind="gradient"), SENT, reply))


def test_replies_with_several_array_records_or_none_do_not_leave() -> None:
    for records in ({}, {"a": ArrayRecord({"w": torch.ones(3)}), "b": ArrayRecord({"w": torch.ones(3)})}):

        def app(message: Message, _context: Context, content: Any = records) -> Message:
            return Message(RecordDict(content), reply_to=message)

        assert "array records" in reason_of(defence_mod("clip")(train_message(SENT), context(), app))


def test_an_error_of_the_defence_quotes_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> dict[str, Tensor]:
        raise ValueError("the pixel is 0.123\nand the next 0.456")

    monkeypatch.setattr(DEFENCES.get("clip"), "protect", breaks)
    assert reason_of(call(defence_mod("clip"), SENT, SENT)) == "clip: ValueError; the update does not leave"


def test_an_error_of_the_app_passes_as_it_is() -> None:
    def app(message: Message, _context: Context) -> Message:
        return Message(Error(code=7, reason="no data today"), reply_to=message)

    reply = defence_mod("clip")(train_message(SENT), context(), app)
    assert (reply.error.code, reply.error.reason) == (7, "no data today")


@pytest.mark.parametrize("name", ["mjp", "jigsaw", "dp_sgd", "secure_sum", "soteria"])
def test_what_no_mod_sees_is_refused_when_the_mod_is_made(name: str) -> None:
    with pytest.raises(ConfigError, match=f"which no mod sees; use it with `fedmjp simulate --defence {name}`"):
        defence_mod(name)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("local-dp", {}, UnknownNameError),
        ("local_dp", {"epsilon": 0}, ConfigError),
        ("clip", {"norm": 0}, ConfigError),
        ("clip", {"kind": "delta"}, ConfigError),
        ("clip", {"ledger": "ledger.json"}, ConfigError),
        ("local_dp", {"budget": 3.0}, ConfigError),
        ("local_dp", {"budget": -1.0, "ledger": "ledger.json"}, ConfigError),
        ("local_dp", {"ledger": "missing/ledger.json"}, ConfigError),
    ],
)
def test_bad_input_is_one_clear_line(name: str, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        defence_mod(name, **options)
    assert "\n" not in str(raised.value)


def test_mods_compose_in_a_flower_app_from_the_last_to_the_first() -> None:
    def seeded(name: str, **options: Any) -> Mod:
        return defence_mod(name, randomness=SeededRandomness(0), **options)

    app = ClientApp(mods=[seeded("sign", kind="weights"), seeded("clip", norm=0.3)])

    @app.train()
    def train(message: Message, _context: Context) -> Message:
        changed = {name: t + torch.linspace(-1, 2, 4) for name, t in arrays(message).items()}
        return Message(RecordDict({"arrays": ArrayRecord(changed)}), reply_to=message)

    left = arrays(app(train_message({"a": torch.full((4,), 10.0)}), context()))["a"] - 10.0
    update = torch.linspace(-1, 2, 4)
    scale = update.abs().mean() * 0.3 / update.norm()
    torch.testing.assert_close(left, update.sign() * scale, rtol=1e-3, atol=1e-5)


def test_apps_of_numpy_clients_take_mods_too() -> None:
    class Trains(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [each + 1 for each in parameters], 5, {"loss": 0.5}

    app = ClientApp(client_fn=lambda _context: Trains().to_client(), mods=[defence_mod("clip", norm=0.5)])
    sent = [np.full((3, 2), 10.0, np.float32), np.array(20.0, np.float32)]
    content = fitins_to_recorddict(FitIns(ndarrays_to_parameters(sent), {}), keep_input=True)
    message = train_message(SENT)
    message.content = content
    reply = app(message, context())
    assert not reply.has_error()
    result = recorddict_to_fitres(reply.content, keep_input=True)
    left = [after - before for after, before in zip(parameters_to_ndarrays(result.parameters), sent, strict=True)]
    assert [each.shape for each in left] == [(3, 2), ()]
    np.testing.assert_allclose(math.hypot(*(float(np.linalg.norm(each)) for each in left)), 0.5, rtol=1e-4)
    assert result.num_examples == 5


SIMULATION = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from fedmjp.clients.mods import defence_mod

client, server = ClientApp(mods=[defence_mod("clip", norm=0.5)]), ServerApp()


@client.train()
def train(message, context):
    added = float("nan") if context.node_config["partition-id"] == 0 else 1.0
    moved = {name: t + added for name, t in message.content["arrays"].to_torch_state_dict().items()}
    content = RecordDict({"arrays": ArrayRecord(moved), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord({"a": torch.full((4,), 10.0)}), num_rounds=1)
    print("RESULT", result.arrays.to_torch_state_dict()["a"].tolist())


if __name__ == "__main__":
    resources = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1, "num_gpus": 0}}
    run_simulation(server, client, 2, backend_config=resources)
"""


@pytest.mark.slow
def test_a_simulation_goes_on_without_the_client_whose_update_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "simulation.py"
    script.write_text(SIMULATION)
    variables = {"FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    command, env = [sys.executable, str(script)], os.environ | variables
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert "RESULT [10.25, 10.25, 10.25, 10.25]" in done.stdout, done.stdout + done.stderr
    assert "clip: tensor 'a' holds NaN or infinite values" in done.stdout + done.stderr


# What uploads cost, in a file.


def test_a_ledger_survives_restarts_and_composes_as_privacy_loss_distributions_say(tmp_path: Path) -> None:
    path, sent = tmp_path / "ledger.json", {"a": torch.full((10,), 1e3)}
    for epsilon, uploads in ((1.0, 3), (4.0, 2)):
        for _ in range(uploads):  # a mod made anew is a client started anew
            protected(defence_mod("local_dp", epsilon=epsilon, ledger=path), sent, sent)
    ones, fours = (DEFENCES.get("local_dp")({"epsilon": epsilon}).multiplier for epsilon in (1.0, 4.0))
    accountant = PLDAccountant()
    events = [SelfComposedDpEvent(GaussianDpEvent(ones), 3), SelfComposedDpEvent(GaussianDpEvent(fours), 2)]
    accountant.compose(ComposedDpEvent(events))
    assert Ledger(path, delta=1e-5).epsilon() == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def test_a_budget_refuses_the_upload_that_would_exceed_it_and_stays_refused(tmp_path: Path) -> None:
    path, sent = tmp_path / "ledger.json", {"a": torch.full((10,), 1e3)}
    mod = defence_mod("local_dp", epsilon=1.0, ledger=path, budget=2.5)
    alone = DEFENCES.get("local_dp")({"epsilon": 1.0})
    allowed = max(n for n in range(20) if alone.spent(n).epsilon <= 2.5)
    assert allowed > 2
    for _ in range(allowed):
        protected(mod, sent, sent)
    before = path.read_bytes()
    for _ in range(2):
        assert "privacy budget" in reason_of(call(mod, sent, sent))
    assert path.read_bytes() == before
    reason_of(call(defence_mod("local_dp", epsilon=1.0, ledger=path, budget=2.5), sent, sent))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"uploads": [{"multiplier": 1.0, "count": 0}]}',
        b'{"uploads": [{"multiplier": 1.0, "count": -3}]}',
        b'{"uploads": [{"multiplier": 1.0, "count": "3"}]}',
        b'{"uploads": [{"multiplier": Infinity, "count": 3}]}',
        b'{"uploads": [{"multiplier": 1.0, "count": 3}, {"multiplier": 1.0, "count": 1}]}',
        b'{"uploads": [], "more": 1}',
    ],
)
def test_a_damaged_ledger_keeps_every_update_from_leaving(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ledger.json"
    path.write_bytes(content)
    sent = {"a": torch.full((10,), 1e3)}
    assert "damaged" in reason_of(call(defence_mod("local_dp", ledger=path), sent, sent))
    assert path.read_bytes() == content
    with pytest.raises(DefenceError, match="damaged"):
        Ledger(path, delta=1e-5).epsilon()


def test_a_ledger_that_cannot_be_written_keeps_the_update_from_leaving(tmp_path: Path) -> None:
    folder = tmp_path / "ledger.json"
    folder.mkdir()
    sent = {"a": torch.full((10,), 1e3)}
    assert "cannot be used" in reason_of(call(defence_mod("local_dp", ledger=folder), sent, sent))


def test_a_refused_update_is_not_charged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    mod = defence_mod("local_dp", kind="weights", ledger=path)
    reason_of(call(mod, {"a": torch.ones(2)}, {"a": torch.tensor([1.0, math.nan])}))
    assert not path.exists()


def _charge(path: str, times: int) -> None:
    ledger = Ledger(path, delta=1e-5)
    for _ in range(times):
        ledger.charge(5.0)


def test_processes_that_share_a_ledger_lose_no_upload(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    processes = [multiprocessing.get_context("fork").Process(target=_charge, args=(str(path), 25)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert json.loads(path.read_text()) == {"uploads": [{"multiplier": 5.0, "count": 100}]}
    assert {each.name for each in tmp_path.iterdir()} == {"ledger.json", "ledger.json.lock"}
