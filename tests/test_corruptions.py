"""Corruptions of ImageNet-C against what the official generators made of the same picture (golden/imagenet_c.py)."""

from pathlib import Path

import numpy as np
import pytest

from fedmjp.errors import BadInputError, UnknownNameError
from fedmjp.evaluation.corruptions import CORRUPTIONS, corrupt, draw_frost_texture, lay_frost, save_as_jpeg
from fedmjp.evaluation.severities import NAMES, SEVERITIES, look_up_strength
from tests.golden.imagenet_c import FUNCTIONS, kept, photograph, picture

GOLDEN = Path(__file__).parent / "golden" / "imagenet_c.npz"
# Values are cut to whole numbers, so that the last bit of a sum decides: of these kinds a share of values may be one
# grey level off. OpenCV moves pixels by whole 32nds, which elastic_transform does not.
OFF = {"brightness": 0.2, "defocus_blur": 0.2, "elastic_transform": 0.2, "glass_blur": 0.05}
FEW = 0.02


class Draws:
    """``numpy.random.seed`` as a generator: the draws of the official code."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed)
        self.normal, self.poisson, self.uniform = self._state.normal, self._state.poisson, self._state.uniform
        self.integers = self._state.randint


def ours(name: str, severity: int, side: int) -> np.ndarray:
    how, shown = look_up_strength(name, severity, side), picture(side)
    if name == "frost":  # the photograph instead of our texture, cut out where the official code does
        draws = np.random.RandomState(severity)
        draws.randint(5)
        top, left = draws.randint(0, 300 - side), draws.randint(0, 400 - side)
        values = lay_frost(shown, photograph()[top : top + side, left : left + side, ::-1], how)
    else:
        draws = np.random.default_rng(severity) if name == "impulse_noise" else Draws(severity)
        values = CORRUPTIONS[name](shown, how, draws)
    return np.clip(values, 0, 255).astype(np.uint8)


@pytest.mark.parametrize("side", [32, 64, 224])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_draws_give_the_official_pixels(name, side):
    golden, places = np.load(GOLDEN)[str(side)][FUNCTIONS.index(name)], kept(side)
    for severity in SEVERITIES:
        found = ours(name, severity, side)[np.ix_(places, places)]
        off = np.abs(found.astype(int) - golden[severity - 1].astype(int))
        assert off.max() <= 1, severity
        assert (off > 0).mean() <= OFF.get(name, FEW), severity


def test_the_golden_values_tell_corruptions_and_severities_apart():
    golden = np.load(GOLDEN)["64"].astype(int)
    flat = golden.reshape(len(FUNCTIONS) * len(SEVERITIES), -1)
    distances = np.abs(flat[:, None] - flat[None]).max(axis=2)
    assert distances[~np.eye(len(flat), dtype=bool)].min() > 1


def test_frost_has_brightness_and_contrast_of_photographs():
    textures = [draw_frost_texture(64, np.random.default_rng(seed)) for seed in range(40)]
    levels, deviations = ([getattr(np, what)(texture.mean(axis=2)) for texture in textures] for what in ("mean", "std"))
    # The crops of the official photographs have 112 to 206, and 14 to 35.
    assert 105 < min(levels) < 130 < 190 < max(levels) < 210
    assert 13 < min(deviations) < 20 < 27 < max(deviations) < 36


@pytest.mark.parametrize("name", NAMES)
def test_a_generator_decides_and_any_side_will_do(name):
    for side in (20, 48, 96):
        shown = picture(side)
        first, again, other = (corrupt(shown, name, 3, np.random.default_rng(seed)) for seed in (0, 0, 1))
        assert first.shape == shown.shape
        assert first.dtype == np.uint8
        assert (first == again).all()
        assert (first != shown).any()
        drawn = name not in ("brightness", "contrast", "defocus_blur", "jpeg_compression", "pixelate", "zoom_blur")
        assert (first != other).any() == drawn


def test_lengths_grow_with_the_picture_and_shares_do_not():
    assert look_up_strength("defocus_blur", 3, 448) == (12, 1)
    assert look_up_strength("motion_blur", 5, 96) == (18, 4.5)
    assert look_up_strength("gaussian_noise", 5, 96) == look_up_strength("gaussian_noise", 5, 64)
    assert look_up_strength("gaussian_noise", 5, 320) == look_up_strength("gaussian_noise", 5, 224)
    assert look_up_strength("snow", 2, 16)[4:6] == (5, 2)


def test_an_unknown_corruption_names_the_nearest():
    with pytest.raises(UnknownNameError, match=r"Unknown corruption 'gausian_noise'\. Did you mean gaussian_noise"):
        corrupt(picture(32), "gausian_noise", 1, np.random.default_rng(0))
    with pytest.raises(BadInputError, match="severity 6 is none from 1 to 5"):
        corrupt(picture(32), "fog", 6, np.random.default_rng(0))


def test_jpeg_is_as_pillow_saves_it():
    shown = picture(64)
    assert 0 < np.abs(save_as_jpeg(shown).astype(int) - shown).mean() < 5
