"""What a client checks of an incoming model: formulas against torch, servers that cheat, models of all libraries."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmjp.clients.checks import Finding, Incoming, examine_model, remember
from fedmjp.clients.checks.base import ENOUGH, REMEMBERED
from fedmjp.clients.checks.bins import ALONE, check_bins
from fedmjp.clients.checks.disaggregation import SNR
from fedmjp.clients.checks.movement import STEP, check_movement
from fedmjp.clients.checks.parallel import may_have_parallel_rows, unit_rows
from fedmjp.clients.checks.structure import check_structure
from fedmjp.clients.checks.trace import trace_model
from fedmjp.data.pictures import LabelledPicture
from fedmjp.exchange import change_weights
from fedmjp.models.build import build_vit, with_weights
from fedmjp.records import weights_digest
from fedmjp.scenario import Scenario
from fedmjp.seeds import scoped_randomness, torch_generator

MODEL = {"name": "deit_micro", "image_size": 32, "patch_size": 8, "classes": 32}
PICTURES = 8


class Mixed(nn.Module):
    """Convolutions with batch norm and an activation in place, tokens, a layer that is used twice, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 12, 3, stride=2, padding="valid")
        self.norm, self.act = nn.BatchNorm2d(12), nn.ReLU(inplace=True)
        self.cut = nn.Conv2d(12, 24, 3, stride=3, padding=1, dilation=1)
        self.mix = nn.Linear(24, 24)
        self.classify = nn.Linear(24, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        tokens = self.cut(self.act(self.norm(self.start(pictures)))).flatten(2).mT
        return self.classify(self.mix(torch.tanh(self.mix(tokens))).mean(dim=1))


def of_timm() -> nn.Module:
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3, num_classes=10
    )


def of_torchvision() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96, num_classes=10)


def of_transformers() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=32, patch_size=8, hidden_size=48, num_hidden_layers=2, num_attention_heads=3,
            intermediate_size=96, num_labels=10,
        )
    )  # fmt: skip


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32**2, 64), nn.ReLU(), nn.Linear(64, 10))


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    with scoped_randomness(3):
        model = make()
    if isinstance(model, nn.Module) and hasattr(model, "heads"):  # torchvision starts with a head of zeros
        with scoped_randomness(4):
            nn.init.normal_(model.heads[0].weight, std=0.02)
    return model


def arriving(model: nn.Module, changed: Mapping[str, object] | None = None, **said: object) -> Incoming:
    """A first round: the model's own weights, some of them changed; pictures of many frequencies in ten classes."""
    generator = torch_generator(0, "pictures")
    coarse = torch.rand(PICTURES, 3, 8, 8, generator=generator)
    images = F.interpolate(coarse, 32, mode="bicubic") - 0.5
    weights = {name: value.clone() for name, value in model.state_dict().items()} | dict(changed or {})
    return Incoming(model, weights, None, None, images, torch.arange(PICTURES), **said)  # type: ignore[arg-type]


def suspicious(findings: list[Finding]) -> set[str]:
    return {finding.check for finding in findings if finding.suspicious}


