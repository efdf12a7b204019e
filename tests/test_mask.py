"""Masks are read right off uploads, whatever clients did to them, or it is said that they cannot be read."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from fedmjp.attacks.mask import mask_refusal, read_mask
from fedmjp.data.selection import select_for
from fedmjp.defences import DEFENCES
from fedmjp.defences.gaussian import Gaussian
from fedmjp.errors import AttackFailedError
from fedmjp.exchange import prepare_private
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.stacked import entrance_gradients
from fedmjp.threat import ThreatModel
from tests.attacks import protected

PLAIN = ThreatModel()
SIZES = {64: 8, 224: 16}
# Where noise and signal are of about the same size, and far on either side.
HARD = [
    *(f"gaussian:noise={noise}" for noise in (0.003, 0.01, 0.02, 0.03, 0.1, 0.3)),
    *(f"laplace:noise={noise}" for noise in (0.003, 0.01, 0.03, 0.1)),
    *(f"prune:kept={kept}" for kept in (0.3, 0.2, 0.1, 0.05, 0.01)),
    *(f"quantise:bits={bits}" for bits in (10, 8, 6, 4, 2)),
    "local_dp:clipping_norm=0.001",
]


@lru_cache(maxsize=4)
def made(model: str, size: int, ratio: float, count: int) -> tuple[VitClassifier, list[tuple[Upload, Tensor]]]:
    """A model, and uploads of the position embedding with their masks."""
    sizes = {"name": model, "image_size": size, "patch_size": SIZES[size]}
    scenario = Scenario.parse({"model": sizes, "defences": f"mjp:mask_ratio={ratio}", "clients": count})
    network, selection = build_vit(scenario.network), select_for(scenario)
    batches = [prepare_private(scenario, [selection.load(entry)], 0) for entry in selection.entries]
    tensors = entrance_gradients(network, batches, [names.POSITION_EMBEDDING])
    pairs = zip(tensors, batches, strict=True)
    return network, [(Upload(each, "gradient", 1, 1, 0, "w"), batch.mask[0]) for each, batch in pairs]


def under(*defences: str) -> ThreatModel:
    return ThreatModel.parse({"defences": defences})


@pytest.mark.parametrize("size", [64, 224])
@pytest.mark.parametrize("model", ["deit_tiny", "deit_small"])
@pytest.mark.parametrize(
    "defences",
    [
        (),
        ("round",),
        ("round:precision=bfloat16",),
        ("clip:norm=0.01",),
        ("sign",),
        ("gaussian:noise=0.001",),
        ("gaussian:noise=0.001", "round:precision=bfloat16"),
        ("prune:kept=0.5",),
        ("prune:kept=0.5", "round"),
    ],
    ids=str,
)
def test_the_mask_is_read_where_enough_is_left(model: str, size: int, defences: Sequence[str]) -> None:
    network, uploads = made(model, size, 0.27, 2)
    threat = under(*defences)
    assert mask_refusal(network, threat) is None
    for upload, mask in uploads:
        assert torch.equal(read_mask(protected(upload, network, threat), network, threat), mask)


@pytest.mark.parametrize("defence", HARD)
@pytest.mark.parametrize("ratio", [0.1, 0.27, 0.5])
@pytest.mark.parametrize("model", ["deit_tiny", "deit_small"])
def test_a_mask_is_read_right_or_not_at_all(model: str, ratio: float, defence: str) -> None:
    network, uploads = made(model, 64, ratio, 4)
    threat = under(defence)
    for seed, (upload, mask) in enumerate(uploads):
        with suppress(AttackFailedError):
            assert torch.equal(read_mask(protected(upload, network, threat, seed=seed), network, threat), mask)


@pytest.mark.parametrize(
    ("defence", "reason"),
    [
        ("gaussian:noise=0.3", "drowned in noise"),
        ("gaussian:noise=0.05", "drowned in noise|hardly louder"),
        ("prune:kept=0.03", "after pruning"),
        ("quantise:bits=3", "after pruning"),
        ("local_dp", "drowned in noise"),
    ],
)
def test_what_hides_the_mask_is_told(defence: str, reason: str) -> None:
    network, uploads = made("deit_tiny", 64, 0.27, 4)
    threat = under(defence)
    for upload, _ in uploads:
        with pytest.raises(AttackFailedError, match=reason):
            read_mask(protected(upload, network, threat), network, threat)


@pytest.mark.parametrize("told", [0.009, 0.011, 0.03])
def test_masked_rows_that_are_not_as_loud_as_was_told_are_noticed(told: float) -> None:
    network, uploads = made("deit_tiny", 64, 0.27, 4)
    upload = protected(uploads[0][0], network, under("gaussian:noise=0.01"))
    with pytest.raises(AttackFailedError):
        read_mask(upload, network, under(f"gaussian:noise={told}"))


@pytest.mark.parametrize(
    ("threat", "reason"),
    [
        (under("gaussian", "prune"), "gaussian and prune together hide"),
        (under("laplace", "quantise"), "laplace and quantise together hide"),
        (under("gaussian", "sign"), "gaussian and sign together hide"),
        (ThreatModel.parse({"update": "delta", "defences": "dp_sgd"}), "how loud the noise of dp_sgd is"),
        (under("dp_sgd"), None),
        (under("prune", "quantise"), None),
    ],
)
def test_what_hides_every_mask_is_told_before_there_is_an_upload(threat: ThreatModel, reason: str | None) -> None:
    network, _ = made("deit_tiny", 64, 0.27, 4)
    told = mask_refusal(network, threat)
    assert told is None if reason is None else reason in (told or "")
    undefended = build_vit(Scenario.parse({"model": {"name": "deit_tiny", "image_size": 64, "patch_size": 8}}).network)
    assert mask_refusal(undefended, threat) is None, "there is no mask"


class Scrambled(Gaussian):
    """Does what nobody knows."""

    name = "scrambled"
    marks = frozenset({"reshaped"})


def test_of_what_nobody_knows_no_mask_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFENCES._targets, "scrambled", f"{__name__}:Scrambled")
    monkeypatch.setitem(DEFENCES._own, "scrambled", f"{__name__}:Scrambled")
    network, _ = made("deit_tiny", 64, 0.27, 4)
    assert "nothing is known of what scrambled leaves" in (mask_refusal(network, under("scrambled")) or "")


@pytest.mark.parametrize("change", [lambda rows: rows * 0, lambda rows: rows], ids=["silent", "as it is"])
def test_without_an_unknown_embedding_nothing_is_masked(change: Callable[[Tensor], Tensor]) -> None:
    scenario = Scenario.parse({"model": {"name": "deit_tiny", "image_size": 64, "patch_size": 8}})
    _, uploads = made("deit_tiny", 64, 0.27, 4)
    tensors = {name: change(tensor) for name, tensor in uploads[0][0].tensors.items()}
    upload = Upload(tensors, "gradient", 1, 1, 0, "w")
    assert not read_mask(upload, build_vit(scenario.network), PLAIN).any()
