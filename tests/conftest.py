"""Fixtures: small real models, real pictures, nothing that needs a network."""

import copy
import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedmjp.config import ModelConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import Selection, select_for
from fedmjp.exchange import prepare_private
from fedmjp.jigsaw import rearrange
from fedmjp.models import build
from fedmjp.models.architectures import Architecture
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import Classifier, VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import gradient

SMALL = {"image_size": 64, "patch_size": 8}  # 64 patches, dim 192
MASK_RATIO = 0.27
KEPT = 8  # models; most are of 23 MB
ROOT = Path(__file__).parents[1]

# Small models gain nothing from threads that wait for each other, least of all beside Flower's processes; nor does what
# tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Simulations that tests start have a Ray of their own: without an address, Ray joins any cluster of this user, such as
# that of test_ray_workers, whose nodes of one core have no room for Flower's actors.
os.environ["RAY_ADDRESS"] = "local"
# A hundred processes import our packages: each module is compiled once, not by each of them, whatever pytest was told.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end: nobody looks for garbage in it, now or between tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first, then those with the most tests: no long one is left for the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (-slow[item.path], -tests[item.path]))


@pytest.fixture(scope="session")
def drawn() -> dict[tuple[object, ...], Classifier]:
    """The last models that were built, untouched."""
    return {}


@pytest.fixture(autouse=True)
def models_are_drawn_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, drawn: dict[tuple[object, ...], Classifier]
) -> None:
    """Tests build the same models again and again: copying one takes a fifth of the time of drawing it.

    A copy is taken where the random numbers are in the same state. Tests of building itself build.
    """
    if request.path.name == "test_models.py":
        return
    draw = build._drawn

    def copy_of(config: ModelConfig, found: Architecture, drop_path: float = 0.0) -> Classifier:
        state = torch.random.get_rng_state().numpy().tobytes()
        key = (config, id(found), drop_path, torch.get_default_device(), state)
        model = drawn.pop(key, None) or draw(config, found, drop_path)
        drawn[key] = model  # the last one
        if len(drawn) > KEPT:
            drawn.pop(next(iter(drawn)))
        return copy.deepcopy(model)

    monkeypatch.setattr(build, "_drawn", copy_of)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def threat() -> ThreatModel:
    return ThreatModel()


@pytest.fixture(scope="session")
def pictures() -> Selection:
    """Four bundled pictures at 64 x 64."""
    return select_for(small_scenario(clients=2, pictures_per_client=2))


def small_scenario(name: str = "deit_tiny", **values: object) -> Scenario:
    """Of a model at 64 x 64."""
    return Scenario.parse({"model": {"name": name, **SMALL}, **values})


def small_model(name: str = "deit_tiny", defence: str = "none", seed: int = 0) -> VitClassifier:
    masked = defence == "mjp"
    return build_vit(ModelConfig.parse({"name": name, "unknown_embedding": masked, "seed": seed, **SMALL}))


@pytest.fixture(scope="session")
def undefended() -> VitClassifier:
    return small_model()


@pytest.fixture(scope="session")
def defended() -> VitClassifier:
    return small_model(defence="mjp")


def private_batch(
    pictures: Sequence[LabelledPicture],
    *,
    grid: int,
    mask_ratio: float,
    gradient_of: Picture,
    seed: int,
    number: int = 0,
    one_mask: bool = False,
) -> PrivateBatch:
    """What a client with MJP computes an upload from; with one mask for all pictures, as in the official code."""
    shuffle = gradient_of is Picture.SHUFFLED
    model = {"name": "deit_tiny", "image_size": 8 * grid, "patch_size": 8}
    defence = {"name": "mjp", "mask_ratio": mask_ratio, "shuffle": shuffle}
    batch = prepare_private(Scenario.parse({"model": model, "defences": [defence], "seed": seed}), pictures, number)
    if not one_mask:
        return batch
    mask, source = (each[:1].expand_as(each) for each in (batch.mask, batch.source))
    return replace(batch, mask=mask, source=source, shuffled=rearrange(batch.clean, source))


def batch_of(pictures: Selection, gradient_of: Picture, index: int = 0, mask_ratio: float = MASK_RATIO) -> PrivateBatch:
    loaded = [pictures.load(pictures.entries[index])]
    return private_batch(loaded, grid=8, mask_ratio=mask_ratio, gradient_of=gradient_of, seed=0)


def upload_of(model: VitClassifier, batch: PrivateBatch) -> Upload:
    return Upload(gradient(model, batch), "gradient", len(batch.pictures), 1, 0, "weights")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, ROOT], check=True)
    return next(folder.glob("fedmjp-*.whl"))
