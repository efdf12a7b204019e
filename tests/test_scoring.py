"""The evaluator matches the pictures of a batch one to one, and never touches what is stored."""

import copy
from dataclasses import replace

import pytest
import torch

from fedmjp.data.selection import Selection
from fedmjp.errors import RecordError
from fedmjp.metrics.scoring import match, score_of_colour, score_pictures
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction
from fedmjp.settings import Picture, Setting
from tests.conftest import private_batch

METRICS = ("mse", "psnr")


@pytest.fixture
def private(pictures: Selection) -> PrivateBatch:
    loaded = [pictures.load(entry) for entry in pictures.entries]
    return private_batch(loaded, grid=8, mask_ratio=0.27, gradient_of=Picture.SHUFFLED, seed=0)


def test_the_order_of_a_reconstruction_does_not_matter(private: PrivateBatch) -> None:
    noise = 0.01 * torch.rand(private.shuffled.shape, generator=torch.Generator().manual_seed(0))
    images = (private.shuffled + noise).clamp(0, 1)
    expected = score_pictures(Reconstruction(images), private, Setting.B, metrics=METRICS, protocol="float")
    turned = score_pictures(Reconstruction(images[[2, 0, 3, 1]]), private, Setting.B, metrics=METRICS, protocol="float")
    for name in METRICS:
        assert torch.equal(expected[name], turned[name])
    assert (expected["psnr"] > 35).all()


def test_matching_is_one_to_one_with_the_least_squared_error_of_all_orders(private: PrivateBatch) -> None:
    from itertools import permutations

    images = torch.rand(private.clean.shape, generator=torch.Generator().manual_seed(1))
    found = match(images, private.clean)
    assert sorted(found.tolist()) == [0, 1, 2, 3]
    errors = {
        order: float((images[list(order)] - private.clean).square().sum()) for order in permutations(range(len(images)))
    }
    assert tuple(found.tolist()) == min(errors, key=errors.__getitem__)


def test_scoring_changes_neither_the_private_pictures_nor_the_reconstruction(private: PrivateBatch) -> None:
    made = Reconstruction(private.clean[[1, 0, 2, 3]])
    before = copy.deepcopy((private, made.images))
    score_pictures(made, private, Setting.C, metrics=METRICS, protocol="8bit")
    assert torch.equal(before[0].clean, private.clean)
    assert torch.equal(before[0].shuffled, private.shuffled)
    assert torch.equal(before[1], made.images)


def test_the_mean_colour_scores_what_the_variance_within_channels_says(private: PrivateBatch) -> None:
    variances = private.clean.double().flatten(2).var(dim=2, correction=0).mean(dim=1)
    assert torch.allclose(score_of_colour(private), -10 * variances.log10(), atol=1e-5)
    red = torch.tensor([0.8, 0.1, 0.1])[:, None, None].expand_as(private.clean[0])
    assert score_of_colour(replace(private, clean=torch.stack([red, *private.clean[1:]])))[0] > 100


def test_another_number_of_pictures_is_refused(private: PrivateBatch) -> None:
    with pytest.raises(RecordError, match=r"shape \(2, 3, 64, 64\) for pictures of \(4, 3, 64, 64\)"):
        score_pictures(Reconstruction(private.clean[:2]), private, Setting.B, metrics=METRICS, protocol="float")
