"""The audit reads from hooks what a client did: sampling and optimisers, held against torch and dp_accounting."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dp_accounting import PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import GaussianDpEvent
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torchvision import transforms
from torchvision.transforms import _presets, v2

import fedmjp
from fedmjp.benchmarks.audit import site
from fedmjp.benchmarks.audit.attacking import attempt_all, decay_in_loss
from fedmjp.benchmarks.audit.audit import examine
from fedmjp.benchmarks.audit.evaluating import Private, read_private, scored
from fedmjp.benchmarks.audit.network import take_in
from fedmjp.benchmarks.audit.noise import Change, Repeats
from fedmjp.benchmarks.audit.probe import sampling, watching
from fedmjp.benchmarks.audit.protections import verify
from fedmjp.benchmarks.audit.recipe import as_one_group, channels, departure_of, read_recipe, threat_of, unreadable
from fedmjp.benchmarks.audit.running import AppRun, Records
from fedmjp.benchmarks.audit.verdict import exit_code
from fedmjp.benchmarks.audit.wire import read_answers
from fedmjp.clients.mods import AuditMod
from fedmjp.facade import bundled_pictures
from fedmjp.metrics import metric
from fedmjp.records import Features, Reconstruction
from fedmjp.step import SgdRule, unroll_sgd
from fedmjp.tensors import without_decay
from fedmjp.threat import ThreatModel
from tests.test_audit import MEAN, SIDE, STD, small_vit

RECORDS, BATCH, WIDTH, DELTA = 40, 4, 3000, 1e-5


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The probe's patches of torch, taken back afterwards."""
    places = [(nn.Module, "__call__"), (DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")]
    places.append((torch.autograd, "grad"))
    places += [(F, name) for name in watching.LOSSES]
    places += [(kind, "__init__") for kind in (transforms.Normalize, v2.Normalize, _presets.ImageClassification)]
    for owner, name in places:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(watching, "_patched", False)
    monkeypatch.setattr(sampling, "_pass", None)
    monkeypatch.setitem(sys.modules, "opacus", ModuleType("opacus"))
    watching.watch_torch()
    yield
    _global_optimizer_pre_hooks.clear()


def watched(root: Path, module: nn.Module, train: Callable[[nn.Module], object], *, message_id: str = "m") -> Records:
    """Records of one training message that was answered with weights."""
    records = Records(root)
    content = RecordDict({"arrays": ArrayRecord(module.state_dict())})
    message: Any = SimpleNamespace(metadata=SimpleNamespace(message_id=message_id, dst_node_id=1), content=content)
    with watching.MessageWatch(records.evaluator, records.model, message) as watch:
        train(module.train())
    content = RecordDict({"arrays": ArrayRecord(module.state_dict())})
    reply: Any = SimpleNamespace(has_error=lambda: False, content=content)
    watch.keep(reply)
    return records


class UniformWithReplacementSampler(Sampler[list[int]]):
    """Poisson sampling, under the name and with the attribute that Opacus' class has."""

    def __init__(self, sample_rate: float) -> None:
        self.sample_rate = sample_rate

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(round(1 / self.sample_rate)):
            yield (torch.rand(RECORDS) < self.sample_rate).nonzero().flatten().tolist() or [0]


class DPOptimizer:
    """What Opacus' optimiser says of itself, and the noise that it added."""

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        self.original_optimizer, self.param_groups = optimiser, optimiser.param_groups
        self.noise_multiplier, self.max_grad_norm, self.expected_batch_size = 1.0, 1.0, BATCH
        self.generator = torch.Generator().manual_seed(0)

    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.summed_grad = parameter.grad * 0
            noise = torch.randn(parameter.shape, generator=self.generator)
            parameter.grad = (parameter.summed_grad + noise) / self.expected_batch_size
        self.original_optimizer.step()


def private_training(loader: DataLoader[Any], passes: int, *, twice: bool = False) -> Callable[[nn.Module], None]:
    def train(module: nn.Module) -> None:
        optimiser = DPOptimizer(torch.optim.SGD(module.parameters(), lr=0.01))
        for _ in range(passes):
            for inputs, labels in loader:
                for _ in range(1 + twice):
                    module.zero_grad()
                    F.cross_entropy(module(inputs), labels).backward()
                    optimiser.step()

    return train


def loaded(sampler: str) -> DataLoader[Any]:
    dataset = TensorDataset(torch.rand(RECORDS, WIDTH), torch.arange(RECORDS) % 10)
    if sampler == "Poisson":
        return DataLoader(dataset, batch_sampler=UniformWithReplacementSampler(BATCH / RECORDS))
    if sampler == "replacement":
        return DataLoader(dataset, BATCH, sampler=RandomSampler(dataset, replacement=True))
    return DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), BATCH, drop_last=False))


