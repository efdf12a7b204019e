"""Batches: order, repeated augmentation, the same whatever the workers, damage passed over, timm's augmentation."""

import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage.data import astronaut
from timm.data import create_transform
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from fedmjp.data import loading
from fedmjp.data.augmentation import TrainingTransform
from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import (
    Batch,
    Part,
    _join,
    epoch_order,
    evaluation_batches,
    steps_per_epoch,
    training_epochs,
)
from fedmjp.data.pictures import LabelledDataset, to_image
from fedmjp.errors import ConfigError, DataError
from fedmjp.learning import Recipe
from fedmjp.seeds import scoped_randomness

COUNT = 11
PLAIN = Recipe(batch_size=4, repeats=1, crop_scale=1.0, flip=0, color_jitter=0, rand_augment="", random_erasing=0)
WHOLE = Recipe(batch_size=4, repeats=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise, in three classes."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(COUNT):
        (folder / str(number % 3)).mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / str(number % 3) / f"{number:02d}.png")
    return folder


@pytest.fixture
def dataset(folder: Path) -> LabelledDataset:
    return open_dataset(str(folder), "train", classes=3)


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> LabelledDataset:
    """The same, but pictures 1 and 2 cannot be read."""
    for path in folder.glob("*/*"):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        (tmp_path / path.parent.name / path.name).write_bytes(path.read_bytes())
    dataset = open_dataset(str(tmp_path), "train", classes=3)
    for index in (1, 2):
        (tmp_path / dataset.key(index)).write_bytes(b"damaged")
    return dataset


def train(dataset: LabelledDataset, recipe: Recipe, **changes: object) -> list[Batch]:
    arguments = {"size": 16, "seed": 0, "indices": np.arange(len(dataset))} | changes
    _, batches = next(training_epochs(dataset, recipe=recipe, epochs=(arguments.pop("epoch", 0),), **arguments))
    return list(batches)


def same(first: list[Batch], second: list[Batch]) -> bool:
    return [batch.indices for batch in first] == [batch.indices for batch in second] and all(
        torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)
        for one, other in zip(first, second, strict=True)
    )


def test_without_augmentation_batches_are_the_pictures_in_a_drawn_order(dataset: LabelledDataset) -> None:
    batches = train(dataset, PLAIN, size=24)
    assert [len(batch.indices) for batch in batches] == [4, 4] == [4] * steps_per_epoch(COUNT, PLAIN)
    seen = [index for batch in batches for index in batch.indices]
    assert len(set(seen)) == 8
    assert seen != sorted(seen)
    for batch in batches:
        assert batch.images.dtype == torch.float32
        assert batch.labels.dtype == torch.int64
        for image, label, index in zip(batch.images, batch.labels, batch.indices, strict=True):
            photograph = torch.from_numpy(np.array(dataset.photograph(index))).permute(2, 0, 1) / 255
            assert torch.equal(image, photograph)
            assert label == dataset.labels[index]


def test_only_the_given_pictures_are_read(dataset: LabelledDataset) -> None:
    batches = train(dataset, PLAIN, indices=np.array([9, 2, 5]))
    assert [sorted(batch.indices) for batch in batches] == [[2, 5, 9]], "a smaller batch counts if it is the only one"
    assert steps_per_epoch(3, PLAIN) == 1


@pytest.mark.parametrize("repeats", [1, 2, 3, 40])
def test_repeats_follow_each_other_and_the_epoch_is_cut(repeats: int) -> None:
    indices = np.arange(100, 130)
    order = epoch_order(indices, repeats=repeats, seed=0, epoch=0)
    assert len(order) == len(indices)
    runs = [order[start : start + repeats] for start in range(0, len(order), repeats)]
    assert all(len(set(run)) == 1 for run in runs)
    assert len({run[0] for run in runs}) == len(runs)
    assert set(order) <= set(indices)


def test_order_and_versions_depend_on_seed_and_epoch(dataset: LabelledDataset) -> None:
    first = train(dataset, WHOLE)
    assert same(first, train(dataset, WHOLE))
    assert not same(first, train(dataset, WHOLE, epoch=1))
    assert not same(first, train(dataset, WHOLE, seed=1))
    two_versions = first[0].images[:2]
    assert first[0].indices[0] == first[0].indices[1]
    assert not torch.equal(*two_versions)


