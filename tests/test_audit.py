import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian, get_sigma_gaussian
from flwr.clientapp import client_app
from flwr.clientapp.mod import message_size_mod
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedmjp.attacks import ATTACKS
from fedmjp.benchmarks.audit import attacking, running, verbatim
from fedmjp.benchmarks.audit.app import CODE, WatchedCopy, copy_with_probe, read_app
from fedmjp.benchmarks.audit.attacking import Attempt, attempt_all
from fedmjp.benchmarks.audit.cheating import play_servers
from fedmjp.benchmarks.audit.control import make_control
from fedmjp.benchmarks.audit.evaluating import Private, read_private, scored
from fedmjp.benchmarks.audit.network import Network, by_name, draw_unsent, take_in
from fedmjp.benchmarks.audit.probe import mods
from fedmjp.benchmarks.audit.protections import read_mods, verify
from fedmjp.benchmarks.audit.recipe import unreadable
from fedmjp.benchmarks.audit.running import Records, RunOptions, count_in_error, play, said_of
from fedmjp.benchmarks.audit.sums import UNEVEN, spread_of_masks
from fedmjp.benchmarks.audit.wire import Answer
from fedmjp.clients.mods import defence_mod
from fedmjp.errors import AppError, BadInputError
from fedmjp.facade import bundled_pictures
from fedmjp.models.carrying import carry
from fedmjp.seeds import scoped_randomness
from fedmjp.threat import ThreatModel
from tests.apps import vit_app

MEAN, STD = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]
SIDE = 32


def small_vit() -> nn.Module:
    with scoped_randomness(0):
        return VisionTransformer(img_size=SIDE, patch_size=8, embed_dim=48, depth=2, num_heads=2, num_classes=6)


def torchvision_vit() -> nn.Module:
    with scoped_randomness(0):
        made = torchvision.models.VisionTransformer(SIDE, 8, 2, 2, 48, 96, num_classes=6)
        nn.init.normal_(made.heads.head.weight)
    return made


