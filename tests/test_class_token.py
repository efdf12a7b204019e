"""Last-block separation: features, labels and facts against the network's own; no certificate is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.autograd import backward

from fedmjp.attacks.class_token.attack import ClassToken
from fedmjp.attacks.class_token.head import Head, HeadGradient
from fedmjp.attacks.class_token.separate import Separation, separate
from fedmjp.benchmarks.audit.network import by_name
from fedmjp.exchange import Exchange
from fedmjp.facade import bundled_pictures
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.sent import SentWeights
from fedmjp.records import Features, Upload
from fedmjp.scenario import Scenario
from fedmjp.seeds import scoped_randomness
from fedmjp.threat import ThreatModel
from tests.conftest import small_model, small_scenario

PICTURES = bundled_pictures(8, size=64)
EXACT = 1e-3


def attacked(
    scenario: Scenario, places: list[int], options: dict[str, Any] | None = None
) -> tuple[Features, Exchange, VitClassifier]:
    model = build_vit(scenario.network)
    exchange = scenario.exchange([PICTURES[place] for place in places], model=model)
    generator = torch.Generator().manual_seed(0)
    (made,) = ClassToken(options).run([exchange.upload], model, scenario.threat, generator=generator)
    return made, exchange, model


def true_features(exchange: Exchange, model: VitClassifier) -> Tensor:
    private = exchange.private
    with torch.no_grad():
        mask = private.mask if model.defended else None
        return model.features(private.version(private.gradient_of), mask).double()


def assigned(made: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Row of the truth for each row, and its error relative to the distance from the mean."""
    distances = torch.cdist(made, truth)
    _, columns = linear_sum_assignment(distances.numpy())
    spread = (truth - truth.mean(0)).norm(dim=1) if len(truth) > 1 else truth.norm(dim=1)
    return torch.tensor(columns), distances[torch.arange(len(made)), columns] / spread[columns]


SCENARIOS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "one picture": ({}, [0]),
    "distinct labels": ({}, [0, 2, 4, 6]),
    "labels that occur twice": ({}, list(range(8))),
    "label smoothing": ({"label_smoothing": 0.1}, list(range(8))),
    "mixup": ({"mixup": 0.8, "label_smoothing": 0.1}, [0, 2, 4, 6]),
    "mixup and MJP": ({"mixup": 0.8, "defences": "mjp"}, [0, 1, 4, 6]),
    "MJP": ({"defences": "mjp"}, list(range(8))),
    "the delta of one step": ({"update": "delta", "local_learning_rate": 0.1}, [0, 2, 4, 6]),
    "the head alone": ({"defences": "withhold:roles=body"}, [0, 2, 4, 6]),
    "a sum of two clients": ({"defences": "secure_sum:clients=2", "clients": 2, "batch_size": 4}, list(range(8))),
}


def test_a_head_trained_alone_gives_features_by_the_networks_weights() -> None:
    """Timm's network: its head's gradient alone is sent, under the names of the whole or of the head."""
    with scoped_randomness(1):
        network = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8, num_classes=10).eval()
        torch.nn.init.trunc_normal_(network.head.weight, std=0.02)
    network.requires_grad_(False).head.requires_grad_(True)
    pictures = 2 * torch.stack([picture.image for picture in PICTURES]) - 1
    labels = torch.tensor([3, 3, 3, 1, 1, 7, 7, 9])
    F.cross_entropy(network(pictures), labels).backward()
    truth = network.forward_head(network.forward_features(pictures), pre_logits=True).detach().double()
    own = {f"head.{name}": parameter.grad for name, parameter in network.head.named_parameters()}
    sent = SentWeights.of(network.state_dict())
    (made,) = ClassToken({}).run(
        [sent.upload(own, examples=8, kind="gradient")], sent, ThreatModel(batch_size=8), generator=torch.Generator()
    )
    assert made.features is not None
    assert float(assigned(made.features, truth)[1].max()) < EXACT
    assert sorted(made.labels.tolist()) == sorted(labels.tolist())
    in_part = by_name(
        network.state_dict(), {name: parameter.grad for name, parameter in network.head.named_parameters()}
    )
    assert in_part.keys() == own.keys()


