"""Masked patches that resemble one another: the merit that keeps them apart, where to look, and how many there are."""

import time
from dataclasses import replace

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedmjp.attacks.mjp.span.apart import SeparationMerit
from fedmjp.attacks.mjp.span.counts import with_copies
from fedmjp.attacks.mjp.span.equations import PatchSet, attended
from fedmjp.attacks.mjp.span.minimise import Steps, minimise
from fedmjp.attacks.mjp.span.naturalness import Naturalness
from fedmjp.attacks.mjp.span.search import SpanSearch
from fedmjp.attacks.mjp.span.separation import separate
from fedmjp.attacks.mjp.span.starts import directions_from
from fedmjp.attacks.mjp.span.visible import IMPOSSIBLE, VisiblePatches
from fedmjp.data.selection import Selection
from fedmjp.patches import from_patches, to_patches
from fedmjp.private import PrivateBatch
from fedmjp.settings import Picture
from tests.conftest import batch_of, small_model, upload_of
from tests.test_mjp_span import Case, case_of, true_tokens

ALIKE = 0.03  # of 1: how far a patch is from the one that it resembles


@pytest.fixture(scope="module")
def repeated(pictures: Selection) -> Case:
    """Its masked patches are three and, nearly alike to these, all others."""
    model, batch = small_model(defence="mjp"), batch_of(pictures, Picture.CLEAN, mask_ratio=0.5)
    patches = to_patches(batch.clean, model.patch_size)
    places = batch.mask[0].nonzero().flatten()
    noise = torch.rand(patches[0, places].shape, generator=torch.Generator().manual_seed(1)) - 0.5
    patches[0, places] = 0.1 + 0.8 * patches[0, places[kinds(len(places))]] + 2 * 3**0.5 * ALIKE * noise
    clean = from_patches(patches.clamp(0, 1), batch.clean.shape[-1], model.patch_size)
    changed: PrivateBatch = replace(batch, clean=clean)
    return case_of(model, changed, upload_of(model, changed))


def kinds(count: int) -> Tensor:
    """Which of three patches each of so many resembles: the first one most of them."""
    return torch.tensor([index if index < 3 else max(2 - index % 5, 0) for index in range(count)])


def without(known: PatchSet, *missing: int) -> PatchSet:
    kept = [row for row in range(len(known.masked)) if row not in missing]
    return PatchSet(known.places, known.visible, known.masked[kept])


def costs(of: Case, masked: Tensor) -> Tensor:
    tokens = of.setup.tokens(masked, of.setup.hole[:1].expand(len(masked)))
    return of.setup.at(attended(of.setup, of.truth)(tokens)).cost


def test_only_the_missing_token_has_a_merit_of_nothing(repeated: Case) -> None:
    some, missing = without(repeated.truth, 0), repeated.truth.masked[:1]
    apart = SeparationMerit.of(repeated.setup, some, attended(repeated.setup, repeated.truth))
    alike = some.masked[int((kinds(len(some.masked) + 1)[1:] == 0).nonzero()[0])][None]
    tried = torch.cat([missing, (missing + alike) / 2, (3 * missing + alike) / 4])
    merits = apart.value(costs(repeated, tried), tried, torch.arange(3))
    plain = costs(repeated, tried).sqrt() / repeated.setup.noise(
        repeated.setup.at(
            attended(repeated.setup, repeated.truth)(repeated.setup.tokens(tried, repeated.setup.hole[:3]))
        )
    )
    assert merits[0] < 1e-4
    assert merits[1] > 20 * merits[0]
    assert merits[2] > 5 * merits[0]
    assert plain[1] / plain[0] < merits[1] / merits[0], "the residual alone tells mixtures less well"


