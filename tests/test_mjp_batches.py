"""Uploads of several pictures: exact where the company changes, a mixture where it does not, refused where too many."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.mjp.batches import _stating
from fedmjp.attacks.mjp.facts import linear_facts
from fedmjp.data.selection import Selection, select_for
from fedmjp.errors import AttackFailedError
from fedmjp.jigsaw import rearrange
from fedmjp.metrics import METRICS
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction, Upload
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from tests.conftest import private_batch, small_model, small_scenario, upload_of
from tests.test_mjp_facts import EXACT, in_double

# Pairs of the eight bundled pictures, epoch by epoch: picture 0 meets another one in each, as do all others.
ROUNDS = (
    (1, 2, 3, 4, 5, 6, 7),
    (2, 3, 4, 5, 6, 7, 1),
    (3, 4, 5, 6, 7, 1, 2),
    (4, 5, 6, 7, 1, 2, 3),
    (5, 6, 7, 1, 2, 3, 4),
)


@pytest.fixture(scope="module")
def eight() -> Selection:
    """Two crops each of four photographs."""
    return select_for(small_scenario(clients=2, pictures_per_client=4))


def pairs(epoch: int) -> list[tuple[int, int]]:
    """The circle method of tournaments: who plays whom."""
    first, *rest = ROUNDS[epoch]
    return [(0, first), *zip(rest[:3], reversed(rest[3:]), strict=True)]


def shown(eight: Selection, company: Sequence[int], number: int, **options: Any) -> PrivateBatch:
    loaded = [eight.load(eight.entries[index]) for index in company]
    options = {"mask_ratio": 0.27, "gradient_of": Picture.SHUFFLED, **options}
    return private_batch(loaded, grid=8, seed=0, number=number, **options)


def attack(uploads: Sequence[Upload], model: VitClassifier) -> Reconstruction:
    given = [replace(uploads[0], others=tuple(uploads[1:]))]
    threat = ThreatModel(batch_size=uploads[0].num_examples)
    generator = torch.Generator().manual_seed(0)
    return ATTACKS.get("mjp_intersection")().run(given, model, threat, generator=generator)[0]


def psnr(made: Reconstruction, batch: PrivateBatch) -> list[float]:
    """Of each picture, best assignment."""
    scores = torch.stack([METRICS["psnr"].function(made.images, each.expand_as(made.images)) for each in batch.clean])
    rows, columns = linear_sum_assignment(scores.numpy(), maximize=True)
    return scores[rows, columns].tolist()


def test_everybody_meets_somebody_else(eight: Selection) -> None:
    for one, other in pairwise(range(len(ROUNDS))):
        assert sorted(index for pair in pairs(one) for index in pair) == list(range(8))
        assert not {frozenset(pair) for pair in pairs(one)} & {frozenset(pair) for pair in pairs(other)}


def test_an_upload_states_every_picture_up_to_a_span(eight: Selection) -> None:
    model, batch = small_model(defence="mjp"), shown(eight, (0, 3), 0, one_mask=True)
    facts = linear_facts(replace(in_double(model, batch), num_examples=2), model)
    patches = to_patches((batch.clean.double() - model.mean.double()) / model.std.double(), model.patch_size)
    mask = batch.mask[0]
    assert torch.equal(facts.mask, mask)
    assert len(facts.basis) == 2 * 64 - int((~mask).sum())
    for each in patches:
        assert (each - each @ facts.basis.mT @ facts.basis - facts.outside).abs().max() < EXACT
        assert (each[mask] @ facts.level - 1).abs().max() < EXACT


def test_where_each_picture_has_its_mask_what_is_stated_is_of_those_that_show_the_place(eight: Selection) -> None:
    model, batch = small_model(defence="mjp"), shown(eight, (0, 3), 0)
    facts = linear_facts(replace(in_double(model, batch), num_examples=2), model)
    assert torch.equal(facts.mask, batch.mask.all(dim=0))
    patches = to_patches((batch.clean.double() - model.mean.double()) / model.std.double(), model.patch_size)
    for each, mask in zip(patches, batch.mask, strict=True):
        stated = each - each @ facts.basis.mT @ facts.basis
        assert (stated - facts.outside)[~mask].abs().max() < EXACT
        elsewhere = mask & ~facts.mask
        assert elsewhere.any()
        assert (stated - facts.outside)[elsewhere].abs().amax(dim=1).min() > 1e3 * EXACT


@pytest.mark.parametrize("options", [{"one_mask": True}, {"mask_ratio": 0.0, "gradient_of": Picture.CLEAN}], ids=str)
def test_changing_company_gives_the_pictures_away(eight: Selection, options: dict[str, Any]) -> None:
    defence = "mjp" if "one_mask" in options else "none"
    batches = [shown(eight, pair, epoch, **options) for epoch in range(5) for pair in pairs(epoch)]
    # Weights move from upload to upload, as they do in training.
    uploads = [upload_of(small_model(defence=defence, seed=seed), batch) for seed, batch in enumerate(batches)]
    made = attack(uploads, small_model(defence=defence))
    assert made.diagnostics["uploads_kept"] == 20
    assert made.diagnostics["uploads_linked"] == 5
    assert min(psnr(made, batches[0])) > 40


def test_fixed_company_stays_a_mixture(eight: Selection) -> None:
    model = small_model(defence="mjp")
    batches = [shown(eight, (0, 3), number, one_mask=True) for number in range(5)]
    made = attack([upload_of(model, batch) for batch in batches], model)
    assert max(psnr(made, batches[0])) < 25


@pytest.mark.parametrize("options", [{"one_mask": True}, {"mask_ratio": 0.0, "gradient_of": Picture.CLEAN}], ids=str)
def test_black_bars_join_nothing(eight: Selection, options: dict[str, Any]) -> None:
    defence = "mjp" if "one_mask" in options else "none"
    model = small_model(defence=defence)
    batches = [barred(shown(eight, pair, epoch, **options), 16) for epoch in range(5) for pair in pairs(epoch)]
    made = attack([upload_of(model, batch) for batch in batches], model)
    assert made.diagnostics["uploads_linked"] == 5
    assert min(psnr(made, batches[0])) > 40


def barred(batch: PrivateBatch, rows: int) -> PrivateBatch:
    """With a black bar at the top, as films have it."""
    clean = batch.clean.clone()
    clean[:, :, :rows] = 0
    return replace(batch, clean=clean, shuffled=rearrange(clean, batch.source))


def test_a_picture_without_other_company_is_a_mixture_of_its_own(eight: Selection) -> None:
    model = small_model(defence="mjp")
    company = [(0, 3), (0, 1), (0, 2), (0, 4), (0, 5)]
    batches = [shown(eight, pair, number, one_mask=True) for number, pair in enumerate(company)]
    made = attack([upload_of(model, batch) for batch in batches], model)
    first, other = psnr(made, batches[0])
    assert first > 40
    assert other < 25
    assert not torch.equal(*made.images)


def test_another_upload_that_states_nothing_is_left_out(eight: Selection) -> None:
    model = small_model(defence="mjp")
    batches = [shown(eight, (0,), number) for number in range(3)]
    silent = replace(batches[0], mask=torch.ones_like(batches[0].mask))
    uploads = [upload_of(model, batch) for batch in (*batches, silent)]
    made = attack(uploads, model)
    assert made.diagnostics["uploads_kept"] == 3
    assert torch.equal(made.images, attack(uploads[:3], model).images)
    with pytest.raises(AttackFailedError, match="every patch is masked"):
        attack(uploads[::-1], model)


def test_masks_of_their_own_slow_it_down(eight: Selection) -> None:
    model = small_model(defence="mjp")
    batches = [shown(eight, pair, epoch) for epoch in range(5) for pair in pairs(epoch)]
    uploads = [upload_of(model, batch) for batch in batches]
    one, all_ = (sum(psnr(attack(uploads[:count], model), batches[0])) / 2 for count in (1, 20))
    assert one + 3 < all_ < 60


@pytest.mark.parametrize(
    ("pictures", "why"),
    [
        (3, "192 patches are not fewer than the 192 dimensions"),
        (4, "256 patches are not fewer than the 192 dimensions"),
    ],
)
def test_as_many_tokens_as_dimensions_are_refused(defended: VitClassifier, pictures: int, why: str) -> None:
    refusal = ATTACKS.get("mjp_intersection")().refusal
    assert refusal(defended, ThreatModel(batch_size=2)) is None
    assert why in (refusal(defended, ThreatModel(batch_size=pictures)) or "")


def test_uploads_that_nothing_tells_apart_are_refused() -> None:
    refusal = ATTACKS.get("mjp_intersection")().refusal
    wide = small_model(name="deit_small", defence="mjp")
    assert refusal(wide, ThreatModel(batch_size=2)) is None
    told = refusal(wide, ThreatModel(batch_size=3)) or ""
    assert "leave 256 directions open, and a patch has 192 values" in told


def test_degraded_batches_come_with_a_warning(defended: VitClassifier) -> None:
    caveat = ATTACKS.get("mjp_intersection")().caveat
    assert "degraded" not in (caveat(defended, ThreatModel(batch_size=2)) or "")
    assert "degraded" in (caveat(defended, ThreatModel(batch_size=2, defences="gaussian:noise=0.001")) or "")


def test_of_one_upload_batches_are_refused(defended: VitClassifier) -> None:
    refusal = ATTACKS.get("mjp_prior")().refusal(defended, ThreatModel(batch_size=2))
    assert "reads uploads of one picture" in (refusal or "")


def test_who_agrees_with_two_that_disagree_is_not_what_decides() -> None:
    # Upload 0 shows two pictures at the place; 1, 2, 3 one of them, 4 the other.
    agree = torch.ones(5, 5, 1, dtype=torch.bool)
    agree[4, 1:4] = agree[1:4, 4] = False
    assert _stating(agree).tolist() == [[True, True, True, True, False]]