def test_skipping_gives_the_rest_of_the_same_epoch(dataset: LabelledDataset) -> None:
    assert same(train(dataset, WHOLE, skip=1), train(dataset, WHOLE)[1:])
    assert train(dataset, WHOLE, skip=2) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_follow_each_other_also_where_one_was_left_early(dataset: LabelledDataset, workers: int) -> None:
    recipe = WHOLE.model_copy(update={"workers": workers})
    given = training_epochs(dataset, np.arange(COUNT), recipe, size=16, seed=0, epochs=range(1, 4))
    for epoch, batches in given:
        expected = train(dataset, WHOLE, epoch=epoch)
        assert same([next(batches)] if epoch == 2 else list(batches), expected[:1] if epoch == 2 else expected)


def test_a_repeated_picture_is_decoded_once(dataset: LabelledDataset) -> None:
    decoded: list[int] = []

    def read(index: int) -> Image.Image | None:
        decoded.append(index)
        return dataset.read(index)

    # Too many pixels in all for the decoded pictures to be kept.
    counted = replace(dataset, read=read, kept=Forgetful())
    batches = train(counted, WHOLE.model_copy(update={"batch_size": 10, "repeats": 5}))
    assert [len(batch.indices) for batch in batches] == [10]
    assert len(decoded) == 2
    assert same(batches, train(dataset, WHOLE.model_copy(update={"batch_size": 10, "repeats": 5})))


class Forgetful(dict[int, Image.Image]):
    """Keeps nothing."""

    def __setitem__(self, key: int, value: Image.Image) -> None:
        """Forget it."""


@pytest.mark.parametrize("pictures", [1, 2, 7, 8, 150])
@pytest.mark.parametrize("of", [1, 2, 3, 4])
def test_parts_make_up_a_batch_and_hold_what_is_mixed(pictures: int, of: int) -> None:
    parts = [Part(number, of).places(pictures) for number in range(of)]
    assert sorted(place for part in parts for place in part) == list(range(pictures))
    assert all(part == sorted(part) for part in parts)
    # As timm's Mixup does: each with its place in the flipped batch.
    assert all({pictures - 1 - place for place in part} == set(part) for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 3


def test_parts_hold_the_pictures_of_the_whole_batch(dataset: LabelledDataset) -> None:
    (whole,) = train(dataset, WHOLE.model_copy(update={"batch_size": 10}))
    for number in range(3):
        (part,) = train(dataset, WHOLE.model_copy(update={"batch_size": 10}), part=Part(number, 3))
        assert part.places is not None
        assert torch.equal(part.images, whole.images[list(part.places)])
        assert torch.equal(part.labels, whole.labels[list(part.places)])
        assert part.indices == tuple(whole.indices[place] for place in part.places)


def test_worker_processes_change_nothing(dataset: LabelledDataset) -> None:
    assert same(train(dataset, WHOLE.model_copy(update={"workers": 2})), train(dataset, WHOLE))


def global_draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_global_generators_are_neither_read_nor_moved(dataset: LabelledDataset) -> None:
    with scoped_randomness(1):
        expected = global_draws()
    with scoped_randomness(1):
        first = train(dataset, WHOLE)
        assert global_draws() == expected
        assert same(train(dataset, WHOLE), first)


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_pictures_are_left_out_and_reported_once(damaged: LabelledDataset, workers: int) -> None:
    recipe = WHOLE.model_copy(update={"workers": workers, "batch_size": COUNT, "repeats": 1})
    reasons: list[str] = []
    (batch,) = train(damaged, recipe, on_skipped=reasons.append)
    assert sorted(batch.indices) == [0, *range(3, COUNT)]
    assert len(batch.images) == len(batch.labels) == COUNT - 2
    assert sorted(reason.split()[0] for reason in reasons) == [damaged.key(1), damaged.key(2)]


def test_batches_of_which_nothing_is_left_are_not_given(damaged: LabelledDataset) -> None:
    reasons: list[str] = []
    recipe = PLAIN.model_copy(update={"batch_size": 2, "repeats": 2})
    batches = train(damaged, recipe, indices=np.array([1, 2, 0, 3]), on_skipped=reasons.append)
    given = [batch.indices for batch in batches]
    lost = {1, 2} & set(epoch_order(np.array([1, 2, 0, 3]), repeats=2, seed=0, epoch=0).tolist())
    assert len(given) == 2 - len(lost)
    assert len(reasons) == len(lost) > 0


def test_the_other_pictures_versions_do_not_depend_on_damage(
    dataset: LabelledDataset, damaged: LabelledDataset
) -> None:
    def images(batches: Iterator[Batch] | list[Batch]) -> list[torch.Tensor]:
        return [image for b in batches for image, index in zip(b.images, b.indices, strict=True) if index not in (1, 2)]

    whole, lacking = (images(train(each, WHOLE, on_skipped=str)) for each in (dataset, damaged))
    assert len(whole) == len(lacking) > 0
    assert all(torch.equal(one, other) for one, other in zip(whole, lacking, strict=True))


def test_unless_somebody_listens_a_damaged_picture_ends_the_run(damaged: LabelledDataset) -> None:
    with pytest.raises(DataError, match="cannot be read as a picture"):
        list(evaluation_batches(damaged, np.arange(COUNT), 0.875, size=16, batch_size=4))


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_is_in_order_and_complete(dataset: LabelledDataset, workers: int) -> None:
    indices = np.array([7, 3, 3, 0, 10])
    batches = list(evaluation_batches(dataset, indices, 0.75, size=16, batch_size=2, workers=workers))
    assert [batch.indices for batch in batches] == [(7, 3), (3, 0), (10,)]
    for batch in batches:
        for image, index in zip(batch.images, batch.indices, strict=True):
            assert torch.equal(image, to_image(dataset.photograph(index), 16, crop_share=0.75))


@pytest.mark.parametrize(
    "changes",
    [{}, {"rand_augment": "", "random_erasing": 0.0}, {"random_erasing": 1.0}, {"color_jitter": 0.0}],
    ids=str,
)
def test_augmentation_is_timms_once_normalised(changes: dict[str, object]) -> None:
    recipe = Recipe(**changes)
    timms = create_transform(
        32,
        is_training=True,
        scale=(recipe.crop_scale, 1.0),
        color_jitter=recipe.color_jitter or None,
        auto_augment=recipe.rand_augment or None,
        interpolation="bicubic",
        re_prob=recipe.random_erasing,
        re_mode="pixel",
    )
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    photograph, ours = Image.fromarray(astronaut()).resize((80, 60)), TrainingTransform(recipe, 32)
    for seed in range(20):
        with scoped_randomness(seed):
            expected = timms(photograph)
        with scoped_randomness(seed):
            image = ours(photograph)
        assert torch.allclose((image - mean) / std, expected, atol=1e-5)
        if not recipe.random_erasing:
            assert 0 <= image.min() <= image.max() <= 1


def test_rand_augment_at_full_strength_never_fails() -> None:
    transform = TrainingTransform(Recipe(rand_augment="rand-m10-n4-p1-inc1", random_erasing=0), 16)
    for seed in range(60):
        with scoped_randomness(seed):
            transform(Image.fromarray(astronaut()[:40, :40]))


@pytest.mark.parametrize("name", ["foo", "rand-zz9", "original-x"])
def test_unknown_rand_augment_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"rand_augment '{name}' is none that timm knows"):
        TrainingTransform(Recipe(rand_augment=name), 16)