def simulated_epsilon(sampler: str, passes: int, runs: int = 200_000) -> float:
    """A lower bound of epsilon by Monte Carlo: privacy losses of the mechanism itself, drawn with the example in it."""
    generator, steps = np.random.default_rng(0), RECORDS // BATCH
    loss = np.zeros(runs)
    for _ in range(passes):
        if sampler == "Poisson":
            for _ in range(steps):
                seen = generator.normal(size=runs) + (generator.random(runs) < 1 / steps)
                loss += np.log1p((np.exp(seen - 0.5) - 1) / steps)
        else:
            seen = generator.normal(size=(steps, runs))
            seen[generator.integers(steps, size=runs), np.arange(runs)] += 1
            loss += np.log(np.exp(seen - 0.5).mean(0))
    for epsilon in np.arange(30, 0, -0.05):
        excess = np.maximum(1 - np.exp(epsilon - loss), 0)
        if excess.mean() - 4 * excess.std() / np.sqrt(runs) > DELTA:
            return float(epsilon)
    return 0.0


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("passes", [1, 3, 10])
@pytest.mark.parametrize("sampler", ["Poisson", "shuffled"])
def test_epsilon_is_of_the_sampling_that_took_place(sampler: str, passes: int, tmp_path: Path) -> None:
    records = watched(tmp_path, nn.Linear(WIDTH, 10), private_training(loaded(sampler), passes))
    protection = verify(records, read_recipe(records), [])[0]
    assert protection.verified == "yes"
    stated = float(protection.said.split("as seen here: ")[1].split(" after")[0])
    releases = SelfComposedDpEvent(PoissonSampledDpEvent(BATCH / RECORDS, GaussianDpEvent(1.0)), 10 * passes)
    if sampler == "shuffled":
        releases = SelfComposedDpEvent(GaussianDpEvent(1.0), passes)
    right = PLDAccountant().compose(releases).get_epsilon(DELTA)
    assert right * 0.995 <= stated <= right * 1.05  # what is measured of the noise may be a little less than stated
    assert 0 < simulated_epsilon(sampler, passes) <= stated


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(
    ("sampler", "twice", "reason"),
    [
        ("replacement", False, "RandomSampler may draw an example more than once"),
        ("Poisson", True, "one drawn batch serves several steps"),
    ],
)
def test_no_epsilon_is_given_for_sampling_that_nobody_accounts_for(
    sampler: str, twice: bool, reason: str, tmp_path: Path
) -> None:
    records = watched(tmp_path, nn.Linear(WIDTH, 10), private_training(loaded(sampler), 1, twice=twice))
    protection = verify(records, read_recipe(records), [])[0]
    assert protection.verified == "not measured"
    assert reason in protection.said


RULES = [
    [SgdRule(0.1)] * 3,
    [SgdRule(0.1, 0.9, weight_decay=0.05)] * 4,
    [SgdRule(0.1, 0.9, nesterov=True, weight_decay=0.05)] * 4,
    [SgdRule(rate, 0.8, 0.3, weight_decay=0.1) for rate in (0.1, 0.05, 0.02)],
]


