"""The attack on degraded entries: what its parts compute, against scipy and dense algebra, and what it recovers."""

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import truncnorm

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.entries import Entries, read_entries, unread
from fedmjp.attacks.joint_posterior import EquationBelief, Equations
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.records import Reconstruction, Upload
from fedmjp.scenario import Scenario
from fedmjp.threat import ThreatModel
from tests.attacks import protected

SMALL = {"model": {"name": "deit_mini", "image_size": 64, "patch_size": 8}}
SCENARIO = Scenario.parse(SMALL)
NAME = "patch_embedding_degraded"


@pytest.fixture(scope="module")
def sent() -> list[tuple[Upload, torch.Tensor]]:
    """Uploads of two pictures that nothing degraded, and the pictures."""
    from fedmjp.facade import bundled_pictures

    model = build_vit(SCENARIO.network)
    exchanges = [SCENARIO.exchange([picture], model=model) for picture in bundled_pictures(2, size=64)]
    return [(exchange.upload, exchange.private.clean) for exchange in exchanges]


def made(name: str, upload: Upload, threat: ThreatModel, **options: object) -> Reconstruction:
    generator = torch.Generator().manual_seed(0)
    return ATTACKS.get(name)(options).run([upload], build_vit(SCENARIO.network), threat, generator=generator)[0]


def decibels(name: str, upload: Upload, threat: ThreatModel, clean: torch.Tensor) -> float:
    return float(metric("psnr").function(made(name, upload, threat).images, clean))


def degraded(upload: Upload, defence: str, seed: int = 0) -> tuple[Upload, ThreatModel]:
    threat = ThreatModel(defences=defence)
    return protected(upload, build_vit(SCENARIO.network), threat, seed=seed), threat


@pytest.mark.parametrize(("low", "high"), [(-0.5, 0.25), (0.0, math.inf), (3.0, 3.5), (-math.inf, -4.0)])
def test_bounds_move_a_belief_to_the_moments_of_scipys_truncated_normal(low: float, high: float) -> None:
    mean, variance = 0.3, 0.49
    bounds = [torch.tensor([[value]], dtype=torch.float64) for value in (0.0, low, high, mean, variance)]
    seen = Entries(*bounds[:3]).observed(*bounds[3:])
    precision = float(1 / variance + seen.precision)
    law = truncnorm((low - mean) / 0.7, (high - mean) / 0.7, mean, 0.7)
    assert (mean / variance + float(seen.precision * seen.value)) / precision == pytest.approx(law.mean(), abs=1e-3)
    assert 1 / precision == pytest.approx(law.var(), rel=1e-2)


@pytest.mark.parametrize("defence", ["prune:kept=0.1", "quantise:bits=4", "sign", "round:precision=bfloat16", "clip"])
def test_what_the_client_computed_lies_between_the_bounds(defence: str) -> None:
    tensor = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    threat = ThreatModel(defences=defence)
    upload = protected(Upload({"t": tensor}, "gradient", 1, 1, 0, "w"), build_vit(SCENARIO.network), threat)
    entries = read_entries(upload.tensors["t"], threat)
    if defence == "clip":
        tensor = tensor / tensor.norm()
    slack = 1e-6 + 4 * entries.variance.sqrt()
    assert bool(((tensor >= entries.low - slack) & (tensor <= entries.high + slack)).all())


def test_the_gradient_is_that_of_the_normal_law_of_the_right_side_with_d_integrated_out() -> None:
    generator = torch.Generator().manual_seed(2)
    dim, patches, values, noise = 5, 3, 4, 0.2
    d, x, right = (torch.randn(shape, generator=generator).double() for shape in ((dim, 3), (3, 4), (dim, 4)))
    right = right / right.square().mean().sqrt()  # the scale that is taken
    variance = torch.rand(dim, patches, generator=generator).double() + 0.1
    belief = EquationBelief(Equations([Entries(variance, d, d)], [Entries(0.3 + 0 * right, right, right)]), 1.0)
    belief.believe(x, noise, learn=False)
    x.requires_grad_()
    likelihood = torch.zeros((), dtype=torch.float64)
    for row in range(dim):
        covariance = torch.linalg.inv(patches * torch.eye(patches).double() + torch.diag(1 / variance[row]))
        known = covariance @ (d[row] / variance[row])
        spread = x.mT @ covariance @ x + (0.3 + noise**2) * torch.eye(values).double()
        law = torch.distributions.MultivariateNormal(x.mT @ known, spread)
        likelihood = likelihood + law.log_prob(right[row])
    (expected,) = torch.autograd.grad(likelihood, x)
    assert torch.allclose(belief.gradient(x.detach(), belief.doubt), expected, rtol=1e-4, atol=1e-4)


