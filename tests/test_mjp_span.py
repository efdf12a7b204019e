"""mjp_span: the true patches are zeros of its equations, and its certificate tells when it has them."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.attacks.mjp.closing import close
from fedmjp.attacks.mjp.facts import linear_facts
from fedmjp.attacks.mjp.span.attack import MjpSpan, solve
from fedmjp.attacks.mjp.span.certificate import SpanCertificate, certify
from fedmjp.attacks.mjp.span.equations import PatchEquations, PatchSet, attended, equations
from fedmjp.attacks.mjp.span.joint import solve_jointly
from fedmjp.attacks.mjp.span.minimise import Steps, minimise
from fedmjp.attacks.mjp.span.naturalness import Naturalness
from fedmjp.attacks.mjp.span.search import SpanSearch
from fedmjp.attacks.mjp.span.tokens import settle, stated_tokens, suffice
from fedmjp.attacks.testing import CHECKS, AttackTrial
from fedmjp.config import ModelConfig
from fedmjp.data.selection import Selection
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction, Upload
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from tests.conftest import batch_of, small_model, upload_of

PIXEL = 0.23


@dataclass(frozen=True)
class Case:
    """An upload, what follows from it, and the truth."""

    model: VitClassifier
    batch: PrivateBatch
    upload: Upload
    affine: AffinePatches
    setup: PatchEquations
    patches: Tensor
    truth: PatchSet


def case(pictures: Selection, *, wide: bool = False) -> Case:
    """Wide: computed and uploaded in float64."""
    model, batch = small_model(defence="mjp"), batch_of(pictures, Picture.CLEAN)
    upload = upload_of(model, batch)
    if wide:
        model = model.double()
        loss = torch.nn.functional.cross_entropy(model(batch.clean.double(), batch.mask), batch.labels)
        named = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss, list(named.values()))
        upload = replace(upload, tensors=dict(zip(named, gradients, strict=True)))
    return case_of(model, batch, upload)


def case_of(model: VitClassifier, batch: PrivateBatch, upload: Upload) -> Case:
    facts = linear_facts(upload, model)
    setup = equations(upload, facts, model)
    patches = to_patches((batch.clean.double() - model.mean) / model.std, model.patch_size)[0]
    coefficients = patches @ facts.basis.T
    truth = PatchSet(setup.visible, coefficients[setup.visible], coefficients[setup.hole])
    return Case(model, batch, upload, AffinePatches(facts.outside, facts.basis), setup, patches, truth)


@pytest.fixture(scope="module")
def exact(pictures: Selection) -> Case:
    return case(pictures, wide=True)


@pytest.fixture(scope="module")
def usual(pictures: Selection) -> Case:
    return case(pictures)


def residuals(setup: PatchEquations, known: PatchSet) -> Tensor:
    places = torch.cat([known.places, setup.hole])
    tokens = setup.tokens(torch.cat([known.visible, known.masked]), places)
    return setup.at(attended(setup, known)(tokens)).cost.sqrt()


def test_rounding_explains_the_residual_at_the_truth(usual: Case) -> None:
    certificate = certify(usual.setup, usual.truth, usual.setup.unknowns, PIXEL)
    assert 0.8 < certificate.median < 1.3
    assert certificate.largest < 2


def test_the_block_written_out_is_timms(exact: Case) -> None:
    tokens = exact.setup.tokens(
        torch.cat([exact.truth.visible, exact.truth.masked]), torch.cat([exact.setup.visible, exact.setup.hole])
    )
    everything = torch.cat([exact.setup.class_token, tokens])
    after = attended(exact.setup, exact.truth)(everything)
    block = exact.model.backbone.blocks[0]
    expected = everything + block.attn(block.norm1(everything[None]))[0]
    torch.testing.assert_close(after, expected.detach(), rtol=1e-9, atol=1e-9)


def test_the_residual_vanishes_at_the_truth_and_nowhere_near(exact: Case, generator: torch.Generator) -> None:
    assert residuals(exact.setup, exact.truth).max() < 1e-6
    noise = 0.01 * torch.randn(exact.truth.masked.shape, generator=generator, dtype=torch.float64)
    elsewhere = replace(exact.truth, masked=exact.truth.masked + noise)
    assert residuals(exact.setup, elsewhere).median() > 1e-4


def test_mixtures_of_masked_patches_that_the_facts_allow_are_no_zeros(exact: Case) -> None:
    masked = exact.truth.masked
    mixed = replace(exact.truth, masked=(masked + masked.roll(1, dims=0)) / 2)  # satisfies the level's equation
    assert exact.setup.level_error(mixed.masked, exact.setup.hole).abs().max() < 1e-6
    assert residuals(exact.setup, mixed).max() > 1e-2


def test_the_gradient_is_that_of_autograd(exact: Case) -> None:
    setup = exact.setup
    places = setup.visible[:4]
    start = (exact.truth.visible[:4] + 0.1).requires_grad_()
    shift = torch.linspace(-0.1, 0.1, setup.start.shape[1], dtype=torch.float64)
    point = setup.at(setup.tokens(start, places) + shift)
    (expected,) = torch.autograd.grad(point.cost.sum() / 2, start)
    here = setup.at((setup.tokens(start, places) + shift).detach())
    torch.testing.assert_close(setup.normal(here, start.detach(), places)[1], expected)


def test_minimising_from_nearby_leads_to_the_truth(exact: Case, generator: torch.Generator) -> None:
    noise = 0.05 * torch.randn(exact.truth.masked.shape, generator=generator, dtype=torch.float64)
    ended = minimise(
        exact.setup, exact.truth.masked + noise, exact.setup.hole, attended(exact.setup, exact.truth), Steps(20)
    )
    assert (ended.coefficients - exact.truth.masked).abs().max() < 1e-4


def test_the_joint_iteration_leads_to_the_truth(exact: Case, generator: torch.Generator) -> None:
    def moved(values: Tensor) -> Tensor:
        return values + 0.02 * torch.randn(values.shape, generator=generator, dtype=torch.float64)

    start = replace(exact.truth, visible=moved(exact.truth.visible), masked=moved(exact.truth.masked))
    solved, residual = solve_jointly(exact.setup, start, steps=12)
    assert residual.max() < 1e-4
    assert (solved.masked - exact.truth.masked).abs().max() < 1e-3


def test_a_wrong_patch_is_not_certified(usual: Case) -> None:
    assert certify(usual.setup, usual.truth, usual.setup.unknowns, PIXEL).holds
    masked = usual.truth.masked.clone()
    masked[0] = masked[1]
    twice = certify(usual.setup, replace(usual.truth, masked=masked), usual.setup.unknowns, PIXEL)
    assert not twice.holds
    assert twice.found == usual.setup.unknowns - 1, "even if its residuals were small"
    assert not certify(usual.setup, usual.truth, usual.setup.unknowns - 1, PIXEL).holds


@pytest.mark.parametrize(
    ("found", "median", "likely"), [(30, 5.0, True), (6, 5.0, False), (30, 40.0, False), (6, 1.1, True)]
)
def test_a_solution_is_likely_if_residuals_are_small_or_most_is_found(found: int, median: float, likely: bool) -> None:
    certificate = SpanCertificate(found=found, masked=52, median=median, largest=60.0, expected=0.01)
    assert certificate.likely == likely
    assert not certificate.holds


def test_a_certificate_says_nothing_of_the_order(usual: Case) -> None:
    turned = replace(usual.truth, masked=usual.truth.masked.roll(1, dims=0))
    certificate = certify(usual.setup, turned, usual.setup.unknowns, PIXEL)
    assert certificate.holds
    assert "content_certified" in certificate.diagnostics()
    assert "certified" not in certificate.diagnostics()


def test_where_nothing_is_masked_there_is_no_certificate(pictures: Selection, threat: ThreatModel) -> None:
    model, batch = small_model(defence="mjp"), batch_of(pictures, Picture.CLEAN)
    batch = replace(batch, mask=torch.zeros_like(batch.mask))
    made = MjpSpan().run([upload_of(model, batch)], model, threat, generator=torch.Generator())[0]
    assert made.diagnostics.keys() == {"masked_patches", "expected_error", "seconds"}
    assert made.diagnostics["masked_patches"] == 0
    assert (made.images - batch.clean).abs().max() < made.diagnostics["expected_error"] * 10 < 0.1


def solved(of: Case, seconds: float) -> tuple[Tensor, bool]:
    natural = close(of.affine, of.model)
    generator = torch.Generator().manual_seed(0)
    setup = replace(of.setup, until=time.thread_time() + seconds)
    tokens = stated_tokens(of.upload, setup, of.model, setup.until, generator)
    patches, certificate = solve(setup, of.affine, natural, tokens, of.model, generator)
    return patches, certificate.holds


def true_tokens(of: Case) -> Tensor:
    """(1 + patches, dim) whitened tokens behind the first attention, the class token's first, as timm has them."""
    seen = []
    network = copy.deepcopy(of.model).double()
    network.backbone.blocks[0].norm2.register_forward_hook(lambda _module, given, _made: seen.append(given[0][0]))
    network(of.batch.clean.double(), of.batch.mask)
    after = seen[0].detach() - seen[0].detach().mean(dim=1, keepdim=True)
    whitened: Tensor = after / after.square().mean(dim=1, keepdim=True).sqrt()
    return whitened


