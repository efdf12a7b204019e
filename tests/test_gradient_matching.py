"""Gradient matching: its fast gradients against plain autograd, its search, its contract."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import LayerScale
from torch import Tensor

from fedmjp.attacks import gradient_matching as subject
from fedmjp.attacks import matching_loss
from fedmjp.attacks.gradient_at_tokens import is_plain
from fedmjp.attacks.gradient_matching import GradientMatching, search
from fedmjp.attacks.grey import LEVEL
from fedmjp.attacks.matching_gradients import Candidates, PerCandidateGradients, SimulatedSteps, twice_differentiable
from fedmjp.attacks.matching_loss import Loss, patch_prior, patch_seams, total_variation
from fedmjp.attacks.natural_patches import NaturalPatches
from fedmjp.attacks.weight_products import weight_products
from fedmjp.config import ModelConfig
from fedmjp.data.selection import open_source
from fedmjp.errors import AttackFailedError, AttackNotApplicableError, ConfigError, UnknownNameError
from fedmjp.metrics import METRICS
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import from_patches
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction, Upload
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import gradient
from tests.attacks import protected

SIZE = {"image_size": 32, "patch_size": 8, "classes": 10}  # 16 patches: small enough for second derivatives
PATCHES = 16
EMBEDDING = re.compile("patch_embed|pos_embed|cls_token|unknown_embedding")
FAST: dict[str, Any] = {"iterations": 4}
Option = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small only wait for each other when they are shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def blocks(count: int = 2, defence: str = "none", name: str = "deit_tiny") -> VitClassifier:
    model = build_vit(ModelConfig.parse({"name": name, "unknown_embedding": defence == "mjp", **SIZE}))
    del model.backbone.blocks[count:]
    return model


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    """(8, 3, 32, 32), bundled."""
    source = open_source("bundled", size=32, classes=1000)
    return torch.stack([source.load(name).image for name in source.names()])


@pytest.fixture(scope="module")
def rocket() -> Tensor:
    return open_source("bundled", size=32, classes=1000).load("rocket").image[None]


def batch_of(images: Tensor, masked: int = 0) -> PrivateBatch:
    """Pictures with their first patches marked as masked; not shuffled, which no gradient shows."""
    patches = (images.shape[-1] // 8) ** 2
    mask = (torch.arange(patches) < masked).expand(len(images), -1)
    source = torch.arange(patches).expand(len(images), -1)
    labels = torch.arange(len(images)) * 3 % 10
    pictures = tuple(map(str, range(len(images))))
    return PrivateBatch(images, images.clone(), mask, source, labels, pictures, Picture.CLEAN)


def threat_of(images: Tensor, **values: Any) -> ThreatModel:
    return ThreatModel.parse({"batch_size": len(images), **values})


def upload_of(model: VitClassifier, batch: PrivateBatch, threat: ThreatModel) -> Upload:
    labels = tuple(batch.labels.tolist()) if threat.labels_known else None
    tensors = gradient(model, batch) if threat.update == "gradient" else trained(model, batch, threat)
    return Upload(tensors, threat.update, len(batch.pictures), 1, 0, "weights", labels)


def trained(model: VitClassifier, batch: PrivateBatch, threat: ThreatModel) -> dict[str, Tensor]:
    """A weight delta, by torch's own optimiser."""
    client = copy.deepcopy(model)
    optimiser = torch.optim.SGD(client.parameters(), lr=threat.local_learning_rate)
    for _ in range(threat.local_steps):
        optimiser.zero_grad()
        F.cross_entropy(client(batch.clean, batch.mask if model.defended else None), batch.labels).backward()
        optimiser.step()
    after = dict(client.named_parameters())
    return {name: (after[name] - weight).detach() for name, weight in model.named_parameters()}


def attacked(
    model: VitClassifier, images: Tensor, options: Option, masked: int = 0, seed: int = 0, **values: Any
) -> Reconstruction:
    threat = threat_of(images, **values)
    upload = upload_of(model, batch_of(images, masked), threat)
    generator = torch.Generator().manual_seed(seed)
    return GradientMatching(options).run([upload], model, threat, generator=generator)[0]


def psnr(made: Tensor, truth: Tensor) -> float:
    return float(METRICS["psnr"].function(made, truth).mean())


# The gradients of candidates


