"""Random crops: drawn as torchvision draws them, another for each upload, and the private picture of it."""

import math
from pathlib import Path

import pytest
import torch
from scipy.stats import ks_2samp
from torchvision.transforms import RandomResizedCrop

from fedmjp.data.crops import random_crop
from fedmjp.data.pictures import LabelledPicture
from fedmjp.errors import ConfigError
from fedmjp.exchange import prepare_private
from fedmjp.facade import bundled_pictures
from fedmjp.models.build import build_vit
from fedmjp.private import PrivateBatch
from fedmjp.seeds import numpy_generator, scoped_randomness
from fedmjp.updates import gradient
from tests.conftest import small_scenario

SIZE, SCALE, DRAWS = 64, 0.2, 500


def box_of(crop: torch.Tensor) -> tuple[float, ...]:
    """Middle, width and height of a crop of the ramps below, in pixels; the width is negative where it was flipped."""
    low, high = SIZE // 4, SIZE - SIZE // 4 - 1  # away from the edge, where bicubic weights end
    ends = crop[0, SIZE // 2, low], crop[0, SIZE // 2, high], crop[1, low, SIZE // 2], crop[1, high, SIZE // 2]
    left, right, top, bottom = (SIZE * float(end) for end in ends)
    enlarged = SIZE / (high - low)
    return (left + right) / 2, (top + bottom) / 2, (right - left) * enlarged, (bottom - top) * enlarged


def test_crops_are_drawn_as_torchvision_draws_them() -> None:
    ramp = ((torch.arange(SIZE) + 0.5) / SIZE).expand(SIZE, SIZE)
    image = torch.stack([ramp, ramp.mT, torch.zeros(SIZE, SIZE)])
    ours = [box_of(random_crop(image, SCALE, generator=numpy_generator(0, "test", draw))) for draw in range(DRAWS)]
    with scoped_randomness(0):
        drawn = [RandomResizedCrop.get_params(image, [SCALE, 1], [3 / 4, 4 / 3]) for _ in range(4 * DRAWS)]
    theirs = [(left + width / 2, top + height / 2, width, height) for top, left, height, width in drawn]
    flipped = sum(width < 0 for _, _, width, _ in ours)
    assert abs(flipped - DRAWS / 2) < 4 * math.sqrt(DRAWS / 4)
    for measure in (lambda box: box[0], lambda box: box[1], lambda box: abs(box[2]) * box[3], lambda box: box[3]):
        assert ks_2samp([measure(box) for box in ours], [measure(box) for box in theirs]).pvalue > 1e-3


def test_a_whole_picture_is_as_it_was_or_flipped() -> None:
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    made = [random_crop(image, 1.0, generator=numpy_generator(0, "test", draw)) for draw in range(8)]
    assert {torch.equal(crop, image) for crop in made} == {True, False}
    assert all(torch.equal(crop, image) or torch.equal(crop.flip(-1), image) for crop in made)


def test_a_crop_is_the_private_picture_of_its_upload(tmp_path: Path) -> None:
    plain, defended = (small_scenario(crop_scale=0.3, defences=defences) for defences in ("none", "mjp"))
    size = plain.model.image_size
    (picture,) = bundled_pictures(1, size=size)
    first, second = (prepare_private(plain, [picture], number) for number in (0, 1))
    assert not torch.equal(first.clean, second.clean), "another in each upload"
    assert not torch.equal(first.clean[0], picture.image)
    assert torch.equal(first.clean, prepare_private(defended, [picture], 0).clean), "the same whatever defends"
    first.save(tmp_path / "private")
    again = PrivateBatch.load(tmp_path / "private")
    assert torch.equal(again.clean, first.clean)
    assert again.sha256(0) == picture.digest(), "it is known whose crop it is"
    shown = LabelledPicture("the crop alone", first.clean[0], picture.label)
    expected = gradient(build_vit(plain.network), prepare_private(small_scenario(), [shown], 0))
    sent = plain.exchange([picture]).upload.tensors
    assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())


def test_crops_of_several_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="crop_scale is of one step, not of 2"):
        small_scenario(crop_scale=0.5, update="delta", local_steps=2)
