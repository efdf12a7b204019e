"""Stand-ins for masked patches that are missing: what they are fitted to, and what attention is worth with them."""

from dataclasses import replace

import pytest
import torch

from fedmjp.attacks.mjp.span.equations import PatchSet, attended
from fedmjp.attacks.mjp.span.unseen import CompletePatches, fitted
from fedmjp.attacks.mjp.span.visible import VisiblePatches
from tests.test_mjp_separation import repeated, without
from tests.test_mjp_span import Case

__all__ = ["repeated"]
MISSING = (3, 4, 7)  # nearly alike to the first


def relative(of: Case, tokens: CompletePatches) -> torch.Tensor:
    """(visible,) residuals in units of rounding's."""
    entering = of.setup.tokens(tokens.visible.coefficients, of.setup.visible)
    point = of.setup.at(tokens.attended(of.setup)(entering))
    return point.cost.sqrt() / of.setup.noise(point)


@pytest.fixture
def incomplete(repeated: Case) -> CompletePatches:
    """The truth, but for some masked patches, with copies of one that they resemble in their places."""
    truth = repeated.truth
    everywhere = torch.ones(len(truth.visible), dtype=torch.bool)
    visible = VisiblePatches(truth.visible.clone(), torch.zeros(len(truth.visible), dtype=torch.float64), everywhere)
    known = without(truth, *MISSING)
    copies = known.masked[:1].repeat(len(MISSING), 1)
    noise = torch.randn(copies.shape, generator=torch.Generator().manual_seed(3)).double()
    stirred = copies + 0.01 * copies.norm(dim=1, keepdim=True) * noise / copies.shape[1] ** 0.5
    return CompletePatches(visible, known.masked, stirred, copies)


def test_visible_patches_fit_their_equations_with_fitted_stand_ins(repeated: Case, incomplete: CompletePatches) -> None:
    truth = relative(repeated, replace(incomplete, unseen=repeated.truth.masked[list(MISSING)]))
    assert relative(repeated, incomplete).median() > 100 * truth.median()
    assert relative(repeated, fitted(repeated.setup, incomplete, steps=2)).median() < 10 * truth.median()
    assert relative(repeated, fitted(repeated.setup, incomplete, steps=16)).median() < 1.5 * truth.median()


def test_fitting_brings_visible_patches_back(repeated: Case, incomplete: CompletePatches) -> None:
    """Moved to where they fit copies, and back."""
    noise = torch.randn(incomplete.visible.coefficients.shape, generator=torch.Generator().manual_seed(2)).double()
    true = incomplete.visible.coefficients
    moved = true + 0.02 * noise * true.norm(dim=1, keepdim=True) / noise.norm(dim=1, keepdim=True)
    after = fitted(repeated.setup, replace(incomplete, visible=replace(incomplete.visible, coefficients=moved)), 4)
    errors = (after.visible.coefficients - true).norm(dim=1) / (moved - true).norm(dim=1)
    assert errors.median() < 0.05


def test_found_patches_are_held_and_all_stand_ins_stay_of_the_level(
    repeated: Case, incomplete: CompletePatches
) -> None:
    after = fitted(repeated.setup, incomplete, steps=2)
    assert torch.equal(after.masked, incomplete.masked)
    torch.testing.assert_close(
        after.unseen @ repeated.setup.level, torch.ones(len(MISSING)).double(), atol=1e-3, rtol=0
    )


def test_a_visible_patch_that_is_not_good_is_a_stand_in(repeated: Case, incomplete: CompletePatches) -> None:
    """Its place is attended to, whatever its own equations say: those of the others bring it nearer."""
    complete = replace(
        incomplete, masked=repeated.truth.masked, unseen=repeated.truth.masked[:0], around=repeated.truth.masked[:0]
    )
    good, wrong = complete.visible.good.clone(), complete.visible.coefficients.clone()
    good[2] = False
    wrong[2] = wrong[3]
    visible = VisiblePatches(wrong, complete.visible.residual, good)
    after = fitted(repeated.setup, replace(complete, visible=visible), steps=4)
    others = good.nonzero().flatten()
    before = relative(repeated, replace(complete, visible=visible))[others]
    assert relative(repeated, after)[others].median() < 0.1 * before.median()


def test_dropped_patches_become_stand_ins(incomplete: CompletePatches, repeated: Case) -> None:
    dropped = torch.zeros(len(incomplete.masked), dtype=torch.bool)
    dropped[1] = True
    after = incomplete.without(dropped)
    assert len(after.masked) + len(after.unseen) == repeated.setup.unknowns
    assert torch.equal(after.unseen[-1], incomplete.masked[1])
    assert isinstance(after.all(repeated.setup), PatchSet)
    entering = repeated.setup.tokens(incomplete.masked[:2], repeated.setup.hole[:2])
    torch.testing.assert_close(after.attended(repeated.setup)(entering), incomplete.attended(repeated.setup)(entering))
    torch.testing.assert_close(
        attended(repeated.setup, after.all(repeated.setup))(entering), after.attended(repeated.setup)(entering)
    )


def test_without_a_good_visible_patch_nothing_moves(repeated: Case, incomplete: CompletePatches) -> None:
    nothing = replace(incomplete, visible=replace(incomplete.visible, good=incomplete.visible.good & False))
    after = fitted(repeated.setup, nothing, steps=2)
    assert torch.equal(after.unseen, incomplete.unseen)


def test_where_nothing_is_masked_nothing_moves(repeated: Case, incomplete: CompletePatches) -> None:
    nothing = incomplete.masked[:0]
    after = fitted(repeated.setup, CompletePatches(incomplete.visible, nothing, nothing, nothing), steps=2)
    assert torch.equal(after.visible.coefficients, incomplete.visible.coefficients)
