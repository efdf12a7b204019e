"""The jigsaw against the official generator's statistics and against its own algebra."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from fedmjp import jigsaw
from fedmjp.errors import BadInputError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "jigsaw_masks.json").read_text())
GRID = GOLDEN["grid"]
DRAWS = 1_000
# The golden spread of a 1,000-draw mean comes from 20 batches and is itself uncertain by about 16 %;
# six of those deviations is a bound that a right generator practically never crosses.
SIGMAS = 6
SMALLEST_DEVIATION = 2e-3


def statistics(ratio: float) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    masks = np.stack(
        [jigsaw.draw_mask(GRID, ratio, generator=generator).numpy().reshape(GRID, GRID) for _ in range(DRAWS)]
    )
    counts = masks.sum(axis=(1, 2))
    boxes = [box for mask in masks for box in ndimage.find_objects(ndimage.label(mask)[0])]
    ring = np.ones((GRID, GRID), dtype=bool)
    ring[1:-1, 1:-1] = False
    frequency = masks.mean(axis=0)
    middle = slice(GRID // 2 - 2, GRID // 2 + 2)
    return {
        "mean_masked": counts.mean(),
        "share_empty": (counts == 0).mean(),
        "share_exact": (counts == int(GRID * GRID * ratio)).mean(),
        "mean_components": len(boxes) / DRAWS,
        "mean_bbox_height": np.mean([rows.stop - rows.start for rows, _ in boxes]),
        "mean_bbox_width": np.mean([columns.stop - columns.start for _, columns in boxes]),
        "freq_corner": frequency[[0, 0, -1, -1], [0, -1, 0, -1]].mean(),
        "freq_border": frequency[ring].mean(),
        "freq_centre": frequency[middle, middle].mean(),
    }


@pytest.mark.parametrize("ratio", [float(ratio) for ratio in GOLDEN["ratios"]])
def test_masks_have_the_official_distribution(ratio: float) -> None:
    official = GOLDEN["ratios"][f"{ratio:g}"]
    deviations = official["std_of_batch_means_1000"]
    for name, ours in statistics(ratio).items():
        tolerance = max(SIGMAS * deviations[name], SMALLEST_DEVIATION if name.startswith(("share", "freq")) else 0)
        assert ours == pytest.approx(official[name], abs=tolerance), name


@given(st.floats(0, 1), st.integers(2, 16), st.integers(0, 2**31))
def test_mask_never_exceeds_the_wanted_ratio(ratio: float, grid: int, seed: int) -> None:
    mask = jigsaw.draw_mask(grid, ratio, generator=torch.Generator().manual_seed(seed))
    assert mask.shape == (grid * grid,)
    assert int(mask.sum()) <= int(grid * grid * ratio)


@given(st.floats(0, 1), st.sampled_from([(2, 4), (7, 3), (14, 2)]), st.integers(0, 2**31))
def test_rearranging_by_the_inverse_restores_the_image_exactly(ratio: float, shape: tuple[int, int], seed: int) -> None:
    grid, patch = shape
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(1, 3, grid * patch, grid * patch, generator=generator)
    puzzle = jigsaw.draw(grid, ratio, generator=generator)
    shuffled = jigsaw.rearrange(images, puzzle.source)
    assert torch.equal(jigsaw.rearrange(shuffled, puzzle.source.argsort(dim=1)), images)
    assert torch.equal(puzzle.source.sort(dim=1).values[0], torch.arange(grid * grid))


def test_rearranging_moves_patches_as_a_slow_loop_would(generator: torch.Generator) -> None:
    images = torch.rand(1, 3, 28, 28, generator=generator)
    puzzle = jigsaw.draw(14, 0.5, generator=generator)
    slow = images.clone()
    for place, source in enumerate(puzzle.source[0].tolist()):
        (row, column), (from_row, from_column) = divmod(place, 14), divmod(source, 14)
        slow[0, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = images[
            0, :, 2 * from_row : 2 * from_row + 2, 2 * from_column : 2 * from_column + 2
        ]
    assert torch.equal(jigsaw.rearrange(images, puzzle.source), slow)


def test_patches_outside_the_mask_stay(generator: torch.Generator) -> None:
    puzzle = jigsaw.draw(14, 0.27, generator=generator)
    assert torch.equal(puzzle.source[~puzzle.mask], torch.arange(196)[~puzzle.mask[0]])
    assert not torch.equal(puzzle.source[puzzle.mask], torch.arange(196)[puzzle.mask[0]])


def test_small_ratios_draw_empty_masks_and_those_work() -> None:
    generator = torch.Generator().manual_seed(0)
    puzzles = [jigsaw.draw(14, 0.03, generator=generator) for _ in range(100)]
    empty = [puzzle for puzzle in puzzles if not puzzle.mask.any()]
    assert empty, "about one in six draws is empty at this ratio"
    images = torch.rand(1, 3, 28, 28)
    assert torch.equal(jigsaw.rearrange(images, empty[0].source), images)
    assert empty[0].mask.float().mean().item() == 0


def test_ratio_zero_masks_nothing(generator: torch.Generator) -> None:
    assert not jigsaw.draw_mask(14, 0.0, generator=generator).any()


@pytest.mark.parametrize("ratio", [-0.01, 1.01])
def test_ratio_outside_zero_to_one_is_refused(ratio: float, generator: torch.Generator) -> None:
    with pytest.raises(BadInputError, match=str(ratio)):
        jigsaw.draw_mask(14, ratio, generator=generator)


def test_patches_that_do_not_tile_are_refused() -> None:
    with pytest.raises(BadInputError, match="30 x 30"):
        jigsaw.rearrange(torch.zeros(1, 3, 30, 30), torch.arange(196)[None])


def test_same_generator_state_gives_the_same_puzzle() -> None:
    first, second = (jigsaw.draw(14, 0.27, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first.source, second.source)
    assert torch.equal(first.mask, second.mask)