@pytest.mark.parametrize("make", [Mixed, of_timm, of_torchvision, of_transformers, dense])
def test_an_honest_model_of_any_library_passes_and_is_left_as_it_was(make: Callable[[], nn.Module]) -> None:
    model = drawn(make).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    findings = examine_model(arriving(model))
    assert suspicious(findings) == set(), findings
    assert {finding.check for finding in findings if finding.ran} >= {SNR, ALONE, "gradient", "loss", "head rows"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("make", [Mixed, of_timm, of_torchvision, of_transformers, dense])
def test_a_head_that_fishes_is_noticed_in_a_model_of_any_library(make: Callable[[], nn.Module]) -> None:
    model = drawn(make)
    *_, (weight, head), (bias, thresholds) = model.named_parameters()
    fishing = {weight: torch.zeros_like(head), bias: torch.zeros_like(thresholds)}
    fishing[weight][3], fishing[bias][3] = head.detach()[3], -1e4
    model.load_state_dict({**model.state_dict(), **fishing})
    assert suspicious(examine_model(arriving(model))) >= {SNR, "head rows", "head bias", "certain pictures", "loss"}


def test_norms_of_single_pictures_are_those_of_their_own_gradients() -> None:
    """Against torch's gradient of one picture after the other, convolutions and a layer used twice among them."""
    model = drawn(Mixed).eval()
    incoming = arriving(model)
    trace = trace_model(incoming)
    assert [layer.name for layer in trace.body] == ["start", "cut", "mix"]
    assert trace.head is model.classify
    for layer in trace.body:
        weight = layer.module.weight
        singly = []
        for picture in range(PICTURES):
            part = slice(picture, picture + 1)
            loss = F.cross_entropy(model(incoming.images[part]), incoming.labels[part])
            singly.append(torch.autograd.grad(loss, weight)[0])
        norms = torch.stack([gradient.double().norm() for gradient in singly])
        assert torch.allclose(layer.by_picture, norms, rtol=1e-4)
        assert layer.measured[1] == pytest.approx(float(torch.stack(singly).mean(dim=0).norm()), rel=1e-4)
    logits = model(incoming.images).detach().double()
    slopes = (logits.softmax(dim=1) - F.one_hot(incoming.labels, 10)).norm(dim=1)
    relative = [layer.by_picture / slopes for layer in trace.body]
    worst = max(float(n.max() / (n.sum() - n.max())) for n in relative)
    (finding,) = [finding for finding in examine_model(incoming) if finding.check == SNR]
    assert finding.value == pytest.approx(worst)


@cache
def vit() -> tuple[nn.Module, Incoming]:
    model = build_vit(Scenario.parse({"model": MODEL}).network)
    return model, arriving(model)


NOTICED = {
    "class_fishing": {"constant lines", "head rows", "head bias", "certain pictures"},
    "feature_fishing": {"constant lines", "head rows", "head bias", "certain pictures"},
    "suppression": {"constant lines", "head rows", "gradient"},
    "token_imprint": {"constant lines", "parallel rows", "stable rank", "silent layers"},
    "concentrator": {"constant lines", "head rows"},
    "concentrator:tells=thumbnail": {"constant lines", "head rows", "silent layers"},
}


def test_long_class_tokens_that_read_steps_of_adamw_are_noticed_in_a_first_round() -> None:
    model, honest = vit()
    step = {"update": "delta", "local_optimiser": "adamw", "local_learning_rate": 1e-3}
    scenario = Scenario.parse({"model": MODEL, "server": "class_fishing:class=3", **step})
    batch = [LabelledPicture("0", (honest.images[0] + 0.5).clamp(0, 1), 3)]
    (fishing,) = change_weights(scenario, model, batch)
    probing = scenario.server.build().probe(model, scenario.threat)  # type: ignore[union-attr]
    assert suspicious(examine_model(arriving(with_weights(model, fishing)))) >= NOTICED["class_fishing"]
    assert suspicious(examine_model(arriving(with_weights(model, probing)))) >= {"head rows"}


@pytest.mark.parametrize("server", NOTICED)
def test_a_server_that_changes_weights_is_noticed_in_a_first_round(server: str) -> None:
    model, honest = vit()
    labels = [0, 1, 2, 0, 4, 5, 6, 7]
    batch = [
        LabelledPicture(str(place), image, label)
        for place, (image, label) in enumerate(zip((honest.images + 0.5).clamp(0, 1), labels, strict=True))
    ]
    several = {"defences": ["secure_sum:clients=2"], "clients": 2} if server == "suppression" else {}
    size = 1 if server.startswith("concentrator") else PICTURES // 2 if several else PICTURES
    scenario = Scenario.parse(
        {"model": MODEL, "server": server, "batch_size": size, "pictures_per_client": size, **several}
    )
    changed = with_weights(model, change_weights(scenario, model, batch)[-1])
    assert suspicious(examine_model(arriving(model))) == set()
    assert suspicious(examine_model(arriving(changed))) >= NOTICED[server]


def test_bins_are_noticed_and_count_what_is_alone_in_them() -> None:
    """Thresholds between the values of the measurement: by construction every picture but the last is alone."""
    model = drawn(dense)
    incoming = arriving(model)
    measured = incoming.images.flatten(1) @ torch.ones(3 * 32**2)
    order = measured.sort().values
    between = (order[:-1] + order[1:]) / 2
    weight, bias = torch.ones(64, 3 * 32**2), torch.full((64,), -1e6)
    bias[: len(between)] = -between
    changed = {"1.weight": weight, "1.bias": bias, "3.weight": model[3].weight.detach()[:, :1].expand(-1, 64).clone()}
    model.load_state_dict({**model.state_dict(), **changed})
    incoming = arriving(model)
    (finding,) = check_bins(incoming, trace_model(incoming))
    assert finding.value == pytest.approx((len(between)) / 64), "seven differences or last units hold one picture each"
    assert suspicious(examine_model(incoming)) >= {"parallel rows", "stable rank"}


def test_trap_weights_of_breaching_leave_pictures_alone_in_units() -> None:
    imprint = pytest.importorskip("breaching.cases.malicious_modifications.imprint")
    model = drawn(dense)
    with scoped_randomness(0):
        trap = imprint.CuriousAbandonHonesty((3, 32, 32), 64, scale_factor=0.9)
    honest, trapped = arriving(model), drawn(dense)
    trapped.load_state_dict(
        {**model.state_dict(), "1.weight": trap.linear0.weight.detach(), "1.bias": trap.linear0.bias.detach()}
    )
    values = [check_bins(given, trace_model(given))[0].value for given in (honest, arriving(trapped))]
    assert values[0] < values[1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensor: tensor.clone().fill_(math.nan), "NaN"),
        (lambda tensor: tensor[:-1], "shape"),
        (lambda tensor: tensor.half(), "float16"),
        (lambda tensor: tensor.to(torch.complex64), "complex64"),
        (lambda tensor: tensor.tolist(), "list"),
        (lambda tensor: None, "NoneType"),
    ],
)
def test_tensors_that_are_not_as_agreed_are_suspicious_and_nothing_is_computed_with_them(
    change: Callable[[Tensor], object], reason: str
) -> None:
    model = drawn(dense)
    findings = examine_model(arriving(model, {"1.weight": change(model[1].weight.detach())}))
    assert suspicious(findings) == {"layout"}
    assert reason in findings[0].about
    assert [finding.check for finding in findings if finding.ran] == ["layout"]