@pytest.mark.parametrize("make", [small_vit, torchvision_vit])
def test_a_carried_network_has_the_gradient_of_the_one_that_it_was_carried_from(make: Any) -> None:
    module = make()
    carried = carry(module, mean=MEAN, std=STD)
    picture, label = torch.rand(2, 3, SIDE, SIDE), torch.tensor([1, 3])
    F.cross_entropy(module((picture - 0.5) / 0.25), label).backward()
    F.cross_entropy(carried.classifier(picture), label).backward()
    theirs = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    mapped = carried.tensors(theirs)
    for name, parameter in carried.classifier.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(mapped[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_what_computes_something_else_is_not_carried() -> None:
    with pytest.raises(BadInputError, match="found no patch embedding"):
        carry(torchvision.models.resnet18(), mean=MEAN, std=STD)
    strange = small_vit()
    strange.norm = nn.Sequential(nn.LayerNorm(48), nn.Tanh())  # the same tensors, another function
    with pytest.raises(BadInputError, match="something else"):
        carry(strange, mean=MEAN, std=STD)


@pytest.fixture
def examples() -> Private:
    pictures = torch.stack([picture.image for picture in bundled_pictures(4, size=SIDE)])
    return Private(((pictures - 0.45) / 0.22,), pictures, torch.arange(4))


def png(picture: Tensor) -> bytes:
    content = io.BytesIO()
    Image.fromarray((picture.permute(1, 2, 0) * 255).byte().numpy()).save(content, "png")
    return content.getvalue()


def in_bytes(content: bytes) -> dict[str, str]:
    return {"bytes": base64.b64encode(content).decode()}


def test_a_private_picture_is_found_however_it_is_sent(examples: Private) -> None:
    assert examples.pictures is not None
    picture = examples.pictures[2]
    pixels = (picture * 255).byte()
    small = F.interpolate(picture[None], size=16, mode="area")[0]
    sent = {
        "floats": picture.mean(0).flatten().tolist(),
        "part": picture.flatten()[500:700].tolist(),
        "thumbnail": small.flatten().tolist(),
        "file": in_bytes(png(picture)),
        "raw": in_bytes(pixels.permute(1, 2, 0).contiguous().numpy().tobytes()),
        "text": base64.b64encode(pixels.numpy().tobytes()).decode(),
        "tensor": (3 * picture - 1).flatten(),
    }
    assert {name for name, _ in verbatim.find_private(sent, [examples])} == set(sent)
    spread = {f"pixel-{place}": value for place, value in enumerate(picture.flatten()[:256].tolist())}
    assert [name for name, _ in verbatim.find_private(spread, [examples])] == ["all numbers of the record together"]


def test_ordinary_metrics_are_not_taken_for_pictures(examples: Private) -> None:
    generator = np.random.default_rng(0)
    ordinary = {
        "losses": [2.3 * 0.97**epoch for epoch in range(200)],
        "noise": generator.normal(size=3 * SIDE * SIDE).tolist(),
        "masked": in_bytes(generator.integers(0, 256, 4096).astype(np.uint8).tobytes()),
        "accuracy": 0.5,
        "name": "resnet",
    }
    assert list(verbatim.find_private(ordinary, [examples])) == []


def uploaded(module: nn.Module, private: Private) -> dict[str, Tensor]:
    assert private.pictures is not None
    module.zero_grad()
    F.cross_entropy(module((private.pictures - 0.5) / 0.25), private.labels).backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None}


def outcome(network: Network, private: Private, update: dict[str, Tensor], threat: ThreatModel) -> dict[str, Any]:
    attempts = attempt_all(network, update, threat)
    return {one.attack: scored(one, private, network) for one in attempts if one.ran}


def test_one_picture_comes_back_and_a_batch_does_not(examples: Private) -> None:
    network = take_in(small_vit(), {}, mean=MEAN, std=STD, side=SIDE)
    assert network.whole
    assert examples.pictures is not None
    assert examples.labels is not None
    one = Private((examples.entered[0][:1],), examples.pictures[:1], examples.labels[:1])
    alone = outcome(network, one, uploaded(network.module, one), ThreatModel())
    assert alone["patch_embedding"]["psnr_worst_case"] > 60
    assert alone["labels"]["labels_right"] == 1
    batch = outcome(network, examples, uploaded(network.module, examples), ThreatModel(batch_size=4))
    assert batch["patch_embedding"]["above_floor"] == 0
    assert batch["grey"]["above_floor"] == 0


def test_an_attack_that_takes_too_long_is_stopped_and_told(examples: Private, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacking, "MOST_SECONDS", 0.01)
    monkeypatch.setattr(
        ATTACKS.get("class_token"), "reconstruct_stack", lambda *_, **__: [sum(n % 3 for n in range(10**9))]
    )
    network = take_in(small_vit(), {}, mean=MEAN, std=STD, side=SIDE)
    attempts = attempt_all(network, uploaded(network.module, examples), ThreatModel(batch_size=4))
    late = [one.attack for one in attempts if one.reason == attacking.LATE]
    assert "class_token" in late
    assert not any(one.ran for one in attempts if one.attack in late)


def test_labels_of_a_network_that_is_no_transformer_are_read(examples: Private) -> None:
    with scoped_randomness(0):
        module = nn.Sequential(nn.Conv2d(3, 4, 5, stride=3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 6))
    network = take_in(module, {}, mean=MEAN, std=STD, side=SIDE)
    assert not network.whole
    made = outcome(network, examples, uploaded(module, examples), ThreatModel(batch_size=4))
    assert made["labels"]["labels_right"] == 1
    refused = {one.attack: one for one in attempt_all(network, uploaded(module, examples), ThreatModel(batch_size=4))}
    assert "found no patch embedding" in refused["gradient_matching"].reason
    assert not any(one.ran and one.role == "attack" and one.reveals == "pictures" for one in refused.values())


def test_the_control_of_an_apps_network_gives_its_picture_back(examples: Private) -> None:
    network = take_in(torchvision_vit(), {}, mean=MEAN, std=STD, side=SIDE)
    control = make_control(network, examples)
    made = outcome(network, control.private, dict(control.update), control.threat)
    assert made["patch_embedding"]["psnr_worst_case"] > 60


def recipe_of(optimiser: str, steps: int, **rule: float) -> dict[str, Any]:
    """Write down the recipe of a client whose optimiser has one parameter group."""
    settings = {"lr": 0.05, "momentum": 0.0, "weight_decay": 0.0, "eps": 1e-8, **rule}
    group = {"optimiser": optimiser, "is_known": True, "is_new": True, "names": [], "steps": [[steps, settings]]}
    return {
        "optimiser": optimiser, "steps": steps, "learning_rate": settings["lr"], "momentum": settings["momentum"],
        "weight_decay": settings["weight_decay"], "epsilon": settings["eps"], "groups": [group],
    }  # fmt: skip


def test_steps_of_adam_leave_nothing_to_solve_but_a_single_one() -> None:
    assert "AdamW" in str(unreadable(recipe_of("AdamW", 3), "weights"))
    assert unreadable(recipe_of("AdamW", 3), "gradient") is None
    assert unreadable(recipe_of("SGD", 3), "weights") is None
    assert unreadable(recipe_of("AdamW", 1), "weights") is None
    assert unreadable(recipe_of("Adam", 1), "weights") is None
    assert unreadable(recipe_of("AdamW", 1, eps=1e-6), "weights") is not None


def test_servers_that_cheat_are_played_on_the_apps_network() -> None:
    network = take_in(torchvision_vit(), {}, mean=MEAN, std=STD, side=SIDE)
    played = {row["server"]: row for row in play_servers(network, recipe_of("SGD", 1), "gradient")}
    assert played["class_fishing"]["leaks"]
    assert played["suppression"]["psnr"] > 60
    refused = play_servers(network, recipe_of("Adam", 3), "weights")
    assert not any(row["played"] for row in refused)
    stepped = recipe_of("AdamW", 1, lr=1e-3, weight_decay=0.01)
    read = {row["server"]: row for row in play_servers(network, stepped, "weights")}
    assert read["class_fishing"]["leaks"]
    assert not read["suppression"]["played"]


def test_a_cheating_server_meets_the_apps_mods_or_says_that_it_did_not() -> None:
    network = take_in(torchvision_vit(), {}, mean=MEAN, std=STD, side=SIDE)
    private = {"mod": "local_dp", "defences": [{"name": "local_dp", "epsilon": 8.0, "clipping_norm": 1.0}]}
    defended = {row["server"]: row for row in play_servers(network, recipe_of("SGD", 1), "gradient", [private])}
    assert defended["class_fishing"]["is_stopped"]
    assert defended["class_fishing"]["psnr_undefended"] > 60
    clipped = {"mod": "clip", "defences": [{"name": "clip", "norm": 0.01}]}
    assert play_servers(network, recipe_of("SGD", 1), "gradient", [clipped])[0]["leaks"]
    unknown = play_servers(network, recipe_of("SGD", 3), "weights", [{"mod": "their_mod", "defences": []}])
    assert all(
        "none of their_mod" in row["unlike"] and "clients of this app take 3" in row["unlike"] for row in unknown
    )


def test_noise_and_clipping_between_training_and_the_wire_are_measured(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for folder in (records.server, records.evaluator):
        folder.mkdir()
    generator = np.random.default_rng(0)
    sent, step = generator.normal(size=5000), 0.01 * generator.normal(size=5000)
    np.savez(records.server / "sent.npz", **{"arrays/w": sent})
    np.savez(records.evaluator / "m-trained.npz", w=sent + step)
    answer = Answer("m", 1, 0, records.server / "sent.npz", records.server / "left.npz")
    told = {}
    for name, left in {
        "as-trained": sent + step,
        "clipped": sent + 0.25 * step,
        "noisy": sent + 0.5 * step + 0.02 * generator.normal(size=5000),
    }.items():
        np.savez(records.server / f"{name}.npz", **{"arrays/w": left})
        told[name] = verify(records, {}, [replace(answer, file=records.server / f"{name}.npz")])[0]
    assert told["as-trained"].verified is None
    assert "to the last digits" in told["as-trained"].said
    assert told["clipped"].verified == told["noisy"].verified == "yes"
    assert "scaled by 0.25" in told["clipped"].said
    assert "standard deviation 0.02" in told["noisy"].said


def test_local_dp_is_read_from_the_app_and_held_against_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, generator = Records(tmp_path), np.random.default_rng(0)
    records.server.mkdir()
    monkeypatch.setattr(client_app, "make_ffn", client_app.make_ffn)
    monkeypatch.setattr(mods, "_folders", [])
    mods.watch_mods(records.evaluator)
    app = client_app.ClientApp(mods=[defence_mod("local_dp", clipping_norm=1.0, epsilon=8.0)])
    app.train(mods=[message_size_mod])(lambda message, _: message)
    assert [mod["mod"] for mod in read_mods(records)] == ["local_dp", "message_size_mod"]
    sent, step = generator.normal(size=5000), generator.normal(size=5000)
    deviation = 2 * get_sigma_gaussian(8.0, 1e-5)
    np.savez(records.server / "sent.npz", **{"arrays/w": sent})
    np.savez(records.evaluator / "m-trained.npz", w=sent + step)
    said = {}
    for name, factor in {"stated": 1.0, "half": 0.5}.items():
        noise = factor * deviation * generator.normal(size=5000)
        np.savez(records.server / f"{name}.npz", **{"arrays/w": sent + step / np.linalg.norm(step) + noise})
        answer = Answer("m", 1, 0, records.server / "sent.npz", records.server / f"{name}.npz")
        said[name] = verify(records, {}, [answer])
    assert [row.verified for row in said["stated"][:2]] == ["yes", "yes"]
    assert said["stated"][0].drowns
    assert "8 after 1" in said["stated"][0].said
    assert "no epsilon" not in said["stated"][1].said
    assert said["half"][0].verified == "no"


def test_arrays_without_names_are_named_by_their_order() -> None:
    named = by_name(nn.Linear(3, 2).state_dict(), {"0": torch.ones(2, 3), "1": torch.zeros(2)})
    assert set(named) == {"weight", "bias"}


def test_a_part_without_names_is_named_by_its_only_place_and_what_is_never_sent_is_drawn_anew() -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 6))
    network = nn.Sequential(body, nn.Linear(6, 2))
    for values in (body.state_dict(), dict(body.named_parameters())):
        floating = [value for value in values.values() if value.is_floating_point()]
        named = by_name(network.state_dict(), {str(place): value for place, value in enumerate(floating)})
        assert all(named[f"0.{name}"] is value for name, value in values.items() if value.is_floating_point())
    head = network[1].weight.detach().clone()
    assert draw_unsent(network, named.keys(), ["0.0.weight", "1.weight", "1.bias"]) == ["1.weight", "1.bias"]
    assert not torch.equal(network[1].weight, head)
    assert float(network[1].weight.detach().abs().max()) < 6**-0.5
    twice = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert set(by_name(twice.state_dict(), {"0": torch.ones(3, 3), "1": torch.ones(3)})) == {"0", "1"}
    assert draw_unsent(twice, {"0"}, ["0.weight"]) == []  # nobody knows which tensor was sent


