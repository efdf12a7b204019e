"""What training does to its batches, against slow implementations."""

import pytest
import torch

from fedmjp.config import ModelConfig
from fedmjp.models.build import build
from fedmjp.training.config import Puzzle
from fedmjp.training.puzzles import Puzzled, puzzled

MODEL = build(ModelConfig.parse({"name": "deit_micro", "image_size": 32, "patch_size": 4, "classes": 10}))


def images(count: int = 6) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def shuffled(seed: int = 0, epoch: int = 0, **puzzle: object) -> Puzzled:
    generator = torch.Generator().manual_seed(seed)
    return puzzled(images(), MODEL, Puzzle.parse(puzzle), epoch=epoch, generator=generator)


def patch(picture: torch.Tensor, index: int) -> torch.Tensor:
    row, column = divmod(index, 8)
    return picture[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]


@pytest.mark.parametrize("masks", ["picture", "batch"])
def test_masked_patches_move_and_the_others_stay(masks: str) -> None:
    result = shuffled(shuffle="jigsaw", mask_ratio=0.4, masks=masks)
    assert result.jigsaw is not None
    for index, picture in enumerate(images()):
        for place in range(64):
            source = int(result.jigsaw.source[index, place])
            assert torch.equal(patch(result.images[index], place), patch(picture, source))
            assert result.jigsaw.mask[index, place] or source == place
    same = all(torch.equal(row, result.jigsaw.mask[0]) for row in result.jigsaw.mask)
    assert same == (masks == "batch")


def test_spp_moves_all_patches_and_the_pixels_in_them_alike() -> None:
    result = shuffled(shuffle="pixels")
    assert result.jigsaw is None
    assert not torch.equal(result.images, images())
    moved = result.images
    # Where does the first patch of the first picture come from, and by which order of pixels?
    wanted = patch(moved[0], 0).reshape(3, 16).T
    candidates = [patch(images()[0], index).reshape(3, 16).T for index in range(64)]
    (source,) = [
        index
        for index, each in enumerate(candidates)
        if {tuple(p) for p in each.tolist()} == {tuple(p) for p in wanted.tolist()}
    ]
    order = [candidates[source].tolist().index(pixel) for pixel in wanted.tolist()]
    for index, picture in enumerate(images()):
        assert torch.equal(patch(moved[index], 0).reshape(3, 16), patch(picture, source).reshape(3, 16)[:, order])


def test_no_puzzle_changes_nothing() -> None:
    for result in (shuffled(), shuffled(shuffle="jigsaw", warmup_epochs=2, epoch=1)):
        assert torch.equal(result.images, images())
        assert result.jigsaw is None


def test_the_probability_is_that_of_a_batch() -> None:
    applied = [
        shuffled(seed, shuffle="jigsaw", mask_ratio=0.4, probability=0.5).jigsaw is not None for seed in range(400)
    ]
    assert sum(applied) == pytest.approx(200, abs=50)  # five standard deviations