def test_a_part_of_a_batch_is_let_go_once_it_is_copied() -> None:
    """Of 1,024 pictures all parts together are as large as the batch."""
    held: list[weakref.ref[Tensor]] = []

    def parts() -> Iterator[tuple[Batch, list[str]]]:
        for number in range(3):
            assert all(part() is None for part in held[:-1]), "but for the last one, which is on its way"
            images = torch.full((2, 3, 4, 4), float(number))
            held.append(weakref.ref(images))
            given: tuple[Batch, list[str]] = (
                Batch(images, torch.tensor([number, number]), (number, number), (2 * number, 2 * number + 1)),
                [],
            )
            del images
            yield given
            del given

    batch = _join(parts(), 8, pytest.fail)
    assert batch.images[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2], "two pictures could not be read"
    assert batch.labels.tolist() == list(batch.indices) == [0, 0, 1, 1, 2, 2]
    assert batch.places == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("workers", [0, 2])
def test_puzzles_are_drawn_where_pictures_are_read(
    workers: int, dataset: LabelledDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(epoch: int, step: int, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        drawn = torch.tensor([[epoch, step, place] for place in places])
        return drawn > 0, drawn

    monkeypatch.setattr(loading, "CHUNK", 2)
    recipe = Recipe(batch_size=5, workers=workers)
    for step, batch in enumerate(train(dataset, recipe, epoch=1, draw=draw)):
        assert batch.drawn is not None
        expected = torch.tensor([[1, step, place] for place in range(5)])
        assert torch.equal(batch.drawn[1], expected)
        assert torch.equal(batch.drawn[0], expected > 0)
    assert all(batch.drawn is None for batch in train(dataset, recipe, epoch=1))