@pytest.mark.parametrize(
    ("text", "number", "count"),
    [
        ("The number of feature splits must equal the number of nodes (got 3 vs. 2).", 2, 3),
        ("expected 5 clients but 2 connected", 2, 5),
        ("expected 5 clients but 2 connected in round 1", 2, None),
        ("mat1 and mat2 shapes cannot be multiplied (2x5 and 3x5)", 2, None),
        ("a client sent 3 rows", 2, None),
        ("2 clients reached 0.5 of the sum", 2, None),
        ("4000 clients are wanted, 2 are there", 2, None),
    ],
)
def test_the_number_of_clients_is_read_from_an_error_that_names_both(text: str, number: int, count: int | None) -> None:
    assert count_in_error(text, number) == count


class FailingSuperLink:
    """A SuperLink whose run fails but with as many clients as its README says."""

    def __init__(self, home: Path, records: Records) -> None:
        self.home, self.records, self.played = home, records, list[int]()

    def submit(self, copy: Path, _config: object, federation: str) -> str:
        settings = next(copy.glob("*/*.json"))
        self.played.append(int(json.loads(settings.read_text())["clients"]))
        return "1"

    def log(self, _run: str) -> Iterator[str]:
        chain = [{"type": "KeyError", "text": "'part'", "module": ""}]
        problem = {"where": "client", "chain": chain, "traceback": "", "time": 1.0}
        if self.played[-1] == 2:
            (self.records.evaluator / "problems.jsonl").write_text(json.dumps(problem))
        else:
            line = {"way": "up", "type": "query", "reply_to": "b", "records": {"a": {}}}
            (self.records.server / "wire.jsonl").write_text(json.dumps(line))
        yield ""

    def status(self, _run: str) -> str:
        return "finished:completed"