def test_missing_and_unknown_tensors_are_suspicious_unless_the_server_is_to_send_a_part() -> None:
    model = drawn(dense)
    whole = arriving(model)
    part = {name: value for name, value in whole.weights.items() if name.startswith("3")}
    assert suspicious(examine_model(replace(whole, weights=part))) == {"layout"}
    assert suspicious(examine_model(replace(whole, weights={**whole.weights, "extra": torch.ones(2)}))) == {"layout"}
    assert suspicious(examine_model(replace(whole, weights=part, names=frozenset(part)))) == set()
    wide = {name: value.double() for name, value in whole.weights.items()}  # as Flower's FedAdam sends them
    assert suspicious(examine_model(replace(whole, weights=wide))) == set()


def test_a_check_that_breaks_down_is_suspicious_and_repeats_nothing_of_the_error() -> None:
    class Broken(nn.Sequential):
        def forward(self, pictures: Tensor) -> Tensor:
            raise RuntimeError(f"the pixel is {float(pictures[0, 0, 0, 0])}")

    model = Broken(nn.Flatten(), nn.Linear(3 * 32**2, 64))
    findings = [finding for finding in examine_model(arriving(model)) if finding.suspicious]
    assert {finding.check for finding in findings} == {"disaggregation", "bins", "head", "behaviour"}
    assert all(not finding.ran and finding.about.endswith("RuntimeError") for finding in findings)


def test_what_does_not_apply_says_so_and_is_not_suspicious() -> None:
    regressing = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32**2, 1))
    findings = examine_model(arriving(regressing))
    assert suspicious(findings) == set()
    assert {finding.check for finding in findings if not finding.ran} >= {"disaggregation", "head", "step", "settings"}
    single = arriving(drawn(dense))
    single = replace(single, images=single.images[:1], labels=single.labels[:1])
    assert SNR in {finding.check for finding in examine_model(single) if not finding.ran}


