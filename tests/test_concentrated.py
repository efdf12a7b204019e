"""Weights that concentrate an update on a label or a thumbnail: what comes back, with and without noise."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from scipy.stats import binom, norm
from torch import Tensor

from fedmjp.attacks.adversary import Adversary
from fedmjp.attacks.concentrated import thumbnail_prior
from fedmjp.data.pictures import LabelledPicture
from fedmjp.defences.privacy import Calibrated
from fedmjp.errors import AttackNotApplicableError, ConfigError
from fedmjp.exchange import Exchange
from fedmjp.facade import bundled_pictures
from fedmjp.metrics.pictures import psnr
from fedmjp.models import names
from fedmjp.models.build import build_vit, with_weights
from fedmjp.records import Disclosure, Features, Reconstruction
from fedmjp.scenario import Scenario
from tests.conftest import small_scenario

MODEL = {"name": "deit_micro", "image_size": 32, "patch_size": 8, "classes": 32}
CONTENTS = ("label", "thumbnail")


@cache
def pictures() -> list[LabelledPicture]:
    return [LabelledPicture(each.name, each.image, place) for place, each in enumerate(bundled_pictures(4, size=32))]


def scenario_of(content: str, *defences: str, **values: object) -> Scenario:
    return Scenario.parse(
        {"model": MODEL, "server": f"concentrator:tells={content}", "defences": list(defences) or "none", **values}
    )


def attacked(scenario: Scenario, exchange: Exchange, content: str, seed: int = 0) -> Disclosure:
    model = with_weights(build_vit(scenario.network), exchange.changed[0])
    adversary = Adversary(model, scenario.threat, seed)
    return adversary.reconstruct(f"concentrated_{content}", [exchange.upload], {}, on_progress=lambda *_: None)[0]


def colours(image: Tensor) -> Tensor:
    """Mean colours of four quadrants, (3, 2, 2), as torch averages them."""
    return F.adaptive_avg_pool2d(image, 2)


@pytest.mark.parametrize("defence", ["none", "clip:norm=1", "gaussian:noise=0.01", "quantise:bits=8"])
def test_a_thumbnail_comes_back_through_what_does_not_hide_it(defence: str) -> None:
    scenario = scenario_of("thumbnail", defence) if defence != "none" else scenario_of("thumbnail")
    for picture in pictures():
        made = attacked(scenario, scenario.exchange([picture]), "thumbnail")
        assert isinstance(made, Reconstruction)
        ideal = F.interpolate(colours(picture.image)[None], size=(32, 32), mode="bilinear")
        assert torch.allclose(made.images, ideal, atol=0.02), "but for the class whose label flips the sign, too"


@pytest.mark.parametrize("defence", ["none", "clip:norm=1", "sign", "quantise:bits=4", "prune:kept=0.01", "mjp"])
def test_a_label_comes_back_through_what_does_not_hide_it(defence: str) -> None:
    scenario = scenario_of("label", defence) if defence != "none" else scenario_of("label")
    for picture in pictures():
        made = attacked(scenario, scenario.exchange([picture]), "label")
        assert isinstance(made, Features)
        assert made.labels.tolist() == [picture.label]


@pytest.mark.parametrize("content", CONTENTS)
def test_of_a_sum_the_first_client_is_read(content: str) -> None:
    scenario = scenario_of(content, "secure_sum:clients=2", clients=2)
    made = attacked(scenario, scenario.exchange(pictures()[1:3]), content)
    if isinstance(made, Features):
        assert made.labels.tolist() == [pictures()[1].label]
    else:
        ideal = F.interpolate(colours(pictures()[1].image)[None], size=(32, 32), mode="bilinear")
        assert torch.allclose(made.images, ideal, atol=0.02)


@pytest.mark.parametrize(("mechanism", "epsilon"), [("local_dp", 50), ("dp_sgd", 8)])
def test_labels_are_read_as_often_as_gaussian_noise_allows(mechanism: str, epsilon: float) -> None:
    """Against the most likely of equally far points under normal noise, by scipy's quadrature and binomial tail."""
    runs, hits = 40, 0
    scenario = scenario_of("label", f"{mechanism}:epsilon={epsilon}")
    (defence,) = scenario.threat.pipeline.defences
    assert isinstance(defence, Calibrated)
    distance = math.sqrt(2) / defence.deviation  # of two rows of a gradient of length one
    allowed, _ = quad(lambda z: norm.pdf(z - distance / math.sqrt(2)) * norm.cdf(z) ** 31, -10, 30)
    for run in range(runs):
        private = LabelledPicture(f"{run}", pictures()[0].image, run % 32)
        made = attacked(scenario, scenario.exchange([private]), "label")
        hits += isinstance(made, Features) and made.labels.tolist() == [private.label]
    assert binom.cdf(hits, runs, allowed) > 1e-3
    assert binom.sf(hits - 1, runs, allowed) > 1e-3


def test_noise_takes_a_thumbnail_away_by_degrees() -> None:
    """From the picture's own colours to the prior's mean, which is what remains at a small epsilon."""
    errors = []
    for epsilon in (1e5, 50, 0.01):
        scenario = scenario_of("thumbnail", f"local_dp:epsilon={epsilon}")
        made = [attacked(scenario, scenario.exchange([picture]), "thumbnail") for picture in pictures()]
        images = torch.cat([each.images for each in made if isinstance(each, Reconstruction)])
        private = torch.stack([picture.image for picture in pictures()])
        errors.append(float((colours(images) - colours(private)).square().mean()))
    assert errors[0] < 1e-3
    assert errors[0] < errors[1] < errors[2]
    prior = thumbnail_prior().mean.reshape(2, 2, 3).permute(2, 0, 1).float()
    assert torch.allclose(colours(images), prior.expand_as(colours(images)), atol=0.05)


def test_several_uploads_of_a_picture_are_averaged() -> None:
    scores = []
    for uploads in (1, 16):
        scenario = scenario_of("thumbnail", "gaussian:noise=100", uploads_per_picture=uploads)
        made = [attacked(scenario, scenario.exchange([picture]), "thumbnail") for picture in pictures()]
        images = torch.cat([each.images for each in made if isinstance(each, Reconstruction)])
        scores.append(float(psnr(images, torch.stack([picture.image for picture in pictures()])).mean()))
    assert scores[1] > scores[0] + 0.5


@pytest.mark.parametrize("content", CONTENTS)
def test_nothing_else_of_the_gradient_is_as_large(content: str) -> None:
    scenario = scenario_of(content)
    tensors = scenario.exchange(pictures()[:1]).upload.tensors
    read = (
        {name for name in tensors if name.endswith("attn.proj.weight")}
        if content == "thumbnail"
        else {names.HEAD_WEIGHT}
    )
    energy = {name: float(tensor.double().square().sum()) for name, tensor in tensors.items()}
    assert sum(energy[name] for name in read) > 0.99 * sum(energy.values())


def test_where_it_cannot_be_played_or_read_the_reason_is_said() -> None:
    with pytest.raises(ConfigError, match="reads gradients of one picture, not gradients of 4"):
        small_scenario(server="concentrator", batch_size=4, pictures_per_client=4).require_server(
            build_vit(small_scenario().network)
        )
    withheld = scenario_of("label", "withhold:roles=head")
    with pytest.raises(ConfigError, match="which withhold keeps at the client"):
        withheld.require_server(build_vit(withheld.network))
    scenario = scenario_of("label")
    with pytest.raises(AttackNotApplicableError, match="tells=thumbnail concentrate, not those of concentrator"):
        attacked(scenario, scenario.exchange(pictures()[:1]), "thumbnail")
