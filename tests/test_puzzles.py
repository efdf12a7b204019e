"""What training does to its batches, against slow implementations."""

import pytest
import torch

from fedmjp.defences.base import Arranged
from fedmjp.defences.pipeline import read_pipeline
from fedmjp.learning import Puzzle
from fedmjp.training.puzzles import TrainingPuzzles


def images(count: int = 6) -> torch.Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def shuffled(*defences: str, seed: int = 0, epoch: int = 0, **puzzle: object) -> Arranged | None:
    puzzles = TrainingPuzzles(read_pipeline(defences), Puzzle.parse(puzzle), 8, seed)
    return puzzles.arrange(images(), epoch, 0, range(len(images())))


def patch(picture: torch.Tensor, index: int) -> torch.Tensor:
    row, column = divmod(index, 8)
    return picture[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]


@pytest.mark.parametrize("masks", ["picture", "batch"])
def test_masked_patches_move_and_the_others_stay(masks: str) -> None:
    result = shuffled("jigsaw:mask_ratio=0.4", masks=masks)
    assert result is not None
    for index, picture in enumerate(images()):
        for place in range(64):
            source = int(result.source[index, place])
            assert torch.equal(patch(result.images[index], place), patch(picture, source))
            assert result.mask[index, place] or source == place
    same = all(torch.equal(row, result.mask[0]) for row in result.mask)
    assert same == (masks == "batch")


def test_spp_moves_all_patches_and_the_pixels_in_them_alike() -> None:
    result = shuffled("pixels", masks="batch")
    assert result is not None
    assert result.mask.all()
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


def test_each_picture_has_permutations_of_its_own_unless_the_batch_shares_one() -> None:
    for masks in ("picture", "batch"):
        result = shuffled("pixels", masks=masks)
        assert result is not None
        assert (len({tuple(row) for row in result.source.tolist()}) == 1) == (masks == "batch")


def test_without_a_puzzle_pictures_stay_as_they_are() -> None:
    assert shuffled() is None
    assert shuffled("gaussian") is None
    assert shuffled("jigsaw", warmup_epochs=2, epoch=1) is None
    assert shuffled("jigsaw", warmup_epochs=2, epoch=2) is not None


def test_the_probability_is_that_of_a_batch() -> None:
    applied = [shuffled("jigsaw:mask_ratio=0.4", seed=seed, probability=0.5) is not None for seed in range(400)]
    assert sum(applied) == pytest.approx(200, abs=50)  # five standard deviations


@pytest.mark.parametrize("masks", ["picture", "batch"])
@pytest.mark.parametrize("defence", ["mjp:mask_ratio=0.4", "jigsaw:mask_ratio=0.4", "mjp:shuffle=false"])
def test_what_is_drawn_ahead_is_what_is_drawn_with_the_pictures(masks: str, defence: str) -> None:
    puzzles = TrainingPuzzles(
        read_pipeline([defence]), Puzzle.parse({"masks": masks, "probability": 0.5}), 8, 0, ("client", 1)
    )
    places, applied = [3, 1, 5, 0], 0
    for step in range(8):
        drawn = puzzles.ahead(2, step, places)
        expected, made = (puzzles.arrange(images(4), 2, step, places, each) for each in (None, drawn))
        assert (expected is None) == (made is None) == (drawn is None)
        if expected is not None and made is not None:
            applied += 1
            assert all(part.is_contiguous() for part in drawn or ()), "CUDA cannot be sent rows that share their memory"
            for part in ("images", "mask", "source"):
                assert torch.equal(getattr(made, part), getattr(expected, part))
    assert 0 < applied < 8


def test_what_arranges_in_its_own_way_is_not_drawn_ahead() -> None:
    puzzles = TrainingPuzzles(read_pipeline(["pixels"]), Puzzle(), 8, 0)
    assert puzzles.ahead(0, 0, range(6)) is None
    assert puzzles.arrange(images(), 0, 0, range(6)) is not None
