"""Consistency against slow loops over single pictures and against what must hold for any model."""

import math

import numpy as np
import pytest
import torch

from fedmjp import jigsaw
from fedmjp.errors import BadInputError, DataError
from fedmjp.evaluation.consistency import Consistency, Puzzles, compare_with_shuffled
from fedmjp.models.classifier import VitClassifier
from fedmjp.seeds import torch_generator
from tests.test_accuracy import random_batches, small_classifier

RATIOS = (0.3, 0.0, 1.0)
PUZZLES = Puzzles(RATIOS, seed=3)


def key_of(index: int) -> str:
    return f"class/{index}.jpg"


def measured(model: VitClassifier, puzzles: Puzzles = PUZZLES, *sizes: int) -> Consistency:
    return compare_with_shuffled(model, random_batches(*(sizes or (5, 4))), puzzles, key_of=key_of)


def shuffled_by_hand(image: torch.Tensor, source: list[int]) -> torch.Tensor:
    """Patch by patch, 8 x 8 patches of 2 x 2 pixels."""
    moved = image.clone()
    for place, origin in enumerate(source):
        (row, column), (from_row, from_column) = divmod(place, 8), divmod(origin, 8)
        for y, x in ((0, 0), (0, 1), (1, 0), (1, 1)):
            moved[:, 2 * row + y, 2 * column + x] = image[:, 2 * from_row + y, 2 * from_column + x]
    return moved


@pytest.mark.parametrize("defended", [False, True])
def test_equals_the_official_loop_over_single_pictures(defended: bool):
    """As consistency.py of yhlleo/MJP goes: one picture, its puzzle, two class tokens, two logits."""
    model = small_classifier(seed=1, defended=defended)
    if defended:
        torch.nn.init.constant_(model.unknown_embedding, 2.0)
    found, place = measured(model), 0
    for batch in random_batches(5, 4):
        for image, label in zip(batch.images, batch.labels, strict=True):
            for row, ratio in enumerate(RATIOS):
                generator = torch_generator(3, "consistency", ratio, key_of(place))
                puzzle = jigsaw.draw(8, ratio, generator=generator)
                moved = shuffled_by_hand(image, puzzle.source[0].tolist())
                tokens, classes = [], []
                for picture, mask in ((image, None), (moved, puzzle.mask if defended else None)):
                    tokens.append(_class_token(model, picture, mask))
                    classes.append(int(np.argmax(model(picture[None], mask)[0].detach().numpy())))
                distance = math.sqrt(sum((a - b) ** 2 for a, b in zip(*tokens, strict=True)))
                assert found.difference[row, place] == pytest.approx(distance, abs=1e-4)
                assert found.agrees[row, place] == (classes[0] == classes[1])
                assert found.correct_shuffled[row, place] == (classes[1] == int(label))
                assert found.correct[place] == (classes[0] == int(label))
                assert found.realised[row, place] == puzzle.mask.sum() / 64
            place += 1
    assert found.keys == tuple(map(key_of, range(9)))
    assert 0 < found.agrees[[0, 2]].sum() < 18


def _class_token(model: VitClassifier, picture: torch.Tensor, mask: torch.Tensor | None) -> list[float]:
    """Through timm alone, with the position embedding of this mask written into it."""
    kept = model.backbone.pos_embed.data.clone()
    if mask is not None:
        for patch in mask[0].nonzero().flatten().tolist():
            model.backbone.pos_embed.data[0, 1 + patch] = model.unknown_embedding.data
    tokens = model.backbone.forward_features((picture[None] - 0.5) / 0.5)
    model.backbone.pos_embed.data = kept
    return tokens[0, 0].tolist()


def test_a_model_without_positions_is_not_moved_by_any_puzzle():
    """Row B of the paper's Table 4: consistency 100 %."""
    model = small_classifier()
    model.backbone.pos_embed = None
    found = measured(model)
    assert found.agrees.all()
    assert np.abs(found.difference).max() < 1e-4
    assert (found.correct_shuffled == found.correct).all()
    assert found.realised[2].min() > 0.5  # there was something to be moved by


@pytest.mark.parametrize("defended", [False, True])
def test_an_empty_puzzle_changes_nothing(defended: bool):
    found = measured(small_classifier(defended=defended))
    assert (found.realised[1] == 0).all()
    assert (found.difference[1] == 0).all()
    assert found.agrees[1].all()


def test_every_model_meets_the_same_puzzles_whatever_the_batches_and_ratios():
    one = measured(small_classifier(seed=1))
    other = measured(small_classifier(seed=2, defended=True), Puzzles((0.3,), seed=3), 1, 2, 6)
    assert (one.realised[0] == other.realised[0]).all()
    again = measured(small_classifier(seed=1), Puzzles((0.3,), seed=3), 9)
    assert again.difference[0] == pytest.approx(one.difference[0], abs=1e-4)
    assert (PUZZLES.draw(8, 0.3, one.keys)[0][2:4] == Puzzles((0.3,), seed=3).draw(8, 0.3, one.keys[2:4])[0]).all()
    assert (PUZZLES.draw(8, 0.3, one.keys)[0] != Puzzles((0.3,), seed=4).draw(8, 0.3, one.keys)[0]).any()


def test_a_defended_model_may_be_kept_from_the_mask():
    model = small_classifier(defended=True)
    told, untold = measured(model), measured(model, Puzzles(RATIOS, seed=3, tell_mask=False))
    undefended = small_classifier()
    assert (untold.difference == measured(undefended).difference).all()
    assert (told.difference[0] != untold.difference[0]).any()


def test_predictions_that_are_not_finite_are_wrong_agree_with_none_and_are_told():
    batches = random_batches(5)
    batches[0].images[2] = math.nan
    batches[0].labels[2] = 0
    found = compare_with_shuffled(small_classifier(), batches, PUZZLES, key_of=key_of)
    assert found.undecided.tolist() == [False, False, True, False, False]
    assert not found.correct[2]
    assert not found.agrees[:, 2].any()
    assert not found.correct_shuffled[:, 2].any()
    assert np.isnan(found.difference[:, 2]).all()


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ((0.1, 1.5), "mask ratio 1.5 is outside"),
        ((-0.1,), "mask ratio -0.1 is outside"),
        ((math.nan,), "mask ratio nan is outside"),
        ((0.1, 0.1), "each named once, got 0.1, 0.1"),
        ((), "at least one"),
    ],
)
def test_ratios_that_cannot_be(ratios: tuple[float, ...], message: str):
    with pytest.raises(BadInputError, match=message):
        Puzzles(ratios)


def test_no_picture_is_an_error():
    with pytest.raises(DataError, match="no picture to evaluate on"):
        compare_with_shuffled(small_classifier(), [], PUZZLES, key_of=key_of)
