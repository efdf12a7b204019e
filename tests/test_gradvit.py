"""GradViT: its terms against the official code (golden/gradvit_oracle.json), its schedule against torch's, refusals."""

import hashlib
import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.batch_norm_prior import batch_norm_prior
from fedmjp.attacks.gradvit import GradVit, GradVitLoss, GradVitOptions, descend, seams, smoothness
from fedmjp.attacks.matching_gradients import PerCandidateGradients
from fedmjp.attacks.matching_loss import Job
from fedmjp.attacks.testing import CHECKS, AttackTrial
from fedmjp.errors import AttackNotApplicableError, ConfigError
from fedmjp.models.classifier import VitClassifier
from fedmjp.threat import ThreatModel
from tests.conftest import small_model
from tests.golden.gradvit_oracle import LABEL, PATCH, SIZE, drawn, gradients_of, micro, resnet50_weights

TERMS = json.loads((Path(__file__).parent / "golden" / "gradvit_oracle.json").read_text())["terms"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def resnet50(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint as MoCo's are, and its SHA-256."""
    path = tmp_path_factory.mktemp("moco") / "moco_v2.pth.tar"
    weights = {f"module.encoder_q.{name}": value for name, value in resnet50_weights().items()}
    torch.save({"epoch": 200, "arch": "resnet50", "state_dict": weights | {"module.queue": torch.zeros(2)}}, path)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def loss_of_micro() -> tuple[VitClassifier, GradVitLoss]:
    model = micro()
    assert isinstance(model, VitClassifier)
    names = [name for name, _ in model.named_parameters()]
    gradients = dict(zip(names, gradients_of(model, drawn("private", 1, 3, 32, 32)), strict=True))
    norm = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt()
    targets = {name: (gradient / norm).float() for name, gradient in gradients.items()}
    job = Job(torch.zeros(1, 3, 32, 32), torch.tensor([LABEL]), None, norm, targets, torch.zeros(17, 64))
    comparison = PerCandidateGradients(model, names)
    return model, GradVitLoss(GradVitOptions(), model, comparison, [job], lambda images: images.sum((1, 2, 3, 4)))


def test_the_distance_of_gradients_is_the_official_one() -> None:
    distance = loss_of_micro()[1].distance(drawn("candidate", 1, 3, 32, 32)[None].requires_grad_())
    assert distance.item() == pytest.approx(TERMS["distance"], rel=1e-4)


def test_seams_and_smoothness_are_the_official_ones() -> None:
    inputs = drawn("seams", 1, 3, SIZE, SIZE)[None]
    assert seams(inputs, PATCH).item() == pytest.approx(TERMS["seams"], rel=1e-5)
    assert smoothness(inputs).item() == pytest.approx(TERMS["smoothness"], rel=1e-5)


def test_the_batch_norm_prior_is_the_official_one_of_each_candidate_alone(resnet50: tuple[Path, str]) -> None:
    prior = batch_norm_prior(str(resnet50[0]), resnet50[1], CPU)
    image = drawn("statistics", 1, 3, 64, 64)
    of_both = prior(torch.stack([image.flip(-1), image]))
    assert of_both[1].item() == pytest.approx(TERMS["batch_norm"], rel=1e-4)
    assert of_both[0] != of_both[1]


def test_gradients_count_half_and_statistics_begin_to_count_after_half_of_the_steps() -> None:
    model, loss = loss_of_micro()
    images = drawn("candidate", 1, 3, 32, 32)[None].requires_grad_()
    inputs = (images - model.mean) / model.std
    rest = 1e-4 * (seams(inputs, 8) + smoothness(inputs))
    distance = loss.distance(images)
    assert loss(inputs, 0.5).item() == pytest.approx((4e-3 * distance + rest).item(), rel=1e-4)
    assert loss(inputs, 0.51).item() == pytest.approx((2e-3 * distance + rest + 0.2 * images.sum()).item(), rel=1e-4)


def test_it_descends_as_torchs_adam_and_cosine_schedule_do() -> None:
    start = torch.rand(2, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0))

    def loss(inputs: Tensor, used: float) -> Tensor:
        return ((inputs - 2).square() * (1 + used)).sum((1, 2, 3, 4))

    seen: list[int] = []
    found, losses, done = descend(start, loss, iterations=9, step_size=0.1, on_step=lambda step, _: seen.append(step))
    expected = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([expected], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=9)
    for step in range(8):
        optimiser.zero_grad()
        loss(expected, step / 9).sum().backward()
        optimiser.step()
        schedule.step()
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(losses, loss(expected, 8 / 9))
    assert (done, seen) == (9, list(range(1, 10)))


def test_it_ends_where_every_candidate_diverged() -> None:
    _, losses, done = descend(
        torch.ones(2, 3), lambda x, _: x.sum(1) * math.nan, iterations=9, step_size=0.1, on_step=lambda *_: None
    )
    assert losses.tolist() == [math.inf, math.inf]
    assert done == 1


def test_it_keeps_the_contract() -> None:
    trial = AttackTrial(GradVit({"iterations": 2}), "deit_micro", gain=None)
    for check in CHECKS:
        check(trial)


def test_rows_say_that_the_prior_is_missing(resnet50: tuple[Path, str]) -> None:
    model, threat = small_model("deit_micro"), ThreatModel()
    assert GradVit().caveat(model, threat).startswith("gradvit without its batch-norm prior")
    assert GradVit({"batch_norm": str(resnet50[0])}).caveat(model, threat) is None
    assert ATTACKS.get("gradvit") is GradVit


def test_files_that_are_no_such_network_are_refused_in_one_line(resnet50: tuple[Path, str], tmp_path: Path) -> None:
    file, digest = resnet50
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"no tensors")
    vit = tmp_path / "vit.pth"
    torch.save(nn.Linear(2, 2).state_dict(), vit)
    for path, sha256, message in (
        (tmp_path / "none.pth", None, "none.pth cannot be read: No such file"),
        (file, None, f"has SHA-256 {digest}; batch_norm_sha256 must say which file is meant"),
        (file, "0" * 64, f"batch_norm_sha256 is {'0' * 64}"),
        (other, hashlib.sha256(b"no tensors").hexdigest(), "is damaged"),
        (vit, hashlib.sha256(vit.read_bytes()).hexdigest(), "holds no ResNet-50: conv1.weight is missing"),
    ):
        with pytest.raises(AttackNotApplicableError, match=message) as refused:
            batch_norm_prior(str(path), sha256, CPU)
        assert "\n" not in str(refused.value)
    missing = GradVit({"batch_norm": str(tmp_path / "none.pth")}).refusal(small_model("deit_micro"), ThreatModel())
    assert "none.pth cannot be read" in str(missing), "before anything is attacked"
    with pytest.raises(ConfigError, match="batch_norm_sha256"):
        GradVit({"batch_norm_sha256": "abc"})