def test_most_tokens_are_stated_and_nothing_else(usual: Case, generator: torch.Generator) -> None:
    met = stated_tokens(usual.upload, usual.setup, usual.model, math.inf, generator)
    distances = torch.cdist(met, true_tokens(usual)) / met.shape[1] ** 0.5
    assert len(met) > 0.9 * (1 + len(usual.setup.mask))
    assert distances.min(dim=1).values.max() < 0.01
    assert len(distances.argmin(dim=1).unique()) == len(met), "none is met twice"


def test_tokens_find_their_places_in_any_order_and_scale(usual: Case, generator: torch.Generator) -> None:
    tokens = true_tokens(usual)
    order = torch.randperm(len(tokens), generator=generator)
    settled = settle(usual.setup, 3 * tokens[order] + 1)
    assert sorted(settled.rows.tolist()) == list(range(len(usual.setup.visible)))
    assert (settled.known.visible - usual.truth.visible[settled.rows]).abs().max() < 0.01
    rows, columns = linear_sum_assignment(torch.cdist(settled.known.masked, usual.truth.masked).numpy())
    assert len(rows) == usual.setup.unknowns
    assert (settled.known.masked[rows] - usual.truth.masked[columns]).abs().max() < 0.01


def test_a_search_without_tokens_begins_at_a_natural_picture(usual: Case, generator: torch.Generator) -> None:
    natural = close(usual.affine, usual.model)
    setup = replace(usual.setup, until=time.thread_time() + 60)
    none = stated_tokens(usual.upload, setup, usual.model, 0.0, generator)
    assert not suffice(setup, none)
    patches, certificate = solve(setup, usual.affine, natural, none, usual.model, generator)
    assert certificate.holds
    assert (patches[setup.visible] - usual.patches[setup.visible]).abs().max() < 0.02


