"""Metrics of labels and features against numpy and scipy; the evaluator's gallery against the network itself."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from scipy.stats import rankdata

from fedmjp.data.selection import Selection
from fedmjp.errors import RecordError
from fedmjp.metrics import DISCLOSED
from fedmjp.metrics.disclosed import feature_error, found_among, label_accuracy, membership
from fedmjp.metrics.gallery import CROP, Gallery, another_crop
from fedmjp.metrics.scoring import score_features
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.inference import evaluated
from fedmjp.private import PrivateBatch
from fedmjp.records import Features
from fedmjp.settings import Picture, Setting
from tests.conftest import private_batch

labels = st.lists(st.integers(0, 4), min_size=1, max_size=12)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(labels, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_label_accuracy_is_the_intersection_of_multisets_over_the_batch(true: list[int], random) -> None:
    told = [random.randrange(5) for _ in true]
    expected = np.minimum(np.bincount(true, minlength=5), np.bincount(told, minlength=5)).sum() / len(true)
    scored = label_accuracy(torch.tensor(told), torch.tensor(true))
    assert scored.mean().item() == pytest.approx(expected)
    assert set(scored.tolist()) <= {0.0, 1.0}
    assert label_accuracy(torch.tensor(random.sample(true, len(true))), torch.tensor(true)).all()


def test_feature_error_is_relative_to_the_mean_of_the_batch_or_of_the_gallery_for_one() -> None:
    features, noise, gallery = drawn(0, 5, 8), drawn(1, 5, 8), drawn(2, 40, 8)
    centre = features.numpy().mean(axis=0)
    expected = np.linalg.norm(noise.numpy(), axis=1) / np.linalg.norm(features.numpy() - centre, axis=1)
    assert feature_error(features + noise, features, gallery).numpy() == pytest.approx(expected)
    assert feature_error(features.mean(0).expand(5, 8), features, gallery).tolist() == pytest.approx([1] * 5)
    alone = feature_error(gallery.mean(0)[None], features[:1], gallery)
    assert alone.item() == pytest.approx(1)
    equal = features[:1].expand(2, 8)
    assert feature_error(equal, equal, gallery).tolist() == [0, 0]
    assert feature_error(equal + 1, equal, gallery).isfinite().all()
    assert feature_error(equal, equal, equal).tolist() == [1, 1], "a network that gives all pictures one feature"


@pytest.mark.parametrize("most", [1, 5])
def test_a_picture_is_found_where_the_nearest_neighbours_hold_it(most: int) -> None:
    gallery, places = drawn(3, 60, 6), torch.arange(0, 60, 3)
    told = gallery[places] + 1.2 * drawn(4, 20, 6)
    found = found_among(told, gallery, places, most)
    _, nearest = cKDTree(gallery.numpy()).query(told.numpy(), k=[*range(1, most + 1)])
    assert found.tolist() == [float(place in row) for place, row in zip(places.tolist(), nearest, strict=True)]
    distances = np.linalg.norm(told.numpy()[:, None] - gallery.numpy(), axis=2)
    ranks = rankdata(distances, method="max", axis=1)[np.arange(20), places.numpy()]
    assert found.tolist() == (ranks <= most).astype(float).tolist()
    assert 0 < found.mean() < 1


def test_a_tie_names_nobody() -> None:
    gallery = drawn(3, 1, 6).expand(64, 6)
    for most, expected in ((1, 0.0), (5, 0.0), (64, 1.0)):
        assert found_among(gallery[:8], gallery, torch.arange(8), most).tolist() == [expected] * 8


@pytest.mark.parametrize("outside", [40, 999, 1000, 3500])
def test_membership_is_the_best_true_positive_rate_at_a_false_positive_rate_of_a_thousandth(outside: int) -> None:
    gallery, places = drawn(5, outside + 30, 4), torch.arange(30)
    told = gallery[places] + 0.3 * drawn(6, 30, 4)
    nearest, _ = cKDTree(told.numpy()).query(gallery.numpy())
    members, others = nearest[:30], nearest[30:]
    # Every threshold that the distances of others allow; the next one after those that stay below the rate.
    allowed = [limit for limit in others if (others < limit).mean() <= 1e-3]
    known = membership(told, gallery, places)
    assert known.mean().item() == pytest.approx((members < max(allowed)).mean())
    assert 0 < known.mean() < 1
    if outside < 1000:
        assert max(allowed) == others.min(), "nearer than every picture outside"


def test_membership_without_anybody_outside_says_so() -> None:
    with pytest.raises(RecordError, match="every picture of the gallery is in the upload"):
        membership(drawn(0, 3, 2), drawn(0, 3, 2), torch.arange(3))


@pytest.fixture(scope="module")
def private(pictures: Selection) -> PrivateBatch:
    loaded = [pictures.load(entry) for entry in pictures.entries]
    return private_batch(loaded, grid=8, mask_ratio=0.5, gradient_of=Picture.SHUFFLED, seed=0)


@pytest.fixture
def gallery(defended: VitClassifier, private: PrivateBatch) -> Gallery:
    return Gallery.of(defended, "of the defended", private_in_parts(private), set(Picture))


def private_in_parts(private: PrivateBatch) -> Iterator[PrivateBatch]:
    """As sources give them; the first one comes twice."""
    yield from (private.part(0, 1), private.part(0, 2), private.part(2, 4))


def test_the_gallery_holds_what_the_network_makes_of_pictures_alone_and_under_their_masks(
    defended: VitClassifier, private: PrivateBatch, gallery: Gallery
) -> None:
    assert gallery.names == private.pictures
    with evaluated(defended):
        clean, masked = defended.features(private.clean), defended.features(private.shuffled, private.mask)
        crop = defended.features(torch.cat([another_crop(private.part(place, place + 1)) for place in range(4)]))
    assert torch.allclose(gallery.versions[Picture.CLEAN], clean.double(), atol=1e-5)
    assert torch.allclose(gallery.versions[Picture.SHUFFLED], masked.double(), atol=1e-5)
    assert torch.allclose(gallery.behind(private), masked.double(), atol=1e-5)
    assert torch.allclose(gallery.crops, crop.double(), atol=1e-5)
    assert not torch.allclose(gallery.versions[Picture.CLEAN], masked.double(), atol=1e-3)


def test_another_crop_is_always_the_same_part_of_the_picture(private: PrivateBatch) -> None:
    rows = torch.arange(64.0).div(64).expand(3, 64, 64).mT
    ramp = replace(private.part(1, 2), clean=rows[None].contiguous())
    crop = another_crop(ramp)
    assert torch.equal(crop, another_crop(ramp))
    assert crop.shape == (1, 3, 64, 64)
    assert float(crop.max() - crop.min()) == pytest.approx(CROP * 63 / 64, abs=0.02)


def test_the_right_features_in_any_order_are_exact_and_found(private: PrivateBatch, gallery: Gallery) -> None:
    turned = [2, 0, 3, 1]
    told = Features(private.labels[turned], gallery.behind(private)[turned])
    b, c = (score_features(told, private, setting, gallery) for setting in (Setting.B, Setting.C))
    assert tuple(b) == DISCLOSED
    assert b["feature_error"].tolist() == [0, 0, 0, 0] == c["feature_error"].tolist()
    assert b["rank1"].tolist() == [1, 1, 1, 1] == b["label_accuracy"].tolist()
    assert b["membership"] is None, "nobody is outside"
    # In setting c the picture is looked up among pictures that are neither shuffled nor masked.
    nearest = torch.cdist(gallery.behind(private), gallery.versions[Picture.CLEAN]).argmin(1)
    assert c["rank1"].tolist() == (nearest == torch.arange(4)).double().tolist()
    one = replace(private.part(2, 3))
    alone = score_features(Features(one.labels, gallery.behind(one)), one, Setting.B, gallery)
    assert alone["membership"].tolist() == [1]


def test_labels_alone_are_scored_without_a_gallery_and_features_are_not(private: PrivateBatch) -> None:
    scored = score_features(Features(private.labels), private, Setting.C, None)
    assert {name: value.tolist() for name, value in scored.items()} == {"label_accuracy": [1, 1, 1, 1]}
    with pytest.raises(RecordError, match="none was given"):
        score_features(Features(private.labels, torch.zeros(4, 2, dtype=torch.float64)), private, Setting.C, None)
    with pytest.raises(RecordError, match="3 labels for 4 pictures"):
        score_features(Features(private.labels[:3]), private, Setting.C, None)


def test_a_picture_that_is_not_in_the_gallery_is_named(private: PrivateBatch, gallery: Gallery) -> None:
    other = replace(private, pictures=("somebody else", *private.pictures[1:]))
    told = Features(private.labels, gallery.behind(private))
    with pytest.raises(RecordError, match="the gallery lacks somebody else"):
        score_features(told, other, Setting.C, gallery)
