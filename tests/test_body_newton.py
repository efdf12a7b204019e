"""body_newton: what it takes for noise, which picture it ends at, and where it puts patches."""

import math

import pytest
import torch
from torch import Tensor

from fedmjp.attacks.first_block.places import TokenEmbedding
from fedmjp.attacks.gauss_newton.body import BodyNewton, _in_order, _noise, shown_directions
from fedmjp.attacks.gauss_newton.factors import FactoredModel
from fedmjp.attacks.gauss_newton.residuals import Residuals, compared_layers
from fedmjp.attacks.gauss_newton.space import OpenSpace
from fedmjp.attacks.labels import mean_gradient
from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.data.selection import select_for
from fedmjp.exchange import Exchange
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.scenario import Scenario

MICRO = {"name": "deit_micro", "image_size": 32, "patch_size": 16}  # 4 patches, of which 63 directions are shown
DEGRADED = ["withhold", "withhold+round:precision=bfloat16", "withhold+gaussian:noise=0.001"]


@pytest.fixture(scope="module")
def model() -> VitClassifier:
    return build_vit(Scenario.parse({"model": MICRO}).network)


def exchanged(defences: str, model: VitClassifier) -> tuple[Scenario, Exchange]:
    scenario = Scenario.parse({"model": MICRO, "defences": defences.split("+")})
    pictures = select_for(scenario)
    return scenario, scenario.exchange([pictures.load(pictures.entries[0])], model=model)


def patches_of(image: Tensor, model: VitClassifier) -> Tensor:
    """(patches, values) in the network's input space."""
    return to_patches(((image - model.mean) / model.std).double(), model.patch_size)[0]


@pytest.mark.parametrize("defences", DEGRADED)
def test_near_a_picture_it_ends_at_it_with_the_residual_of_noise(defences: str, model: VitClassifier) -> None:
    scenario, exchange = exchanged(defences, model)
    attack, upload, threat = BodyNewton({}), exchange.upload, scenario.threat
    true, entrance = patches_of(exchange.private.clean, model), TokenEmbedding.of(model)
    shown = shown_directions(entrance)
    space = OpenSpace.of(AffinePatches(true - true @ shown.mT @ shown, shown), model)
    targets = {name: mean_gradient(upload, name, model, threat) for name in attack.tensors(model)}
    residuals = Residuals(
        FactoredModel(model, compared_layers(model), label_smoothing=0), targets, exchange.private.labels,
        torch.zeros(4, dtype=torch.bool), shown,
        generator=torch.Generator().manual_seed(0),
        levels={name: _noise(target, threat) for name, target in targets.items()},
    )  # fmt: skip
    at_truth = float(residuals(true[None]).norm())
    assert at_truth == pytest.approx(1.0, abs=0.4)
    along = ((true - space.natural) @ shown.mT).flatten()
    unknowns = torch.linalg.solve(space.root, along)
    start = unknowns + 0.5 * torch.randn(len(unknowns), generator=torch.Generator().manual_seed(1)).double()
    minimum = attack._minimum(residuals, space, start)
    error = (space.patches(minimum.point)[0] - true).norm() / true.norm()
    before = (space.patches(start)[0] - true).norm() / true.norm()
    assert math.sqrt(minimum.cost) < 1.5
    assert error < min(0.01, before / 3)


def test_patches_behind_tokens_in_any_order_go_where_they_are_natural(model: VitClassifier) -> None:
    scenario, exchange = exchanged("withhold", model)
    del scenario
    entrance, true = TokenEmbedding.of(model), patches_of(exchange.private.clean, model)
    stated = true @ shown_directions(entrance).mT @ shown_directions(entrance)
    straight = _in_order(stated, entrance, model)
    order = torch.tensor([2, 0, 3, 1])
    # What stands elsewhere, as the network sees it: the same tokens, so that positions are made up for.
    tokens = (stated @ entrance.weight.mT + entrance.positions)[order]
    elsewhere = (tokens - entrance.positions) @ torch.linalg.pinv(entrance.weight).mT
    torch.testing.assert_close(_in_order(elsewhere, entrance, model), straight, atol=1e-4, rtol=0)


def test_it_says_how_many_unknowns_are_too_many(model: VitClassifier) -> None:
    threat = Scenario.parse({"model": MICRO, "batch_size": 16, "pictures_per_client": 16}).threat
    assert "4032 unknowns are to be found, and most_unknowns is 3200" in str(BodyNewton({}).refusal(model, threat))