def test_a_clean_upload_gives_what_patch_embedding_gives(sent: list[tuple[Upload, torch.Tensor]]) -> None:
    upload, _ = sent[0]
    for threat in (ThreatModel(), ThreatModel(defences="clip")):
        assert torch.equal(made(NAME, upload, threat).images, made("patch_embedding", upload, threat).images)


@pytest.mark.parametrize(("defence", "gain"), [("prune:kept=0.9", 6.0), ("gaussian:noise=0.0005", 1.0)])
def test_it_is_better_than_attacks_that_take_one_side_for_exact(
    sent: list[tuple[Upload, torch.Tensor]], defence: str, gain: float
) -> None:
    upload, clean = sent[0]
    changed, threat = degraded(upload, defence)
    before = max(decibels(name, changed, threat, clean) for name in ("patch_embedding", "patch_embedding_wiener"))
    mine = made(NAME, changed, threat, rounds=12).images
    assert float(metric("psnr").function(mine, clean)) > before + gain


def test_further_uploads_of_the_picture_help_and_those_of_another_are_left_out(
    sent: list[tuple[Upload, torch.Tensor]],
) -> None:
    (upload, clean), (other, _) = sent
    noise = "gaussian:noise=0.0005"
    changed, threat = degraded(upload, noise)
    again, stranger = degraded(upload, noise, 1)[0], degraded(other, noise, 2)[0]
    both = replace(changed, others=(again, replace(stranger, weights="others")))
    joined, alone = (made(NAME, one, threat, rounds=8) for one in (both, changed))
    assert joined.diagnostics["uploads_linked"] == 2
    quality = metric("psnr").function
    assert float(quality(joined.images, clean)) > float(quality(alone.images, clean)) + 0.3
    crops = made(NAME, both, threat.model_copy(update={"crop_scale": 0.5}), rounds=1)
    assert crops.diagnostics["uploads_linked"] == 1


@pytest.mark.parametrize(
    "defences",
    [
        *("prune:kept=0.01", "quantise:bits=2", "sign", "gaussian:noise=0.5", "local_dp", "laplace"),
        *(["gaussian", "prune"], ["clip", "quantise"], ["prune", "gaussian"], ["prune", "quantise"]),
    ],
)
def test_no_degradation_breaks_it(sent: list[tuple[Upload, torch.Tensor]], defences: str | list[str]) -> None:
    threat = ThreatModel.parse({"defences": defences})
    changed = protected(sent[0][0], build_vit(SCENARIO.network), threat)
    assert made(NAME, changed, threat, rounds=3).images.shape == (1, 3, 64, 64)


@pytest.mark.parametrize(
    ("defences", "adapted"),
    [
        *((["clip", "quantise"], True), (["gaussian", "sign"], True), (["prune", "round"], True)),
        *((["prune", "gaussian"], False), (["prune", "sign"], False), (["jigsaw"], False)),
    ],
)
def test_it_counts_as_adapted_where_no_defence_hides_what_another_leaves(defences: list[str], adapted: bool) -> None:
    scenario = Scenario.parse({**SMALL, "defences": defences})
    attack, model = ATTACKS.get(NAME)(), build_vit(scenario.network)
    assert attack.adapted(scenario.pipeline, model, scenario.threat) is adapted
    if "gaussian" in defences and not adapted:
        assert "hides the bounds" in (unread(scenario.threat) or "")


def test_masks_and_batches_are_refused_with_the_reason() -> None:
    attack, model = ATTACKS.get(NAME)(), build_vit(SCENARIO.network)
    assert "a mixture" in (attack.refusal(model, ThreatModel(batch_size=2)) or "")
    masked = Scenario.parse({**SMALL, "defences": ["mjp"]})
    assert "masks" in (attack.refusal(build_vit(masked.network), masked.threat) or "")