def test_a_search_goes_on_where_no_visible_patch_is_solved(usual: Case, generator: torch.Generator) -> None:
    """As where all are masked but a few that rounding drowns."""
    naturalness = Naturalness.of(usual.affine, usual.model)
    setup = replace(usual.setup, until=time.thread_time() + 60)
    start = usual.truth.visible
    of_all = true_tokens(usual)[: len(usual.setup.mask)]
    search = SpanSearch(setup, naturalness, start, of_all, generator)
    search.visible = replace(search.visible, good=torch.zeros_like(search.visible.good))
    search.masked, search.proofs = (zeros[torch.arange(2)] for zeros in (search.masked, search.proofs))
    solution, found = search.go()
    assert 2 <= found <= setup.unknowns
    assert solution.coefficients.isfinite().all()


def test_nine_of_ten_patches_masked_in_one_upload_hide_nothing_but_their_order(
    pictures: Selection, threat: ThreatModel
) -> None:
    model, batch = small_model(defence="mjp"), batch_of(pictures, Picture.CLEAN, mask_ratio=0.9)
    upload = upload_of(model, batch)
    made = MjpSpan().run([upload], model, threat, generator=torch.Generator().manual_seed(0))[0]
    assert isinstance(made, Reconstruction)
    assert made.diagnostics["content_certified"] == 1
    recovered, true = (to_patches(images.double(), model.patch_size)[0] for images in (made.images, batch.clean))
    distances = torch.cdist(recovered, true)
    rows, columns = linear_sum_assignment(distances.numpy())
    assert distances[rows, columns].max() < 0.02