@pytest.mark.parametrize("members", [False, True])
def test_the_merits_gradient_is_that_of_autograd(repeated: Case, members: bool) -> None:
    setup, known = repeated.setup, repeated.truth if members else without(repeated.truth, 0, 5)
    with_attention = attended(setup, repeated.truth)
    apart = SeparationMerit.of(setup, known, with_attention)
    apart = apart.among(known) if members else apart
    rows = torch.arange(3)
    at = repeated.truth.masked[:3] * 1.02
    places = setup.hole[:1].expand(3)

    def merit(values: Tensor) -> Tensor:
        tokens = setup.tokens(values, places)  # attention is held fixed in derivatives
        point = setup.at(tokens + (with_attention(tokens) - tokens).detach())
        cost = point.cost + setup.level_error(values, places).square()
        fixed = replace(apart, attended=lambda entering: entering + (with_attention(tokens) - tokens).detach())
        return fixed.value(cost, values, rows)

    leaf = at.clone().requires_grad_()
    (expected,) = torch.autograd.grad(merit(leaf).log().sum() / 2, leaf)
    point = setup.at(with_attention(setup.tokens(at, places)))
    cost = point.cost + setup.level_error(at, places).square()
    matrices, gradients = setup.normal(point, at, places)
    apart.adapt(matrices, gradients, cost, at, rows)
    torch.testing.assert_close(gradients / cost[:, None], expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_directions_beside_a_known_patch_lead_to_what_resembles_it(repeated: Case) -> None:
    alike = (kinds(len(repeated.truth.masked)) == 0).nonzero().flatten()
    some = without(repeated.truth, int(alike[1]))
    apart = SeparationMerit.of(repeated.setup, some, attended(repeated.setup, repeated.truth))
    promise, directions = directions_from(repeated.setup, apart, some.masked[:1])
    way = repeated.truth.masked[alike[1]] - some.masked[0]
    others = (repeated.truth.masked[alike[2:]] - some.masked[0]).mT  # moving along these adds nothing
    assert promise[0, 0] < 0.1
    assert unreached(way, torch.cat([others, directions[0, :, :1]], dim=1)) < 0.4 * unreached(way, others)
    complete = SeparationMerit.of(repeated.setup, repeated.truth, attended(repeated.setup, repeated.truth))
    nothing, _ = directions_from(repeated.setup, complete, some.masked[:1])
    assert nothing[0, 0] > 0.9, "where nothing is missing, no direction leads anywhere"


def unreached(way: Tensor, columns: Tensor) -> float:
    basis, _ = torch.linalg.qr(columns)
    return float((way - basis @ (basis.mT @ way)).norm())


def test_from_beside_a_known_patch_the_missing_one_is_met(repeated: Case) -> None:
    some, missing = without(repeated.truth, 0), repeated.truth.masked[0]
    with_attention = attended(repeated.setup, repeated.truth)
    apart = SeparationMerit.of(repeated.setup, some, with_attention)
    anchor = some.masked[int((kinds(len(some.masked) + 1)[1:] == 0).nonzero()[0])]
    begun = (anchor + 0.3 * (missing - anchor))[None]
    ended = minimise(repeated.setup, begun, repeated.setup.hole[:1], with_attention, Steps(25), apart)
    assert (ended.coefficients[0] - missing).norm() < 0.05 * (missing - anchor).norm()


def test_visible_patches_tell_how_often_a_masked_one_occurs(repeated: Case) -> None:
    which = kinds(len(repeated.truth.masked))
    one_each = PatchSet(repeated.truth.places, repeated.truth.visible, repeated.truth.masked[:3])
    full = with_copies(repeated.setup, one_each)
    assert len(full.masked) == repeated.setup.unknowns
    nearest = torch.cdist(full.masked, one_each.masked).argmin(dim=1)
    assert (nearest.bincount() - which.bincount()).abs().max() <= 1, "those that one stands for differ a little"


def test_all_are_told_apart_from_some_and_a_mixture(repeated: Case, generator: torch.Generator) -> None:
    setup, truth = repeated.setup, repeated.truth
    some = without(truth, *range(6, len(truth.masked), 2)).masked.clone()
    some[0] = (some[0] + some[3]) / 2
    visible = VisiblePatches(
        truth.visible, torch.zeros_like(truth.visible[:, 0]), torch.ones(len(truth.visible), dtype=torch.bool)
    )
    naturalness = Naturalness.of(repeated.affine, repeated.model)
    masked = separate(setup, naturalness, visible, some, truth.visible, generator).masked
    assert len(masked) > 0.8 * setup.unknowns
    pixels = truth.masked.shape[1] ** 0.5 / float(repeated.model.std.mean())
    rows, columns = linear_sum_assignment(torch.cdist(masked, truth.masked).numpy())
    errors = (masked[rows] - truth.masked[columns]).norm(dim=1) / pixels
    assert errors.median() < 0.1 * ALIKE


def test_without_a_visible_patch_it_ends_with_what_is_finite(repeated: Case, generator: torch.Generator) -> None:
    truth, some = repeated.truth, without(repeated.truth, 0, 7).masked
    nothing = torch.zeros_like(truth.visible[:, 0])
    visible = VisiblePatches(truth.visible, nothing, nothing > 0)
    naturalness = Naturalness.of(repeated.affine, repeated.model)
    tokens = separate(repeated.setup, naturalness, visible, some, truth.visible, generator)
    assert len(tokens.masked)
    whole = tokens.all(repeated.setup).coefficients
    assert len(whole) == len(repeated.setup.mask)
    assert whole.isfinite().all()


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_a_search_returns_no_patch_that_is_driven_away(
    repeated: Case, generator: torch.Generator, level: float
) -> None:
    """As where the level is blurred away, without which masked patches have no size."""
    setup = replace(repeated.setup, level=level * repeated.setup.level, until=time.thread_time() + 20)
    naturalness = Naturalness.of(repeated.affine, repeated.model)
    hidden = 1 + setup.hole[3:6]
    stated = [row for row in range(1 + len(setup.mask)) if row not in hidden.tolist()]
    search = SpanSearch(setup, naturalness, repeated.truth.visible, true_tokens(repeated)[stated], generator)
    solution, found = search.go()
    assert found
    assert solution.coefficients.isfinite().all()
    assert (search.apart is not None) == bool(level)
    assert not level or naturalness.excess(solution.masked, setup.hole).max() < IMPOSSIBLE


def test_what_no_picture_has_is_not_kept(repeated: Case, generator: torch.Generator) -> None:
    truth = repeated.truth
    some = torch.cat([1e3 * truth.masked[:2], truth.masked[2:6]])
    setup = replace(repeated.setup, until=0.0)  # time for one round of polishing, and none of starts
    nothing = torch.zeros_like(truth.visible[:, 0])
    visible = VisiblePatches(truth.visible, nothing, nothing == 0)
    masked = separate(
        setup, Naturalness.of(repeated.affine, repeated.model), visible, some, truth.visible, generator
    ).masked
    torch.testing.assert_close(masked, truth.masked[2:6])