def test_an_app_that_fails_runs_once_more_with_the_clients_of_its_readme(tmp_path: Path) -> None:
    folder = vit_app(tmp_path / "app", batch=1)
    (folder / "README.md").write_text("[superlink.local]\noptions.num-supernodes = 3\n")
    records = Records(tmp_path / "audit")
    superlink: Any = FailingSuperLink(tmp_path, records)
    settings = {"rounds": 1, "stand_in": False, "pictures": ""}
    run = play(superlink, read_app(folder), records, settings, RunOptions(limit=5))
    assert (superlink.played, run.problem) == ([2, 3], None)
    assert play(superlink, read_app(folder), records, settings, RunOptions(limit=5, clients=2)).problem is not None
    assert superlink.played == [2, 3, 2]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"type": "ModuleNotFoundError", "text": "No module named 'wandb'"}, "does not install here"),
        ({"type": "OfflineModeIsEnabled", "text": "Cannot reach the hub"}, "needs the network"),
        ({"type": "AssertionError", "text": "Torch not compiled with CUDA enabled"}, "needs a GPU"),
        ({"type": "KeyError", "text": "'lr'"}, "the app fails (server: KeyError: 'lr')"),
        ({"type": "KeyError", "text": "'path'", "line": "x = c.node_config['path']"}, "by --node-config path=VALUE"),
    ],
)
def test_a_failure_is_one_line_that_says_of_which_kind_it_is(error: dict[str, str], said: str) -> None:
    line = said_of("server", [error])
    assert said in line
    assert "\n" not in line