@pytest.mark.parametrize(("values", "places"), SCENARIOS.values(), ids=SCENARIOS)
def test_labels_and_features_of_each_picture_come_out(values: dict[str, Any], places: list[int]) -> None:
    size = values.get("batch_size", len(places))
    scenario = small_scenario(**{"batch_size": size, "pictures_per_client": size, **values})
    made, exchange, model = attacked(scenario, places)
    assert made.features is not None
    truth = true_features(exchange, model)
    rows, errors = assigned(made.features, truth)
    assert float(errors.max()) < EXACT
    private, logits = exchange.private, model.logits(truth.float()).double().detach()
    assert sorted(made.labels.tolist()) == sorted(private.labels.tolist())
    losses = F.cross_entropy(
        logits,
        private.targets.double() if scenario.mixup else private.labels,
        reduction="none",
        label_smoothing=scenario.label_smoothing,
    )
    torch.testing.assert_close(made.facts["loss"], losses[rows], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(made.facts["probabilities"], logits.softmax(1)[rows], rtol=1e-3, atol=1e-6)
    if not scenario.mixup:  # of a mixed picture, which of two labels is its own is a matter of words
        assert torch.equal(made.labels, private.labels[rows])


def test_the_last_block_states_what_it_computed_of_each_class_token() -> None:
    scenario = small_scenario(batch_size=4, pictures_per_client=4)
    made, exchange, model = attacked(scenario, [0, 2, 4, 6], {"last_block": True})
    seen: dict[str, Tensor] = {}

    def keep(name: str, *, output: bool) -> Any:
        def hook(_module: object, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            seen[name] = (outputs if output else inputs[0]).detach().double()

        return hook

    block = model.backbone.blocks[-1]
    block.register_forward_hook(keep("class_token_after", output=True))
    block.register_forward_hook(keep("class_token_before", output=False))
    block.norm2.register_forward_hook(keep("class_token_between", output=False))
    block.attn.proj.register_forward_hook(keep("attention_output", output=False))
    block.norm1.register_forward_hook(keep("tokens", output=True))
    truth = true_features(exchange, model)
    assert made.features is not None
    rows, _ = assigned(made.features, truth)
    for name in ("class_token_after", "class_token_between", "class_token_before", "attention_output"):
        expected = seen[name][:, 0][rows]
        if name != "attention_output":
            expected = expected - expected.mean(1, keepdim=True)
        spread = (expected - expected.mean(0)).norm(dim=1)
        assert float(((made.facts[name] - expected).norm(dim=1) / spread).max()) < 1e-5, name
    # The attention itself, from its weights.
    tokens, heads = seen["tokens"], block.attn.num_heads
    queries, keys, _ = block.attn.qkv(tokens.float()).double().detach().chunk(3, dim=2)
    queries, keys = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in (queries, keys))
    attention = (queries[:, :, :1] @ keys.mT * block.attn.scale).softmax(-1)[:, :, 0]
    means = torch.einsum("bht,btd->bhd", attention, tokens)[rows]
    spread = (means - means.mean(0)).flatten(1).norm(dim=1)
    assert float(((made.facts["token_means"] - means).flatten(1).norm(dim=1) / spread).max()) < 1e-5


def test_several_steps_are_read_as_one_and_never_certified() -> None:
    values = {"update": "delta", "local_steps": 3, "local_learning_rate": 0.001}
    scenario = small_scenario(batch_size=2, pictures_per_client=2, **values)
    made, exchange, model = attacked(scenario, [0, 6])
    assert made.features is not None
    assert made.diagnostics["certified_pictures"] == 0
    _, errors = assigned(made.features, true_features(exchange, model))
    assert float(errors.max()) < 0.5
    assert "approximation" in (ClassToken().caveat(model, scenario.threat) or "")


@pytest.mark.parametrize(
    ("threat", "reason"),
    [
        ({"batch_size": 192}, "192 pictures does not come apart: with 1000 classes and 192 dimensions at most 191 do"),
        ({"batch_size": 64, "defences": "secure_sum:clients=3"}, "an upload of 192 pictures does not come apart"),
        ({"defences": "withhold:roles=head"}, "which withhold withholds"),
    ],
)
def test_uploads_that_do_not_come_apart_are_refused(threat: dict[str, Any], reason: str) -> None:
    assert reason in (ClassToken().refusal(small_model(), ThreatModel.parse(threat)) or "")


def test_a_model_whose_head_reads_more_than_the_class_token_is_refused() -> None:
    model = small_model()
    model.backbone.global_pool = "avg"
    assert "the model's pooling is 'avg'" in (ClassToken().refusal(model, ThreatModel()) or "")
    model.backbone.num_prefix_tokens = 0
    assert "needs a class token" in (ClassToken().refusal(model, ThreatModel()) or "")


def clipped(model: VitClassifier, _images: Tensor, _labels: Tensor) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clipped_by_layer(model: VitClassifier, _images: Tensor, _labels: Tensor) -> None:
    for layer in model.modules():
        if parameters := list(layer.parameters(recurse=False)):
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)