def plain_gradients(
    model: VitClassifier, images: Tensor, labels: Tensor, mask: Tensor | None, matched: list[str], smoothing: float
) -> list[Tensor]:
    twin = twice_differentiable(model).requires_grad_()
    loss = F.cross_entropy(twin(images, mask), labels, label_smoothing=smoothing)
    return list(torch.autograd.grad(loss, [twin.get_parameter(name) for name in matched], create_graph=True))


def drawn(
    model: VitClassifier, matched: list[str], batch: int, generator: torch.Generator
) -> tuple[Candidates, dict[str, Tensor]]:
    """Two random candidates, with random targets."""
    mask = torch.rand(2, batch, PATCHES, generator=generator) < 0.4 if model.defended else None
    kind = model.mean.dtype
    images = torch.rand(2, batch, 3, 32, 32, generator=generator, dtype=kind).requires_grad_()
    labels = torch.randint(10, (2, batch), generator=generator)
    shapes = {name: (2, *model.get_parameter(name).shape) for name in matched}
    targets = {n: torch.randn(shape, generator=generator, dtype=kind) for n, shape in shapes.items()}
    return Candidates(images, labels, mask), targets


@pytest.mark.parametrize("tensors", ["all", "of the embedding"])
@pytest.mark.parametrize(("batch", "smoothing"), [(1, 0.0), (3, 0.2)])
@pytest.mark.parametrize("defence", ["none", "mjp"])
def test_gradients_per_candidate_equal_plain_autograd(
    defence: str, batch: int, smoothing: float, tensors: str, generator: torch.Generator
) -> None:
    model = blocks(2, defence).double()
    matched = [name for name, _ in model.named_parameters() if tensors == "all" or EMBEDDING.search(name)]
    candidates, targets = drawn(model, matched, batch, generator)
    made = PerCandidateGradients(model, matched, label_smoothing=smoothing).agreement(candidates, targets)
    for index in range(2):
        mask = None if candidates.mask is None else candidates.mask[index]
        plain = plain_gradients(model, candidates.images[index], candidates.labels[index], mask, matched, smoothing)
        plain = [made.scale[index] * gradient for gradient in plain]
        products = torch.stack([(g * targets[n][index]).sum() for n, g in zip(matched, plain, strict=True)])
        squares = torch.stack([g.square().sum() for g in plain])
        torch.testing.assert_close(made.products[index], products, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(made.squares[index], squares, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(made.positions[index], plain[matched.index(names.POSITION_EMBEDDING)][0])
        ours, theirs = (
            torch.autograd.grad(p.sum() + s.sum(), candidates.images, retain_graph=True)[0]
            for p, s in ((made.products[index], made.squares[index]), (products, squares))
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_gradients_per_candidate_in_float32_equal_plain_autograd_up_to_rounding(generator: torch.Generator) -> None:
    model, matched = blocks(2), [names.PATCH_WEIGHT, names.POSITION_EMBEDDING]
    candidates, targets = drawn(model, matched, 1, generator)
    made = PerCandidateGradients(model, matched).agreement(candidates, targets)
    plain = plain_gradients(model, candidates.images[0], candidates.labels[0], None, matched, 0.0)
    plain = [made.scale[0] * gradient for gradient in plain]
    products = torch.stack([(g * targets[n][0]).sum() for n, g in zip(matched, plain, strict=True)])
    torch.testing.assert_close(made.products[0], products, rtol=1e-4, atol=1e-4)
    ours, theirs = (
        torch.autograd.grad(each.sum(), candidates.images, retain_graph=True)[0]
        for each in (made.products[0], products)
    )
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_only_plain_transformers_are_written_out(generator: torch.Generator) -> None:
    plain, pooled, scaled = blocks(1), blocks(1), blocks(1)
    pooled.backbone.global_pool = "avg"
    scaled.backbone.blocks[0].ls1 = LayerScale(192, init_values=0.5)
    assert is_plain(plain.backbone)
    assert not is_plain(blocks(1).train().backbone)
    matched = [names.PATCH_WEIGHT, names.POSITION_EMBEDDING]
    for model in (pooled, scaled):
        assert not is_plain(model.backbone)
        model.double()
        candidates, targets = drawn(model, matched, 1, generator)
        made = PerCandidateGradients(model, matched).agreement(candidates, targets)
        gradients = plain_gradients(model, candidates.images[0], candidates.labels[0], None, matched, 0.0)
        torch.testing.assert_close(made.positions[0], made.scale[0] * gradients[1][0])


@pytest.mark.parametrize("rows", [2, 9], ids=["from rows", "formed"])
def test_products_of_weight_gradients_and_their_derivatives(rows: int, generator: torch.Generator) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs, outputs, target = random(3, rows, 6), random(3, rows, 5), random(3, 5, 6).detach()
    gradients = torch.einsum("cro,cri->coi", outputs, inputs)
    product, square = weight_products(inputs, outputs, target)
    torch.testing.assert_close(product, (gradients * target).sum((1, 2)))
    torch.testing.assert_close(square, gradients.square().sum((1, 2)))
    assert torch.autograd.gradcheck(lambda a, b: weight_products(a, b, target), (inputs, outputs))


@pytest.mark.parametrize("defence", ["none", "mjp"])
def test_one_simulated_step_equals_the_gradient(defence: str, generator: torch.Generator) -> None:
    model = blocks(1, defence).double()
    matched = [names.PATCH_WEIGHT, names.POSITION_EMBEDDING, *([names.UNKNOWN_EMBEDDING] * (defence == "mjp"))]
    candidates, targets = drawn(model, matched, 2, generator)
    fast = PerCandidateGradients(model, matched, label_smoothing=0.1).agreement(candidates, targets)
    simulated = SimulatedSteps(model, matched, steps=1, learning_rate=0.1, label_smoothing=0.1)
    slow = simulated.agreement(candidates, targets)
    scale = fast.scale[:, None]
    torch.testing.assert_close(fast.products, slow.products * scale)
    torch.testing.assert_close(fast.squares, slow.squares * scale**2)
    torch.testing.assert_close(fast.positions, slow.positions * scale[:, :, None])


# The loss


class Truth:
    """A first attack that is told the answer: the search then starts where the loss should vanish."""

    role = "attack"
    reveals = "pictures"
    uses_natural_patches = False
    images = torch.empty(0)

    def tensors(self, model: VitClassifier) -> list[str]:
        return []

    def refusal(self, model: VitClassifier, threat: ThreatModel) -> None:
        return None

    def run(self, uploads: Any, model: Any, threat: Any, *, generator: Any) -> list[Reconstruction]:
        return [Reconstruction(self.images) for _ in uploads]


class FakeRegistry:
    """Only knows the truth."""

    def get(self, name: str) -> type[Truth]:
        del name
        return Truth


@pytest.mark.parametrize("objective", ["cosine", "l2"])
@pytest.mark.parametrize(
    ("count", "defence", "values"),
    [
        (1, "none", {}),
        (3, "none", {}),
        (1, "mjp", {}),
        (1, "none", {"update": "delta", "local_learning_rate": 0.1}),
        (1, "mjp", {"update": "delta", "local_steps": 2, "local_learning_rate": 0.1}),
        (2, "none", {"update": "delta", "local_steps": 3, "local_learning_rate": 0.1}),
    ],
    ids=["one", "batch", "masked", "delta", "masked delta of steps", "batch delta of steps"],
)
def test_loss_vanishes_at_the_truth(
    objective: str, count: int, defence: str, values: Option, pictures: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "ATTACKS", FakeRegistry())
    model = blocks(1, defence)
    batch = batch_of(pictures[:count])
    monkeypatch.setattr(Truth, "images", batch.clean[batch.labels.argsort()])
    options = {"start": "truth", "iterations": 1, "total_variation": 0, "tensors": "all", "objective": objective}
    made = attacked(model, pictures[:count], options, masked=5, labels_known=True, **values)
    assert abs(made.diagnostics["loss"]) < 1e-5
    monkeypatch.setattr(Truth, "images", torch.full((count, 3, 32, 32), LEVEL))
    elsewhere = attacked(model, pictures[:count], options, masked=5, labels_known=True, **values)
    assert elsewhere.diagnostics["loss"] > 0.01


def test_total_variation_and_seams_of_steps_are_their_heights() -> None:
    step = torch.zeros(1, 1, 3, 32, 32)
    step[..., 8:] = 0.5  # one seam of three, one of 31 differences
    assert total_variation(step).item() == pytest.approx(0.5 / 31)
    assert patch_seams(step, 8).item() == pytest.approx(0.25 / 3)
    inside = torch.zeros(1, 1, 3, 32, 32)
    inside[..., 4:] = 0.5
    assert patch_seams(inside, 8).item() == 0


def test_patch_prior_is_about_one_on_patches_of_its_own_kind(generator: torch.Generator) -> None:
    model = blocks(1)
    natural = NaturalPatches.for_model(model)
    root = torch.linalg.cholesky(natural.covariance)
    drawn = natural.mean + torch.randn(8, PATCHES, 192, generator=generator, dtype=torch.float64) @ root.T
    images = from_patches(drawn, 32, 8).float()[None]
    noise = torch.rand(1, 8, 3, 32, 32, generator=generator)
    prior = patch_prior(model)
    assert prior(images).item() < 1.1
    assert prior(noise).item() > 10


# The search


def test_search_returns_the_best_iterate_it_visited() -> None:
    visited: list[Tensor] = []

    def bumpy(images: Tensor) -> Tensor:
        losses = torch.sin(40 * images.flatten(1)).sum(1)
        visited.append(losses.detach())
        return losses

    start = torch.tensor([0.2, 0.7]).view(2, 1, 1, 1, 1)
    found = search(start, bumpy, iterations=15, step_size=0.3, on_step=lambda *_: None)
    assert torch.equal(found.losses, torch.stack(visited).amin(0))
    assert torch.equal(bumpy(found.images), found.losses)
    assert found.iterations == 15
    assert found.images.min() >= 0
    assert found.images.max() <= 1


def test_search_keeps_the_best_of_a_candidate_that_diverges_and_the_others() -> None:
    calls: list[int] = []

    def breaks(images: Tensor) -> Tensor:
        calls.append(1)
        bad = torch.tensor([float("nan") if len(calls) == 3 else 1.0, 1.0])
        return (images.flatten(1) - 0.5).square().sum(1) * bad

    found = search(torch.zeros(2, 1, 1, 1, 1), breaks, iterations=40, step_size=0.1, on_step=lambda *_: None)
    assert 0.05 < found.losses[0] < 0.25, "lower than at the start, and not what came later"
    assert found.losses[1] < 0.01


def test_all_restarts_diverging_is_a_failure(pictures: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching_loss, "total_variation", lambda images: images.flatten(1).mean(1) * float("nan"))
    with pytest.raises(AttackFailedError, match="every search diverged"):
        attacked(blocks(1), pictures[:1], {**FAST, "restarts": 2})


def test_the_budget_of_seconds_stops_and_makes_one_iteration_at_least(pictures: Tensor) -> None:
    made = attacked(blocks(1), pictures[:1], {"seconds": 1e-6})
    assert made.diagnostics["iterations"] == 1
    made = attacked(blocks(1), pictures[:1], {"seconds": 0.5, "iterations": 10**6})
    assert 1 < made.diagnostics["iterations"] < 10**6


def test_progress_counts_the_iterations_of_all_searches(pictures: Tensor) -> None:
    attack = GradientMatching({"iterations": 3, "restarts": 2, "parallel": 1})
    seen: list[tuple[int, int, float]] = []
    attack.on_progress = lambda *step: seen.append(step)
    model, threat = blocks(1), ThreatModel()
    upload = upload_of(model, batch_of(pictures[:1]), threat)
    attack.run([upload], model, threat, generator=torch.Generator().manual_seed(0))
    assert [step[:2] for step in seen] == [(done, 6) for done in range(1, 7)]


# The attack


@pytest.mark.slow
def test_it_recovers_the_picture_behind_a_whole_model(undefended: VitClassifier, threat: ThreatModel) -> None:
    image = open_source("bundled", size=64, classes=1000).load("rocket").image[None]
    upload = upload_of(undefended, batch_of(image), threat)
    attack = GradientMatching({"iterations": 100, "step_size": 0.03})
    made = attack.run([upload], undefended, threat, generator=torch.Generator().manual_seed(0))[0]
    assert psnr(made.images, image) > psnr(torch.full_like(image, LEVEL), image) + 5


def test_it_beats_grey_in_few_iterations(rocket: Tensor) -> None:
    made = attacked(blocks(4), rocket, {"iterations": 50, "step_size": 0.03})
    assert psnr(made.images, rocket) > psnr(torch.full_like(rocket, LEVEL), rocket) + 5


def test_it_starts_from_another_attacks_reconstruction(pictures: Tensor) -> None:
    model = blocks(2)
    made = attacked(model, pictures[:1], {"start": "patch_embedding", "iterations": 1})
    assert psnr(made.images, pictures[:1]) > 40
    grey = attacked(model, pictures[:1], {"iterations": 1})
    assert torch.equal(grey.images, torch.full((1, 3, 32, 32), LEVEL))
    noise = attacked(model, pictures[:1], {"start": "noise", "iterations": 1})
    assert noise.images.std() == pytest.approx(0.22, abs=0.02)


def test_more_restarts_are_never_worse_by_their_own_loss(pictures: Tensor) -> None:
    model = blocks(1)
    options = {**FAST, "start": "noise", "parallel": 2}
    one, three = (attacked(model, pictures[:1], {**options, "restarts": restarts}) for restarts in (1, 3))
    assert three.diagnostics["loss"] <= one.diagnostics["loss"] + 1e-6
    assert three.diagnostics["restarts"] == 3


def test_the_mask_of_a_defended_model_is_read(pictures: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "ATTACKS", FakeRegistry())
    monkeypatch.setattr(Truth, "images", pictures[:1])
    model = blocks(2, "mjp")
    options = {"start": "truth", "iterations": 1, "total_variation": 0}
    read, ignored = (
        attacked(model, pictures[:1], {**options, "mask": mask}, masked=8).diagnostics["loss"]
        for mask in ("read", "ignore")
    )
    assert read < 1e-5
    assert ignored > 1e-4


@pytest.mark.parametrize("noise", [1e-4, 3e-3])
def test_the_mask_is_read_through_noise(noise: float, pictures: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[Loss] = []
    monkeypatch.setattr(subject, "Loss", lambda *given: losses.append(Loss(*given)) or losses[-1])
    model, batch = blocks(2, "mjp"), batch_of(pictures[:1], masked=6)
    threat = threat_of(batch.clean, defences=f"gaussian:noise={noise}")
    upload = protected(upload_of(model, batch, threat), model, threat)
    assert bool((upload.tensors[names.POSITION_EMBEDDING] != 0).all()), "no row is empty"
    GradientMatching(FAST).run([upload], model, threat, generator=torch.Generator())
    assert torch.equal(losses[0]._mask, batch.mask[None])
    assert torch.equal(losses[0]._visible[..., 0], ~batch.mask)


def test_where_noise_hides_the_mask_matching_fails_and_says_so(pictures: Tensor) -> None:
    model, batch = blocks(2, "mjp"), batch_of(pictures[:1], masked=6)
    threat = threat_of(batch.clean, defences="gaussian:noise=0.3")
    upload = protected(upload_of(model, batch, threat), model, threat)
    with pytest.raises(AttackFailedError, match="masked"):
        GradientMatching(FAST).run([upload], model, threat, generator=torch.Generator())


def test_a_mask_that_is_not_read_is_a_caveat(defended: VitClassifier, undefended: VitClassifier) -> None:
    assert GradientMatching({"mask": "ignore"}).caveat(defended, ThreatModel())
    assert GradientMatching().caveat(defended, ThreatModel(batch_size=2))
    assert GradientMatching().caveat(defended, ThreatModel()) is None
    assert GradientMatching({"mask": "ignore"}).caveat(undefended, ThreatModel()) is None


@pytest.mark.parametrize("options", [{}, {"start": "noise", "tensors": "all", "objective": "l2", "patch_prior": 0.1}])
def test_results_are_repeatable_and_independent_of_neighbours(options: Option, pictures: Tensor) -> None:
    model, threat = blocks(2, "mjp"), ThreatModel()
    uploads = [upload_of(model, batch_of(pictures[index : index + 1], 3 + index), threat) for index in range(3)]
    before = copy.deepcopy([dict(upload.tensors) for upload in uploads])
    weights = copy.deepcopy(model.state_dict())
    attack = GradientMatching({**FAST, "parallel": 3, **options})
    runs = [attack.run(uploads, model, threat, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    alone = attack.run(uploads[1:2], model, threat, generator=torch.Generator().manual_seed(1))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first.images, second.images)
    assert torch.allclose(alone[0].images, runs[0][1].images, atol=1e-5)
    for upload, tensors in zip(uploads, before, strict=True):
        assert all(torch.equal(upload.tensors[key], tensors[key]) for key in tensors)
    assert all(torch.equal(model.state_dict()[key], weights[key]) for key in weights)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("defence", ["none", "mjp"])
def test_batches_and_deltas_are_attacked(defence: str, pictures: Tensor) -> None:
    model = blocks(1, defence)
    made = attacked(model, pictures[:3], FAST, masked=4)
    assert made.images.shape == (3, 3, 32, 32)
    made = attacked(model, pictures[:1], FAST, masked=4, update="delta", local_steps=2)
    assert made.images.shape == (1, 3, 32, 32)


def test_gradients_too_small_to_be_squared_are_matched(pictures: Tensor) -> None:
    model, threat = blocks(2), ThreatModel(labels_known=True)
    upload = upload_of(model, batch_of(pictures[:1]), threat)
    tiny = Upload({n: t.double() * 1e-28 for n, t in upload.tensors.items()}, "gradient", 1, 1, 0, "weights", (0,))
    attack = GradientMatching({"iterations": 20})
    made = [attack.run([each], model, threat, generator=torch.Generator().manual_seed(0))[0] for each in (upload, tiny)]
    assert torch.allclose(made[0].images, made[1].images, atol=1e-2)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "l1"}, "objective"),
        ({"iterations": 0}, "iterations"),
        ({"seconds": 0}, "seconds"),
        ({"restarts": 0}, "restarts"),
        ({"step_size": 0}, "step_size"),
        ({"step_size": 2}, "step_size"),
        ({"total_variation": -1}, "total_variation"),
        ({"position_weight": float("inf")}, "position_weight"),
        ({"tensors": ""}, "tensors"),
        ({"start": "gradient_matching"}, "must be another attack"),
        ({"start": "oracle_patch_embedding"}, "it is a bound"),
        ({"tv": 1}, "unknown key 'tv'"),
    ],
)
def test_options_out_of_range_are_refused(options: Option, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientMatching(options)


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="patch_embedding"):
        GradientMatching({"start": "patch_embeding"})


def test_what_does_not_apply_is_refused(pictures: Tensor) -> None:
    model, threat = blocks(1), ThreatModel()
    assert "not the sum" in str(GradientMatching().refusal(model, ThreatModel(defences="secure_sum:clients=2")))
    unknown = GradientMatching({"tensors": "backbone.pos_embd"})
    assert "did you mean 'backbone.pos_embed'" in str(unknown.refusal(model, threat))
    nothing = GradientMatching({"tensors": names.UNKNOWN_EMBEDDING, "mask": "ignore"})
    assert "nothing to match" in str(nothing.refusal(blocks(1, "mjp"), threat))
    first = GradientMatching({"start": "april"}).refusal(model, threat)
    assert "its start, april: " in str(first)
    upload = upload_of(model, batch_of(pictures[:1]), threat)
    empty = Upload({n: t * 0 for n, t in upload.tensors.items()}, "gradient", 1, 1, 0, "weights")
    with pytest.raises(AttackNotApplicableError, match="all zero"):
        GradientMatching().run([empty], model, threat, generator=torch.Generator())


def test_the_patch_prior_needs_statistics_for_the_size() -> None:
    model = build_vit(ModelConfig(name="deit_tiny", image_size=48, patch_size=8, classes=10))
    assert "prior of natural patches" in str(GradientMatching({"patch_prior": 1}).refusal(model, ThreatModel()))
    assert GradientMatching({"patch_prior": 1}).uses_natural_patches
    assert not GradientMatching().uses_natural_patches


def test_only_declared_tensors_are_read(pictures: Tensor) -> None:
    model, threat = blocks(1, "mjp"), ThreatModel()
    upload = upload_of(model, batch_of(pictures[:1], 4), threat)
    attack = GradientMatching(FAST)
    kept = {name: upload.tensors[name] for name in attack.tensors(model)}
    assert len(kept) < 10
    reduced = Upload(kept, upload.kind, 1, 1, 0, "weights")
    full, partial = (
        attack.run([each], model, threat, generator=torch.Generator().manual_seed(0))[0] for each in (upload, reduced)
    )
    assert torch.equal(full.images, partial.images)