class HangingSuperLink:
    """A SuperLink whose run says nothing and never ends."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def submit(self, *_: object) -> str:
        return "1"

    def log(self, _run: str) -> Iterator[str]:
        threading.Event().wait(20)
        yield ""


def test_an_app_that_hangs_is_told_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "POLL_SECONDS", 0.05)
    app = read_app(vit_app(tmp_path / "app", batch=1))
    superlink: Any = HangingSuperLink(tmp_path)
    settings = {"rounds": 1, "stand_in": False, "pictures": ""}
    run = play(superlink, app, Records(tmp_path / "audit"), settings, RunOptions(limit=0.2))
    assert run.problem is not None
    assert run.problem.startswith("the app hangs")


@pytest.mark.parametrize(
    ("answer", "ended", "said"),
    [
        ({"records": {}}, None, "the app sends nothing: answers to training hold no records"),
        ({"error": 2, "reason": "first\nlast"}, None, "the app sends nothing: clients answer with errors, last"),
        (None, None, "the app sends nothing: its server's process ended before anything was sent"),
        ({"records": {"a": {}}}, None, None),
        ({"records": {"a": {}}}, "the app hangs: it was stopped", "waiting for clients to answer train of round 2"),
    ],
)
def test_why_a_run_is_not_complete_is_one_line(
    tmp_path: Path, answer: dict[str, Any] | None, ended: str | None, said: str | None
) -> None:
    records = Records(tmp_path)
    records.server.mkdir()
    if answer is not None:
        asked = [{"way": "down", "type": "train", "id": f"{number}", "round": number} for number in (1, 2)]
        lines = [asked[0], {"way": "up", "type": "train", "reply_to": "1", "id": "a", "round": 1, **answer}, asked[1]]
        (records.server / "wire.jsonl").write_text("\n".join(map(json.dumps, lines)))
    problem = running._why_not(records, ended)
    assert problem is None if said is None else said in str(problem)


def test_the_bundle_is_the_probe_alone_and_the_app_stays_as_it_is(tmp_path: Path) -> None:
    folder = vit_app(tmp_path / "app", batch=1)
    before = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}
    copied = copy_with_probe(read_app(folder), tmp_path / "app-run", {"folder": "s"}, {"folder": "secret-place"})
    bundle, names = copied.bundle, copied.names
    assert {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in before} == before
    assert {path.name for path in bundle.iterdir()} == {"pyproject.toml", names.package}
    code = tmp_path / "app-run" / CODE
    assert (code / "small" / "parts.py").read_bytes() == (folder / "small" / "parts.py").read_bytes()
    server = names.component("server", "app")
    assert f'serverapp = "{server}"' in (bundle / "pyproject.toml").read_text()
    half = bundle / names.package / names["server.json"]
    assert "secret-place" not in half.read_text()  # it is not told where pictures go
    again = copy_with_probe(read_app(folder), tmp_path / "another", {}, {})
    assert not {path.name for path in bundle.rglob("*")} & {
        path.name for path in again.bundle.rglob("*") if path.name not in ("pyproject.toml", "__init__.py")
    }


def test_a_folder_that_is_no_app_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AppError, match=r"no pyproject\.toml"):
        read_app(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'a'\n")
    with pytest.raises(AppError, match="names no serverapp and no clientapp"):
        read_app(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project\n")
    with pytest.raises(AppError, match="cannot be read"):
        read_app(tmp_path)


def test_attempts_without_a_result_are_not_scored(examples: Private) -> None:
    network = take_in(small_vit(), {}, mean=MEAN, std=STD, side=SIDE)
    assert scored(Attempt("labels", "labels", "attack", applies=False, reason=""), examples, network) == {}


def masked_round(root: Path, *, weights: list[float], noise: float, in_clear: bool) -> Records:
    """Records of a round of secure aggregation of three clients: masked answers, and the next weights."""
    records, generator = Records(root), np.random.default_rng(0)
    for folder in (records.server, records.evaluator):
        folder.mkdir(parents=True)
    start = generator.normal(size=(100, 60)).astype(np.float32)
    steps = [0.01 * generator.normal(size=start.shape) for _ in weights]
    lines: list[dict[str, Any]] = []
    described = {"fitins.parameters": {"kind": "arrays", "entries": {"0": ["float32", [100, 60], start.nbytes]}}}
    for server_round in (1, 2):
        change = sum(weight * step for weight, step in zip(weights, steps, strict=True))
        sent = start if server_round == 1 else start + change + noise * generator.normal(size=start.shape)
        np.savez(records.server / f"{server_round}.npz", **{"fitins.parameters/0": sent})
        about = {"type": "train", "round": server_round, "records": described, "file": f"{server_round}.npz"}
        lines += [{"way": "down", "id": f"{server_round}-{node}", "node": node, **about} for node in range(len(steps))]
    for node, step in enumerate(steps):
        np.savez(records.evaluator / f"1-{node}-trained.npz", layer=start + step)
        mask = 0 if in_clear else generator.integers(0, 2**32, size=start.shape)
        content = io.BytesIO()
        np.save(content, (((start + step + 8) * 2**18).astype(np.int64) + mask) % 2**32)
        values = {"masked_params": [in_bytes(content.getvalue())]}
        answer = {"way": "up", "type": "train", "round": 1, "id": "a", "reply_to": f"1-{node}", "node": node}
        lines.append({**answer, "records": {"configs": {"kind": "config", "values": values}}})
    (records.server / "wire.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return records


@pytest.mark.parametrize(
    ("weights", "noise", "in_clear", "verified", "said"),
    [
        ([0.5, 0.25, 0.25], 0.0, False, "yes", "3 of 3 clients, each times 0.25 to 0.5"),
        ([0.5, 0.25, 0.25], 0.01, False, "yes", "standard deviation 0.01 in each number"),
        ([0.5, 0.25, 0.25], 1.0, False, "not measured", "drowned"),
        ([1.0, 0.0, 0.0], 0.0, False, "no", "one alone"),
        ([0.5, 0.25, 0.25], 0.0, True, "no", "Not masked"),
    ],
)
def test_a_secure_sum_is_told_from_what_only_looks_like_one(
    tmp_path: Path, weights: list[float], noise: float, in_clear: bool, verified: str, said: str
) -> None:
    found = verify(masked_round(tmp_path / "audit", weights=weights, noise=noise, in_clear=in_clear), {}, [])
    assert [(one.protection, one.verified) for one in found] == [("secure sum", verified)]
    assert said in found[0].said
    if verified != "no":
        assert "spread evenly over their modulus" in found[0].said


def test_integers_of_masks_are_even_over_their_modulus_and_others_are_not(tmp_path: Path) -> None:
    for in_clear in (False, True):
        records = masked_round(tmp_path / str(in_clear), weights=[0.5, 0.5, 0.5], noise=0.0, in_clear=in_clear)
        assert (float(spread_of_masks(records) or 0.0) > UNEVEN) is not in_clear
    assert spread_of_masks(Records(tmp_path)) is None


@pytest.mark.parametrize(
    ("second", "batches", "verified", "said"),
    [
        ("fresh", "same", "yes", "answered with noise of standard deviation 0.02"),
        ("fresh", "other", "yes", "took other batches, or began from other weights"),
        ("same", "same", "no", "whoever holds the seed takes it off"),
    ],
)
def test_noise_is_measured_from_repeats(tmp_path: Path, second: str, batches: str, verified: str, said: str) -> None:
    records, generator = Records(tmp_path), np.random.default_rng(0)
    for folder in (records.server, records.evaluator):
        folder.mkdir()
    sent, step = generator.normal(size=20000), 0.01 * generator.normal(size=20000)
    drawn = [0.02 * generator.normal(size=20000) for _ in range(2)]
    np.savez(records.server / "sent.npz", **{"arrays/w": sent})
    np.savez(records.evaluator / "m-trained.npz", w=sent + step)
    for number, noise in enumerate([drawn[0], drawn[second == "fresh"]]):
        np.savez(records.server / f"{number}.npz", **{"arrays/w": sent + 0.5 * step + noise})
        np.savez(records.evaluator / f"r{number}.npz", **{"0/input": np.full(3, number if batches == "other" else 0)})
    told = [{"of": "m", "id": f"r{number}", "file": f"{number}.npz"} for number in range(2)]
    (records.server / "repeats.jsonl").write_text("\n".join(map(json.dumps, told)))
    seen = [{"id": line["id"], "first_loss": 2.3} for line in told]
    (records.evaluator / "seen.jsonl").write_text("\n".join(map(json.dumps, seen)))
    answer = Answer("m", 1, 0, records.server / "sent.npz", records.server / "0.npz")
    protection = verify(records, {}, [answer])[0]
    assert protection.verified == verified
    assert said in protection.said
    if verified == "yes":
        # Balle and Wang's exact epsilon of one release: noise 0.02 over twice the norm that the update was scaled to.
        multiplier = 0.02 / (2 * 0.5 * np.linalg.norm(step))
        stated = float(protection.said.split("composed over rounds, is ")[1].split(" after")[0])
        assert stated == pytest.approx(get_epsilon_gaussian(multiplier, 1e-5), rel=0.1)  # as measured
    assert protection.drowns == (second == "fresh" and batches == "same"), "97 % of the answer is noise"


@pytest.mark.parametrize(("reply", "kind"), [("weights", "weights"), ("drowned", "weights"), ("gradient", "gradient")])
def test_weights_are_told_from_gradients_however_much_noise_lies_on_them(reply: str, kind: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    sent, step = (generator.normal(size=10_000).astype("float32") for _ in range(2))
    replies = {"weights": sent + 0.01 * step, "drowned": sent + 10 * step, "gradient": 0.01 * step}
    np.savez(tmp_path / "sent.npz", **{"arrays/w": sent})
    np.savez(tmp_path / "reply.npz", **{"arrays/w": replies[reply]})
    answer = Answer("m", 1, 0, tmp_path / "sent.npz", tmp_path / "reply.npz")
    assert answer.kind == kind
    change = replies[reply] - sent if kind == "weights" else replies[reply]
    assert np.allclose(answer.update["w"].numpy(), change, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "labels"),
    [
        (torch.tensor([2, 0]), [2, 0]),
        (torch.tensor([[1.0], [0.0]]), [1, 0]),  # one logit is two classes
        (torch.tensor([[0.0, 0.9, 0.1], [1.0, 0.0, 0.0]]), [1, 0]),
        (torch.tensor([0.25, 7.5]), None),
        (torch.rand(2, 5), None),
        (torch.rand(2, 3, 4, 4), None),
    ],
)
def test_only_targets_that_are_classes_are_labels(tmp_path: Path, target: Tensor, labels: list[int] | None) -> None:
    np.savez(tmp_path / "m.npz", **{"0/input": np.arange(96.0).reshape(2, 3, 4, 4), "0/target": target.numpy()})
    private = read_private(tmp_path, "m", MEAN, STD)
    assert private is not None
    assert (None if private.labels is None else private.labels.tolist()) == labels


def run_in_bundle(copied: WatchedCopy, code: str) -> "subprocess.CompletedProcess[str]":
    names, environment = copied.names, {**os.environ, "PYTHONPATH": str(copied.bundle), "PYTHONWARNINGS": "ignore"}
    imports = [f"from {names.package} import {names[name]} as {name}" for name in ("settings", "scripts")]
    imports.append(f"settings.contain(settings.read({names['client.json']!r}))")
    code = "\n".join([*imports, code])
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_an_app_cannot_touch_its_owners_folder_and_is_cut_off_where_it_prints_without_end(tmp_path: Path) -> None:
    folder = vit_app(tmp_path / "app", batch=1)
    copied = copy_with_probe(read_app(folder), tmp_path / "run", {"stand_in": False}, {"stand_in": False})
    code = f"""
