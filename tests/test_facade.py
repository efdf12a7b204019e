"""What ``import fedmjp`` offers: every name, loaded late, and a benchmark in a few lines."""

import json
import subprocess
import sys

import pytest
import timm
import torch

import fedmjp
from fedmjp.attacks import ATTACKS
from fedmjp.defences import DEFENCES
from fedmjp.errors import AttackNotApplicableError, BadInputError, RecordError, UnknownNameError
from fedmjp.metrics import METRICS
from fedmjp.models.architectures import ARCHITECTURES

SMALL = {"name": "deit_tiny", "image_size": 64, "patch_size": 8}
PROBE = """
import json, sys
import fedmjp
before = sorted(sys.modules)
fedmjp.Scenario
print(json.dumps([before, sorted(sys.modules)]))
"""


def test_importing_takes_neither_torch_nor_pydantic() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    heavy = {"torch", "pydantic", "numpy", "flwr", "timm", "pandas", "attacks", "benchmarks"}
    assert heavy.isdisjoint(name.partition(".")[0] for name in before)
    assert {"torch", "pydantic"} <= set(after), "they come with the first name that needs them"


def test_every_name_resolves_and_is_listed() -> None:
    for name in fedmjp.__all__:
        assert getattr(fedmjp, name) is not None
        assert name in dir(fedmjp)
    assert fedmjp.ATTACKS is ATTACKS
    assert fedmjp.DEFENCES is DEFENCES
    assert fedmjp.METRICS is METRICS
    assert fedmjp.MODELS is ARCHITECTURES


def test_an_unknown_name_tells_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Scenarios'; it has .*Scenario, adopt, attack"):
        fedmjp.Scenarios  # noqa: B018


def test_an_undefended_upload_gives_the_picture_back() -> None:
    scenario = fedmjp.Scenario(model=SMALL)
    (picture,) = fedmjp.bundled_pictures(1, size=64)
    exchange = scenario.exchange([picture])
    result = fedmjp.attack("patch_embedding", exchange.upload, scenario)
    scores = fedmjp.score(result, exchange.private, metrics=("mse", "psnr"))
    error = float((result.images[0] - picture.image).double().square().mean())
    assert float(scores["mse"][0]) == pytest.approx(error, rel=1e-4)
    assert float(scores["psnr"][0]) > 60


def test_a_prior_fills_what_more_patches_than_dimensions_leave_open() -> None:
    scenario = fedmjp.Scenario(model={**SMALL, "patch_size": 4})  # 256 patches, 192 dimensions, one of them empty
    exchange = scenario.exchange(fedmjp.bundled_pictures(1, size=64))
    result = fedmjp.attack("patch_embedding_wiener", exchange.upload, scenario)
    assert float(fedmjp.score(result, exchange.private, metrics=("psnr",))["psnr"][0]) > 30


def test_defences_and_settings_are_taken_into_account() -> None:
    pictures = fedmjp.bundled_pictures(2, size=64)
    scenario = fedmjp.Scenario(model=SMALL, defences=["mjp:mask_ratio=0.5", "gaussian"], batch_size=2,
                               pictures_per_client=2)  # fmt: skip
    exchange = scenario.exchange(pictures)
    assert not torch.equal(exchange.private.shuffled, exchange.private.clean)
    result = fedmjp.attack("grey", exchange.upload, scenario)
    found = {each: fedmjp.score(result, exchange.private, setting=each, metrics=("mse",))["mse"] for each in "bc"}
    for setting, version in (("b", exchange.private.shuffled), ("c", exchange.private.clean)):
        expected = (result.images - version).double().square().flatten(1).mean(1)
        assert found[setting].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    with pytest.raises(RecordError):
        fedmjp.score(result, exchange.private, setting="a")


def test_a_model_with_other_weights_than_the_upload_was_computed_with_is_refused() -> None:
    scenario, other = fedmjp.Scenario(model=SMALL), fedmjp.Scenario(model=SMALL, seed=1)
    upload = scenario.exchange(fedmjp.bundled_pictures(1, size=64)).upload
    with pytest.raises(BadInputError, match="give the model with the weights that the client had"):
        fedmjp.attack("patch_embedding", upload, other)


def test_options_and_seed_reach_the_attack() -> None:
    scenario = fedmjp.Scenario(model=SMALL)
    upload = scenario.exchange(fedmjp.bundled_pictures(1, size=64)).upload
    few = {"options": {"iterations": 2, "start": "noise"}}
    first, again, other = (
        fedmjp.attack("gradient_matching", upload, scenario, seed=seed, **few).images for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_module_of_ones_own_is_adopted_and_attacked() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=8)
    adopted = fedmjp.adopt(vit)
    (picture,) = fedmjp.bundled_pictures(1, size=64)
    normalised = (picture.image - adopted.mean) / adopted.std
    loss = torch.nn.functional.cross_entropy(vit(normalised[None]), torch.tensor([3]))
    parameters = dict(vit.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    result = fedmjp.attack("patch_embedding", adopted.upload(gradients), adopted)
    assert float((result.images[0] - picture.image).abs().max()) < 1e-2


def test_bad_input_is_told() -> None:
    scenario = fedmjp.Scenario(model=SMALL)
    exchange = scenario.exchange(fedmjp.bundled_pictures(1, size=64))
    result = fedmjp.attack("grey", exchange.upload, scenario)
    for count in (0, 9):
        with pytest.raises(BadInputError, match=f"{count} pictures were asked for; there are 1 to 8"):
            fedmjp.bundled_pictures(count)
    with pytest.raises(BadInputError, match="setting 'd' is not one of a, b, c"):
        fedmjp.score(result, exchange.private, setting="d")
    with pytest.raises(BadInputError, match="2 pictures were given, an upload of this scenario is of 1"):
        scenario.exchange(fedmjp.bundled_pictures(2, size=64))
    with pytest.raises(UnknownNameError, match="Did you mean patch_embedding"):
        fedmjp.attack("patch_embeding", exchange.upload, scenario)
    with pytest.raises(AttackNotApplicableError, match="needs a first block without first norm and residuals"):
        fedmjp.attack("april", exchange.upload, scenario)