def test_steps_are_held_against_the_client_s_own_updates_and_its_history() -> None:
    model = drawn(dense)
    generator = torch_generator(1)
    before = {
        name: value - 0.01 * torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()
    }
    moved = {name: value - before[name] for name, value in model.state_dict().items()}
    update = {name: 0.5 * value for name, value in moved.items()}
    incoming = replace(arriving(model), previous=before, update=update)
    step, direction = check_movement(incoming)
    assert step.value == pytest.approx(2, rel=1e-4)
    assert direction.value == pytest.approx(0, abs=1e-4)
    history = {name: [value / 100] * ENOUGH for name, value in step.measured.items()}
    later, _ = check_movement(replace(incoming, history=history))
    assert later.value == pytest.approx(100)
    assert later.suspicious
    frozen = replace(incoming, update={**update, "1.bias": torch.zeros(64)})
    assert check_movement(frozen)[0].value == math.inf, "the client did not change it, the server did"


@pytest.mark.parametrize("seed", range(20))
def test_parallel_rows_are_never_missed_by_the_look_at_a_few_columns(seed: int) -> None:
    generator = torch_generator(seed)
    matrix = torch.randn(60, 40, generator=generator)
    assert not may_have_parallel_rows(unit_rows(matrix))
    noise = torch.randn(40, generator=generator)
    noise -= (noise @ matrix[7]) / (matrix[7] @ matrix[7]) * matrix[7]
    tilt = math.tan(math.acos(0.9991)) * matrix[7].norm() / noise.norm()
    matrix[31] = -3 * (matrix[7] + tilt * noise)
    assert float(F.cosine_similarity(matrix[7], matrix[31], dim=0)) == pytest.approx(-0.9991, abs=1e-5)
    assert may_have_parallel_rows(unit_rows(matrix))


def test_the_stable_rank_is_that_of_all_singular_values() -> None:
    generator = torch_generator(2)
    matrix = torch.randn(40, 30, generator=generator) * torch.linspace(0.1, 3, 30) ** 2
    incoming = replace(arriving(nn.Linear(30, 40, bias=False)), weights={"weight": matrix})
    singular = torch.linalg.svdvals(matrix.double())
    rank = next(finding for finding in check_structure(incoming) if finding.check == "stable rank")
    assert rank.value == pytest.approx(float(singular[0] ** 2 / singular.square().sum()), rel=1e-2)


def test_history_is_plain_numbers_of_the_last_rounds_and_forgets_suspicious_ones() -> None:
    model = drawn(dense)
    history: dict[str, list[float]] = {}
    findings = examine_model(arriving(model))
    for _ in range(REMEMBERED + 1):
        history = remember(history, findings)
    assert {len(values) for values in history.values()} == {REMEMBERED}
    assert json.loads(json.dumps(history)) == history
    assert {"loss", SNR, "gradient/1"} <= history.keys()
    odd = [replace(findings[0], suspicious=True), *findings[1:]]
    assert remember({}, odd) == {}
    assert not any(name.startswith(STEP) for name in history), "there was no earlier round"


def test_gradients_that_vanish_against_the_last_rounds_are_suspicious() -> None:
    model = drawn(dense)
    history: dict[str, list[float]] = {}
    for _ in range(ENOUGH):
        history = remember(history, examine_model(arriving(model, history=history)))
    assert suspicious(examine_model(arriving(model, history=history))) == set()
    model[3].weight.data *= 1e-4
    assert suspicious(examine_model(arriving(model, history=history))) == {"gradient"}


def test_settings_of_the_server_stay_within_the_policy() -> None:
    incoming = arriving(drawn(dense), bounds={"learning-rate": (0, 0.1), "local_epochs": (1, 5)})

    def judged(**config: object) -> set[str]:
        return suspicious(examine_model(replace(incoming, config=config)))

    assert judged(learning_rate=0.1, LocalEpochs=5, note="hello") == set()
    for beyond in (
        {"learning_rate": 0.2},
        {"local-epochs": 0},
        {"lr": 1, "learning_rate": math.nan},
        {"local_epochs": "5"},
    ):
        assert judged(**beyond) == {"settings"}


def test_sites_that_got_another_model_notice_it_by_its_digest() -> None:
    model = drawn(dense)
    incoming = arriving(model)
    same, other = weights_digest(incoming.weights), weights_digest({"1.bias": torch.ones(1)})
    assert suspicious(examine_model(replace(incoming, digests=(same, same)))) == set()
    assert suspicious(examine_model(replace(incoming, digests=(same, other)))) == {"same model"}