import os, pathlib, shutil
owned = pathlib.Path({str(folder)!r})
for change in (
    lambda: (owned / "new.txt").write_text("mine"),
    lambda: os.remove(owned / "pyproject.toml"),
    lambda: shutil.rmtree(owned / "small"),
    lambda: os.rename(owned / "small", "/tmp/mine"),
    lambda: open(owned / "small" / "parts.py", "r+"),
):
    try:
        change()
    except PermissionError as error:
        assert "in its owner's folder" in str(error)
    else:
        raise AssertionError("the folder was changed")
pathlib.Path("new.txt").write_text("of the copy")
assert (owned / "pyproject.toml").read_text()
import small
for _ in range(3000):
    print("x" * 1000)
"""
    before = sorted((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file())
    done = run_in_bundle(copied, code)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) <= 2**20
    assert (tmp_path / "run" / CODE / "new.txt").exists()
    assert sorted((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file()) == before


SCRIPT = """
import argparse
import flwr as fl
from flwr.client.typing import ClientFn
from flwr.common.record.arrayrecord import ArrayRecord
from flwr.common.typing import NDArrays, UserConfig
parser = argparse.ArgumentParser()
parser.add_argument("--client-id", type=int, required=True)
parser.add_argument("--num-clients", type=int, default=50)
arguments = parser.parse_args()
class Client(fl.client.NumPyClient):
    whole = (arguments.client_id, arguments.num_clients)
fl.client.start_numpy_client(server_address="127.0.0.1:8080", client=Client())
"""
SERVER_SCRIPT = """
import flwr as fl
fl.server.start_server(server_address="0.0.0.0:8080", config=fl.server.ServerConfig(num_rounds=7))
"""


def test_scripts_of_the_first_api_are_an_app(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "client.py").write_text(SCRIPT)
    (tmp_path / "old" / "server.py").write_text(SERVER_SCRIPT)
    app = read_app(tmp_path / "old")
    assert app.scripts == {"client": "client.py", "server": "server.py"}
    shared = {"stand_in": False, "clients": 3, "rounds": 2}
    copied = copy_with_probe(app, tmp_path / "run", shared, shared)
    code = """
from flwr.app import Context, RecordDict
context = Context(run_id=1, node_id=1, node_config={"partition-id": 2}, state=RecordDict(), run_config={})
print(scripts._make_client(context).numpy_client.whole, scripts._make_server(context).config.num_rounds)
"""
    done = run_in_bundle(copied, code)
    assert done.stdout.splitlines()[-1:] == ["(2, 3) 7"], done.stderr