def accumulated(model: VitClassifier, images: Tensor, labels: Tensor) -> None:
    model.zero_grad()
    for start in range(0, len(images), 2):
        backward(F.cross_entropy(model.logits(model.features(images[start : start + 2])), labels[start : start + 2]))


def summed(model: VitClassifier, images: Tensor, labels: Tensor) -> None:
    model.zero_grad()
    backward(F.cross_entropy(model.logits(model.features(images)), labels, reduction="sum"))


def scaled(model: VitClassifier, _images: Tensor, _labels: Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad * 65536


def faster_head(model: VitClassifier, _images: Tensor, _labels: Tensor) -> None:
    for parameter in model.backbone.head.parameters():
        assert parameter.grad is not None
        parameter.grad *= 10


CHANGES = [clipped, clipped_by_layer, accumulated, summed, scaled, faster_head]


@pytest.mark.parametrize("change", CHANGES)
def test_a_factor_on_the_gradient_is_found(change: Callable[[VitClassifier, Tensor, Tensor], None]) -> None:
    model = small_model()
    images = torch.stack([picture.image for picture in PICTURES[::2]])
    images, labels = (images - model.mean) / model.std, torch.tensor([3, 3, 1, 7])
    features = model.features(images)
    backward(F.cross_entropy(model.logits(features), labels))
    head = model.backbone.head.weight
    assert head.grad is not None
    plain = head.grad.clone()
    change(model, images, labels)
    factor = float((head.grad * plain).sum() / plain.square().sum())
    tensors = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    upload = Upload(tensors, "gradient", len(images), 1, 0, "w")
    (made,) = ClassToken().run([upload], model, ThreatModel(batch_size=len(images)), generator=torch.Generator())
    assert made.diagnostics["factor"] == pytest.approx(factor, rel=1e-4)
    assert made.diagnostics["certified_pictures"] == len(images)
    assert made.features is not None
    rows, errors = assigned(made.features, features.detach().double())
    assert float(errors.max()) < EXACT
    assert torch.equal(made.labels, labels[rows])


def test_weights_of_classes_are_found_and_no_factor_where_there_is_none() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 48, generator=random, dtype=torch.float64) / 10
    head = Head(weight, weight[:, 0], torch.ones(48).double(), torch.zeros(48).double())
    features = head.normed(torch.randn(6, 48, generator=random, dtype=torch.float64))
    labels = torch.tensor([3, 3, 1, 7, 9, 12])
    assert solved(features, labels, head).factors is None
    weights = torch.rand(20, generator=random, dtype=torch.float64) + 0.5
    made = solved(features, labels, head, weights=weights)
    rows, errors = assigned(made.features, features)
    assert float(errors.max()) < EXACT
    assert torch.equal(made.labels, labels[rows])
    assert made.factors is not None
    expected = (weights[labels] / weights[labels].mean())[rows]
    torch.testing.assert_close(made.factors, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("factor", [1.0, 0.05])
def test_a_smoothing_that_nobody_told_is_found(factor: float) -> None:
    """As of timm's LabelSmoothingCrossEntropy, which no hook on torch's loss sees."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 48, generator=random, dtype=torch.float64) / 10
    head = Head(weight, weight[:, 0], torch.ones(48).double(), torch.zeros(48).double())
    features = head.normed(torch.randn(6, 48, generator=random, dtype=torch.float64))
    labels = torch.tensor([3, 3, 1, 7, 9, 12])
    made = solved(features, labels, head, factor=factor, smoothing=0.1)
    rows, errors = assigned(made.features, features)
    assert float(errors.max()) < EXACT
    assert made.smoothing == pytest.approx(0.1, rel=1e-4)
    torch.testing.assert_close(made.targets, 0.005 + 0.9 * F.one_hot(labels[rows], 20).double(), rtol=0, atol=1e-5)


def solved(
    features: Tensor,
    labels: Tensor,
    head: Head,
    *,
    weights: Tensor | None = None,
    factor: float = 1.0,
    smoothing: float = 0.0,
) -> Separation:
    """What comes of the gradient of a head that read these features, by autograd, rounded as an upload is."""
    weight, bias = head.weight.clone().requires_grad_(), head.bias.clone().requires_grad_()
    loss = factor * F.cross_entropy(features @ weight.mT + bias, labels, weights, label_smoothing=smoothing)
    gradients = (part.float().double() for part in torch.autograd.grad(loss, (weight, bias)))
    weight, bias = gradients
    noise = 2.0**-24 * torch.cat([weight, bias[:, None] * weight.shape[1] ** 0.5], 1).norm(dim=1)
    gradient = HeadGradient(weight, bias, noise, len(labels))
    return separate(head, gradient, None, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("factor", [1.0, 0.1])
@pytest.mark.parametrize("seed", range(12))
def test_a_certificate_is_never_wrong(seed: int, factor: float) -> None:
    """Confident heads, doubled labels, nearly equal pictures: not all come apart, and what does not is not certain."""
    random = torch.Generator().manual_seed(seed)
    classes, dim, count = 12, 24, 4 + seed % 4
    confidence = (0.3, 1.0, 2.0)[seed % 3]
    scale = 1 + 0.1 * torch.randn(dim, generator=random, dtype=torch.float64)
    shift = 0.1 * torch.randn(dim, generator=random, dtype=torch.float64)
    weight = confidence * torch.randn(classes, dim, generator=random, dtype=torch.float64) / 2
    head = Head(weight, torch.randn(classes, generator=random, dtype=torch.float64) / 4, scale, shift)
    labels = torch.randint(classes // (1 + seed % 2), (count,), generator=random)
    inner = torch.randn(count, dim, generator=random, dtype=torch.float64)
    if seed % 4 == 3:  # two pictures that can hardly be told apart, of one class
        inner[1], labels[1] = inner[0] + 1e-5 * inner[1], labels[0]
    features = head.normed(inner)
    made = solved(features, labels, head, factor=factor)
    rows, errors = assigned(made.features, features)
    spread = (made.features - made.features.mean(0)).norm(dim=1)
    certain = (made.errors <= EXACT * spread) & (made.misfit <= 1e-6)
    assert float(errors[certain].max() if certain.any() else 0) < EXACT
    assert torch.equal(made.labels[certain], labels[rows][certain])
    if seed % 4 == 3:
        assert not certain.all(), "what can hardly be told apart is not certain"
    else:
        assert certain.all() or made.misfit > 1e-6