@pytest.mark.parametrize("rules", RULES)
def test_steps_of_sgd_unroll_to_what_torch_computes(rules: list[SgdRule]) -> None:
    generator = torch.Generator().manual_seed(0)
    sent, *gradients = torch.randn(1 + len(rules), 5, generator=generator, dtype=torch.float64)
    weights = nn.Parameter(sent.clone())
    first = rules[0]
    optimiser = torch.optim.SGD(
        [weights], first.rate, first.momentum, first.dampening, first.weight_decay, nesterov=first.nesterov
    )
    for rule, gradient in zip(rules, gradients, strict=True):
        optimiser.param_groups[0]["lr"] = rule.rate
        weights.grad = gradient
        optimiser.step()
    kept, shares = unroll_sgd(rules)
    expected = kept * sent - sum(share * gradient for share, gradient in zip(shares, gradients, strict=True))
    torch.testing.assert_close(weights.detach(), expected)


@pytest.mark.parametrize("decay", [1e-4, 5e-4, 5e-3, 5e-2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weight_decay_is_taken_off_a_delta(decay: float, momentum: float) -> None:
    module, steps = small_vit(), 2
    picture, label = bundled_pictures(1, size=SIDE)[0].image[None], torch.tensor([3])
    adopted = fedmjp.adopt(module, mean=MEAN, std=STD)
    sent = {name: value.detach().clone() for name, value in module.named_parameters()}
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01, weight_decay=decay, momentum=momentum)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(module((picture - 0.5) / 0.25), label).backward()
        optimiser.step()
    delta = {name: value.detach() - sent[name] for name, value in module.named_parameters()}
    recipe = {"update": "delta", "local_steps": steps, "local_learning_rate": 0.01, "local_momentum": momentum}
    threat = ThreatModel.parse({**recipe, "local_weight_decay": decay})
    upload = adopted.upload(delta, kind="delta")
    recovered = fedmjp.attack("patch_embedding", upload, adopted, threat=threat)
    assert isinstance(recovered, Reconstruction)
    assert metric("psnr").function(recovered.images, picture).item() > 40
    if not momentum:
        labels = fedmjp.attack("labels", upload, adopted, threat=threat)
        assert isinstance(labels, Features)
        assert labels.labels.tolist() == [3]


Optimisers = Callable[[VisionTransformer], list[torch.optim.Optimizer]]


def two_groups(module: VisionTransformer, **rule: float) -> list[dict[str, Any]]:
    """Parameters as recipes group them: no decay of what has one dimension, half of the rate for the positions."""
    flat = [value for value in module.parameters() if value.ndim < 2]
    matrices = [value for value in module.parameters() if value.ndim >= 2 and value is not module.pos_embed]
    positions = {"params": [module.pos_embed], "weight_decay": 0.0, "lr": 0.005}
    return [{"params": matrices, **rule}, {"params": flat, "weight_decay": 0.0}, positions]


def trained_by(optimisers: Optimisers, steps: int) -> Callable[[nn.Module], object]:
    """Steps on one bundled picture, whose rate falls by a tenth after each."""

    def train(module: nn.Module) -> None:
        assert isinstance(module, VisionTransformer)
        picture = bundled_pictures(1, size=SIDE)[0].image[None]
        stepping = optimisers(module)
        for _ in range(steps):
            module.zero_grad()
            F.cross_entropy(module((picture - 0.5) / 0.25), torch.tensor([3])).backward()
            for optimiser in stepping:
                optimiser.step()
                for group in optimiser.param_groups:
                    group["lr"] *= 0.9

    return train


READ: dict[str, tuple[Optimisers, int]] = {
    "decay": (lambda m: [torch.optim.SGD(m.parameters(), 0.01, weight_decay=5e-3)], 3),
    "nesterov": (
        lambda m: [torch.optim.SGD(m.parameters(), 0.01, 0.9, weight_decay=5e-3, nesterov=True)],
        3,
    ),
    "dampening": (lambda m: [torch.optim.SGD(m.parameters(), 0.01, 0.9, 0.5)], 3),
    "groups": (lambda m: [torch.optim.SGD(two_groups(m), 0.01, 0.9, weight_decay=5e-3)], 3),
    "two optimisers": (
        lambda m: [
            torch.optim.SGD([m.pos_embed], 0.02),
            torch.optim.SGD([p for p in m.parameters() if p is not m.pos_embed], 0.01, weight_decay=5e-3),
        ],
        2,
    ),
}


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(
    "step",
    [
        lambda m: torch.optim.AdamW(m.parameters(), 0.005),
        lambda m: torch.optim.AdamW(two_groups(m, lr=0.01), 0.01, weight_decay=0.05),
        lambda m: torch.optim.Adam(two_groups(m, lr=0.01), 0.01),
    ],
)
def test_a_step_of_adam_is_expressed_by_one_group(
    step: Callable[[VisionTransformer], torch.optim.Optimizer], tmp_path: Path
) -> None:
    deltas, recipes = [], []
    for number, optimiser in enumerate([step, lambda m: torch.optim.AdamW(m.parameters(), 0.005, weight_decay=0)]):
        module = small_vit()
        sent = {key: value.detach().clone() for key, value in module.state_dict().items()}
        recipes.append(
            read_recipe(watched(tmp_path / str(number), module, trained_by(lambda m, o=optimiser: [o(m)], 1)))
        )
        deltas.append({key: value.detach() - sent[key] for key, value in module.state_dict().items()})
    assert unreadable(recipes[0], "weights") is None
    threat = threat_of(recipes[0], "weights")
    assert (threat.local_optimiser, threat.local_learning_rate) == ("adamw", 0.005)
    expressed = as_one_group(deltas[0], sent, recipes[0])
    for name, change in deltas[1].items():
        decayed = change - 0.005 * threat.local_weight_decay * sent[name]
        torch.testing.assert_close(expressed[name], decayed, rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("name", READ)
def test_what_an_optimiser_did_is_read_and_taken_into_account(name: str, tmp_path: Path) -> None:
    optimisers, steps = READ[name]
    module = small_vit()
    sent = {key: value.detach().clone() for key, value in module.state_dict().items()}
    recipe = read_recipe(watched(tmp_path, module, trained_by(optimisers, steps)))
    assert recipe["steps"] == steps
    assert recipe["examples"] == 1
    assert unreadable(recipe, "weights") is None
    delta = {key: value.detach() - sent[key] for key, value in module.state_dict().items()}
    network = take_in(module, sent, mean=MEAN, std=STD, side=SIDE)
    threat, update = threat_of(recipe, "weights"), as_one_group(delta, sent, recipe)
    picture = bundled_pictures(1, size=SIDE)[0].image[None]
    private = Private(((picture - 0.5) / 0.25,), picture, torch.tensor([3]))
    made = {one.attack: scored(one, private, network) for one in attempt_all(network, update, threat) if one.ran}
    assert max(made[attack]["psnr_worst_case"] for attack in ("patch_embedding", "patch_embedding_wiener")) > 40
    if not threat.local_momentum:
        assert made["labels"]["labels_right"] == 1


def clip(module: nn.Module, images: Tensor, labels: Tensor) -> None:
    F.cross_entropy(module(images), labels).backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def accumulate(module: nn.Module, images: Tensor, labels: Tensor) -> None:
    for few, of in zip(images.split(2), labels.split(2), strict=True):
        F.cross_entropy(module(few), of).backward()


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("backward", [clip, accumulate])
def test_a_factor_on_the_gradient_leaves_labels_and_features_as_they_are(backward: Any, tmp_path: Path) -> None:
    module, labels = small_vit(), torch.tensor([3, 3, 1, 5])
    pictures = torch.stack([picture.image for picture in bundled_pictures(len(labels), size=SIDE)])
    sent = {key: value.detach().clone() for key, value in module.state_dict().items()}

    def train(trained: nn.Module) -> None:
        backward(trained, (pictures - 0.5) / 0.25, labels)
        torch.optim.SGD(trained.parameters(), 0.1).step()

    recipe = read_recipe(watched(tmp_path, module, train))
    delta = {key: value.detach() - sent[key] for key, value in module.state_dict().items()}
    network = take_in(module, sent, mean=MEAN, std=STD, side=SIDE)
    threat, update = threat_of(recipe, "weights"), as_one_group(delta, sent, recipe)
    private = Private(((pictures - 0.5) / 0.25,), pictures, labels)
    made = {one.attack: scored(one, private, network) for one in attempt_all(network, update, threat) if one.ran}
    assert made["labels"]["labels_right"] == made["class_token"]["labels_right"] == 1
    assert made["class_token"]["features_near"] == len(labels)


class Ours(torch.optim.SGD):
    """An optimiser that is not torch's."""


UNREAD: dict[str, tuple[Optimisers, int, str]] = {
    "Adam": (lambda m: [torch.optim.Adam(m.parameters(), 1e-3)], 2, "moved by 2 steps of Adam: the change is no sum"),
    "Adafactor": (lambda m: [torch.optim.Adafactor(m.parameters())], 1, "1 steps of Adafactor: the change is no sum"),
    "L2 in Adam": (lambda m: [torch.optim.Adam(m.parameters(), weight_decay=0.1)], 1, "the change is no sum"),
    "somebody's": (lambda m: [Ours(m.parameters(), 0.1)], 1, "which is not torch's"),
    "uneven": (
        lambda m: [torch.optim.SGD([{"params": [m.pos_embed], "momentum": 0.9}, {"params": [m.cls_token]}], 0.1)],
        2,
        "its parameter groups weigh the gradients of the 2 steps differently",
    ),
}


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("name", UNREAD)
def test_a_change_that_is_no_sum_of_gradients_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    optimisers, steps, reason = UNREAD[name]
    recipe = read_recipe(watched(tmp_path, small_vit(), trained_by(optimisers, steps)))
    assert reason in str(unreadable(recipe, "weights"))


@pytest.mark.usefixtures("hooks")
def test_an_example_that_enters_again_counts_once(tmp_path: Path) -> None:
    inputs, labels = torch.rand(6, 30), torch.arange(6)

    def train(module: nn.Module) -> None:
        for first in (0, 3, 0, 3, 0):
            F.cross_entropy(module(inputs[first : first + 3]), labels[first : first + 3]).backward()

    records = watched(tmp_path, nn.Linear(30, 10), train)
    recipe, private = read_recipe(records), read_private(records.evaluator, "m", [0.0], [1.0])
    assert (recipe["examples"], recipe["passes"]) == (6, 2.5)
    assert private is not None
    torch.testing.assert_close(torch.cat(private.entered), inputs)
    assert private.labels is not None
    assert private.labels.tolist() == labels.tolist()


@pytest.mark.usefixtures("hooks")
def test_momentum_of_an_earlier_round_is_refused(tmp_path: Path) -> None:
    module = small_vit()
    stays = torch.optim.SGD(module.parameters(), 0.01, 0.9)
    for number in range(2):
        recipe = read_recipe(watched(tmp_path / str(number), module, trained_by(lambda _: [stays], 1)))
        reason = unreadable(recipe, "weights")
        assert (reason is None) is (number == 0)
    assert "kept what it had added up in earlier rounds" in str(reason)


class Divides(nn.Module):
    """A network that takes bytes and scales them itself, as some apps do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_vit()

    def forward(self, pixels: Tensor) -> Any:
        return self.inner(pixels.float() / 255)


RANGES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float]]] = {
    "0 to 1": (lambda x: x, (0, 1)),
    "0 to 255": (lambda x: 255 * x, (0, 255)),
    "-1 to 1": (lambda x: 2 * x - 1, (-1, 1)),
    "0 to 255, normalised": (lambda x: transforms.Normalize([127.5] * 3, [127.5] * 3)(255 * x), (0, 255)),
    "each standardised": (lambda x: (x - x.mean()) / x.std(), (-2, 2)),
    "bytes": (lambda x: (255 * x).round().byte(), (0, 255)),
}


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("name", RANGES)
def test_pictures_are_taken_in_the_apps_own_range(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_normalisations", [])
    scale, expected = RANGES[name]
    module = Divides() if name == "bytes" else small_vit()
    picture = bundled_pictures(1, size=SIDE)[0].image[None]
    entered = scale(picture)

    def train(trained: nn.Module) -> None:
        F.cross_entropy(trained(entered), torch.tensor([3])).backward()

    records = watched(tmp_path, module, train)
    recipe = read_recipe(records)
    assert recipe["range"] == expected
    mean, std = channels(recipe)
    private = read_private(records.evaluator, "m", mean, std)
    assert private is not None
    assert private.pictures is not None
    assert private.pictures.min() >= 0
    assert private.pictures.max() <= 1
    share = torch.corrcoef(torch.stack([private.pictures.flatten(), picture.flatten()]))[0, 1]
    assert share > 0.99
    if name == "bytes":
        return  # the network scales once more, which is not read: its control says that nothing is known of pictures
    update = {key: value.grad for key, value in module.named_parameters() if value.grad is not None}
    network = take_in(module, {}, mean=mean, std=std, side=SIDE)
    made = {one.attack: scored(one, private, network) for one in attempt_all(network, update, ThreatModel()) if one.ran}
    assert made["patch_embedding"]["psnr_worst_case"] > 50
    assert made["patch_embedding"]["floor_median"] < 30


@pytest.mark.parametrize("strength", [0.0, 5e-4, 5e-2])
def test_a_penalty_on_the_weights_is_found_in_the_update_itself(strength: float) -> None:
    module = small_vit()
    picture = bundled_pictures(1, size=SIDE)[0].image[None]
    loss = F.cross_entropy(module((picture - 0.5) / 0.25), torch.tensor([3]))
    (loss + strength * sum(value.square().sum() for value in module.parameters())).backward()
    update = {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}
    network = take_in(module, {}, mean=MEAN, std=STD, side=SIDE)
    multiple, departure = decay_in_loss(network, update, ThreatModel())
    assert multiple == pytest.approx(2 * strength, rel=1e-3)
    assert departure is None
    frozen = {**update, "pos_embed": torch.zeros_like(update["pos_embed"])}
    assert decay_in_loss(network, frozen, ThreatModel()) == (0.0, None)
    update["patch_embed.proj.bias"] = update["patch_embed.proj.bias"] + 0.1 * torch.ones(48)
    assert "no gradient of one step" in str(decay_in_loss(network, update, ThreatModel())[1])


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize(
    ("answer", "kind", "neither"),
    [
        (lambda sent, trained, _: trained, "weights", False),
        (lambda sent, trained, _: trained - sent, "weights", False),
        (lambda sent, trained, _: sent - trained, "weights", False),
        (lambda sent, trained, _: 0.1 * (trained - sent), "weights", False),
        (lambda sent, trained, gradient: gradient, "gradient", False),
        (lambda sent, trained, gradient: 0.25 * gradient, "gradient", False),
        (lambda sent, trained, gradient: trained - 0.8 * sent, "gradient", True),
    ],
)
def test_changes_of_weights_are_told_from_gradients(
    answer: Callable[[Tensor, Tensor, Tensor], Tensor], kind: str, neither: bool, tmp_path: Path
) -> None:
    module, records = nn.Linear(30, 10), Records(tmp_path)
    sent = {name: value.detach().clone() for name, value in module.named_parameters()}
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05)
    message: Any = SimpleNamespace(
        metadata=SimpleNamespace(message_id="m1", dst_node_id=1),
        content=RecordDict({"arrays": ArrayRecord(dict(sent))}),
    )
    with watching.MessageWatch(records.evaluator, records.model, message) as watch:
        F.cross_entropy(module.train()(torch.rand(4, 30)), torch.arange(4)).backward()
        optimiser.step()
    left = {
        name: answer(sent[name], value.detach(), value.grad)
        for name, value in module.named_parameters()
        if value.grad is not None
    }
    reply: Any = SimpleNamespace(has_error=lambda: False, content=RecordDict({"arrays": ArrayRecord(left)}))
    watch.keep(reply)
    wire_of(records, 1, sent, left)
    (only,) = read_answers(records)
    assert only.kind == kind
    assert read_recipe(records)["sends_neither"] is neither
    if kind == "weights":
        change = module.weight.detach() - sent["weight"]
        assert torch.nn.functional.cosine_similarity(only.update["weight"].flatten(), change.flatten(), dim=0) > 0.99


@pytest.mark.usefixtures("hooks")
def test_a_gradient_penalty_is_told(tmp_path: Path) -> None:
    def train(module: nn.Module) -> None:
        inputs = torch.rand(2, 30, requires_grad=True)
        loss = F.cross_entropy(module(inputs).tanh(), torch.arange(2))
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + slope.square().sum()).backward()

    recipe = read_recipe(watched(tmp_path, nn.Linear(30, 10), train))
    assert "gradients of gradients" in str(departure_of(recipe))


@pytest.mark.parametrize(("noisy", "told"), [(False, True), (True, False)])
def test_other_weights_in_an_answer_are_told_from_noise(noisy: bool, told: bool) -> None:
    change = Change(length=1.0, factor=0.1, added=0.5, entries=1000, rounding=1e-6)
    repeats = Repeats(is_alike=True, deviation=0.01, share=0.3 if noisy else 0.0)
    assert ("an average with earlier weights" in str(change.departure(repeats))) is told


def test_an_average_over_steps_is_read_as_the_change_that_it_is() -> None:
    """torch's own average of weights over SGD's steps with decay: a sum of gradients with other shares."""
    module = small_vit()
    picture = bundled_pictures(1, size=SIDE)[0].image[None]
    sent = {name: value.detach().clone() for name, value in module.state_dict().items()}
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(module)
    optimiser = torch.optim.SGD(module.parameters(), 0.01, weight_decay=5e-3)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(module((picture - 0.5) / 0.25), torch.tensor([3])).backward()
        optimiser.step()
        average.update_parameters(module)
    change = {name: value.detach() - sent[name] for name, value in average.module.state_dict().items()}
    network = take_in(module, sent, mean=MEAN, std=STD, side=SIDE)
    threat = ThreatModel(update="delta", local_steps=3, local_learning_rate=0.01)
    multiple, _ = decay_in_loss(network, change, threat)
    assert multiple < 0  # decay makes weights smaller
    update = {name: without_decay(tensor, sent[name], 1 + multiple) for name, tensor in change.items()}
    private = Private(((picture - 0.5) / 0.25,), picture, torch.tensor([3]))
    made = {one.attack: scored(one, private, network) for one in attempt_all(network, update, threat) if one.ran}
    assert made["patch_embedding_wiener"]["psnr_worst_case"] > 35


def wire_of(records: Records, number: int, sent: Mapping[str, Tensor], left: Mapping[str, Tensor]) -> None:
    """Write down what the server saw of one round of one client."""
    records.server.mkdir(exist_ok=True)
    about: dict[str, Any] = {"type": "train", "node": 1, "round": number, "records": {}}
    asked = {"way": "down", "id": f"m{number}", "file": f"sent-{number}.npz", **about}
    answered = {"way": "up", "id": f"r{number}", "reply_to": f"m{number}", "file": f"left-{number}.npz", **about}
    for state, line in ((sent, asked), (left, answered)):
        arrays: dict[str, Any] = {f"arrays/{name}": value.numpy() for name, value in state.items()}
        np.savez(records.server / str(line["file"]), **arrays)
    with (records.server / "wire.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (asked, answered))


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("leaking", [1, 3])
def test_every_round_is_attacked_and_the_worst_is_told(leaking: int, tmp_path: Path) -> None:
    module, generator = small_vit(), torch.Generator().manual_seed(0)
    picture = bundled_pictures(1, size=SIDE)[0].image[None]

    def train(trained: nn.Module) -> None:
        optimiser = torch.optim.SGD(trained.parameters(), 0.1 / number, weight_decay=0.05)
        F.cross_entropy(trained(255 * picture), torch.tensor([3])).backward()
        optimiser.step()
        optimiser.zero_grad()

    for number in (1, 2, 3):
        sent = {name: value.detach().clone() for name, value in module.state_dict().items()}
        records = watched(tmp_path, module, train, message_id=f"m{number}")
        left = {name: value.detach().clone() for name, value in module.state_dict().items()}
        if number != leaking:  # so much noise that nothing is left of the step
            left = {name: value + torch.randn(value.shape, generator=generator) for name, value in left.items()}
        wire_of(records, number, sent, left)
        module = small_vit()
    findings = examine("small", records, AppRun(1, 1.0, None), stand_in=False, on_stage=lambda _: None)
    report = findings.report
    assert {row["upload"] for row in report["recovered"]} == {f"client 1, round {number}" for number in (1, 2, 3)}
    assert report["recipe"]["range"] == (0, 255)
    first, *others = (leak for leak in report["leaks"] if "come back" in leak["what"])
    assert f"1 of 1 pictures of client 1, round {leaking} come back" in first["what"]
    assert not others
    assert float(first["evidence"].split(": ")[1].split(" dB")[0]) > 25
    assert exit_code(report) == 1


@pytest.mark.usefixtures("hooks")
def test_what_hooks_cannot_see_does_not_stop_an_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a tensor of an unknown kind")

    for name in ("see_call", "see_loss", "see_step"):
        monkeypatch.setattr(watching.MessageWatch, name, fail)
    module = small_vit()
    before = module.get_parameter("head.weight").detach().clone()
    watched(tmp_path, module, trained_by(lambda m: [torch.optim.SGD(m.parameters(), 0.1)], 1))
    assert not torch.equal(before, module.get_parameter("head.weight"))
    assert "a tensor of an unknown kind" in (tmp_path / "evaluator" / "notes.jsonl").read_text()


def test_an_audit_at_the_site_watches_one_client_and_changes_no_answer(
    hooks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = torch.rand(2, 5, generator=torch.Generator().manual_seed(0))
    net = torch.nn.Linear(5, 3)
    sent = {name: value.clone() for name, value in net.state_dict().items()}
    output = tmp_path / "report"
    examined: list[dict[str, Any]] = []

    def examine(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "records" / "server" / "wire.jsonl").read_text().splitlines()]
        with np.load(folder / "records" / "evaluator" / "message.npz") as kept:
            examined.append({"ways": [line["way"] for line in lines], "batch": kept["0/input-0"]})
        assert (folder / "records").stat().st_mode & 0o077 == 0

    monkeypatch.setattr(site, "_examine_apart", examine)

    def app(message: Message, _context: Context) -> Message:
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        torch.nn.functional.cross_entropy(net(picture), torch.tensor([0, 2])).backward()
        optimiser.step()
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict())}), reply_to=message)

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    mod = AuditMod(output, rounds=1)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    for node in (1, 2, 1):  # a second client, and a second round, are not watched
        message = Message(RecordDict({"arrays": ArrayRecord(sent)}), message_type="train", dst_node_id=node)
        message.metadata.__dict__["_message_id"] = "message"
        arrays: Any = mod(message, context, app).content["arrays"]
        torch.testing.assert_close(arrays.to_torch_state_dict(), net.state_dict())
    assert [found["ways"] for found in examined] == [["down", "up"]]
    np.testing.assert_array_equal(examined[0]["batch"], picture.numpy())
    assert not (output / "records").exists()  # private batches go with the last watched round