def test_a_picture_is_solved_exactly_and_certified(usual: Case) -> None:
    patches, certified = solved(usual, 60)
    assert certified
    visible, hole = usual.setup.visible, usual.setup.hole
    assert (patches[visible] - usual.patches[visible]).abs().max() < 0.02
    distances = torch.cdist(patches[hole], usual.patches[hole])
    rows, columns = linear_sum_assignment(distances.numpy())
    assert (patches[hole][rows] - usual.patches[hole][columns]).abs().max() < 0.02


def test_double_precision_hides_nothing(exact: Case, usual: Case, threat: ThreatModel) -> None:
    made = MjpSpan({"seconds": 60}).run(
        [exact.upload], usual.model, threat, generator=torch.Generator().manual_seed(0)
    )[0]
    assert made.diagnostics["content_certified"] == 1


def test_without_time_the_answer_is_that_of_mjp_prior(usual: Case, threat: ThreatModel) -> None:
    made = MjpSpan({"seconds": 1e-3}).run(
        [usual.upload], usual.model, threat, generator=torch.Generator().manual_seed(0)
    )[0]
    prior = ATTACKS.get("mjp_prior")().run(
        [usual.upload], usual.model, threat, generator=torch.Generator().manual_seed(0)
    )[0]
    assert made.diagnostics["content_certified"] == 0
    assert made.diagnostics["found_patches"] == 0
    assert made.diagnostics["seconds"] < 15
    assert torch.equal(made.images, prior.images)


@pytest.mark.parametrize("limit", [0.1, 0.4])
def test_a_search_that_is_far_from_its_end_holds_its_limit(
    pictures: Selection, threat: ThreatModel, limit: float
) -> None:
    """Whether it looks for tokens then or for patches; the last step may end late, on a busy processor by a second."""
    model, batch = small_model(defence="mjp"), batch_of(pictures, Picture.CLEAN, mask_ratio=0.9)
    upload, began = upload_of(model, batch), time.thread_time()
    attack = MjpSpan({"seconds": limit})
    made = attack.run([upload], model, threat, generator=torch.Generator().manual_seed(0))[0]
    assert made.diagnostics["seconds"] <= time.thread_time() - began < limit + 1.2


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[AttackTrial], None]) -> None:
    check(AttackTrial(MjpSpan({"seconds": 0.3}), "deit_tiny", gain=20.0))


@pytest.mark.parametrize(
    ("threat", "reason"),
    [
        (ThreatModel(batch_size=2), "single picture"),
        (ThreatModel(update="delta", local_steps=2), "one step"),
        (ThreatModel(defences="secure_sum:clients=2"), "own update"),
    ],
)
def test_what_it_cannot_read_is_refused(threat: ThreatModel, reason: str) -> None:
    with pytest.raises(AttackNotApplicableError, match=reason):
        MjpSpan().run([], small_model(defence="mjp"), threat, generator=torch.Generator())


def test_another_first_block_is_refused(threat: ThreatModel) -> None:
    model = build_vit(ModelConfig.parse({"name": "deit_tiny_april", "image_size": 64, "patch_size": 8}))
    assert "first block" in (MjpSpan().refusal(model, threat) or "")
