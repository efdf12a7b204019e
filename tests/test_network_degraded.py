"""network_degraded: what it compares, what it makes of few entries, and how it fills in what tokens do not show."""

import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from fedmjp import bundled_pictures
from fedmjp.attacks.entries import Entries
from fedmjp.attacks.first_block.places import TokenEmbedding
from fedmjp.attacks.gauss_newton import picked
from fedmjp.attacks.gauss_newton.body import shown_directions
from fedmjp.attacks.gauss_newton.complete import PatchPosterior, complete
from fedmjp.attacks.gauss_newton.degraded import GAIN, NetworkDegraded, SearchMethod
from fedmjp.attacks.gauss_newton.evidence import DOUBT, Evidence
from fedmjp.attacks.gauss_newton.factors import Factors
from fedmjp.attacks.gauss_newton.levenberg import Minimum, StoppingRule, minimise
from fedmjp.attacks.gauss_newton.ordered import OrderedResult, OrderedTokens, Ordering, SearchResult, StartPoint
from fedmjp.attacks.gauss_newton.picked import (
    KnownEntries,
    PickedResiduals,
    UploadedEntries,
    anywhere,
    largest,
    made_entries,
    some,
)
from fedmjp.attacks.gauss_newton.placing import FAR, PlacementCost, Swaps
from fedmjp.attacks.gauss_newton.sides import SignConstraints, believed, search
from fedmjp.attacks.gauss_newton.space import OpenSpace, Prior
from fedmjp.attacks.gauss_newton.whole import AT_A_TIME, LOOKS, FullSearch
from fedmjp.attacks.patch_embedding_degraded import PatchEmbeddingDegraded, different
from fedmjp.data.selection import select_for
from fedmjp.errors import AttackNotApplicableError
from fedmjp.exchange import Exchange
from fedmjp.metrics import metric
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.randomness import SeededRandomness
from fedmjp.records import Upload
from fedmjp.scenario import Scenario

TOLD = 9 * torch.eye(2).double()  # how a cost curves of which entries tell nearly all
MICRO = {"name": "deit_micro", "image_size": 32, "patch_size": 16}  # 4 patches, of which 63 directions are shown


@pytest.fixture(scope="module")
def model() -> VitClassifier:
    return build_vit(Scenario.parse({"model": MICRO}).network)


def exchanged(defences: str, model: VitClassifier, **changes: object) -> tuple[Scenario, Exchange]:
    scenario = Scenario.parse({"model": MICRO, "defences": defences.split("+"), **changes})
    pictures = select_for(scenario)
    return scenario, scenario.exchange([pictures.load(pictures.entries[0])], model=model)


def patches_of(image: Tensor, model: VitClassifier) -> Tensor:
    """(patches, values) in the network's input space."""
    return to_patches(((image - model.mean) / model.std).double(), model.patch_size)[0]


def sent_of(upload: Upload, scenario: Scenario, model: VitClassifier) -> UploadedEntries:
    return UploadedEntries.of([upload], NetworkDegraded().tensors(model), scenario.threat, model)


@pytest.mark.parametrize(
    "defences",
    ["prune:kept=0.01", "gaussian:noise=0.001", "quantise:bits=8", "round:precision=bfloat16", "clip+quantise:bits=8"],
)
@pytest.mark.parametrize(("update", "smoothing"), [("gradient", 0.1), ("delta", 0.0)])
def test_at_the_picture_what_is_left_is_as_large_as_noise(
    defences: str, update: str, smoothing: float, model: VitClassifier
) -> None:
    scenario, exchange = exchanged(defences, model, update=update, label_smoothing=smoothing)
    known = sent_of(exchange.upload, scenario, model).known()
    residuals = PickedResiduals(model, exchange.private.labels, known, scenario.threat)
    patches = patches_of(exchange.private.clean, model)
    left = residuals(patches)
    least = 0.02 if defences.startswith("prune") else 0.7  # arithmetic leaves less than is allowed for
    assert least < float(left.square().mean().sqrt()) < 1.3
    clipped = defences.startswith("clip") and update == "gradient"  # weight deltas are shorter than the norm allows
    assert (residuals.scale(patches) < 0.9) == clipped


def test_entries_at_all_depths_give_more_than_those_of_the_embeddings(model: VitClassifier) -> None:
    scenario, exchange = exchanged("gaussian:noise=0.01", model)
    Prior.of(model)  # takes seconds, which are not the search's
    found = []
    for attack in (PatchEmbeddingDegraded(), NetworkDegraded({"seconds": 12})):
        generator = torch.Generator().manual_seed(0)
        (made,) = attack.run([exchange.upload], model, scenario.threat, generator=generator)
        found.append(float(metric("psnr").function(made.images, exchange.private.clean)))
    assert found[1] > found[0] + 1
    assert made.diagnostics["residual"] < 1.5


@pytest.mark.parametrize("defences", ["gaussian:noise=0.01", "quantise:bits=4", "clip+quantise:bits=8"])
def test_the_mean_of_several_uploads_has_the_less_noise_that_is_told_of_it(defences: str, model: VitClassifier) -> None:
    scenario, exchange = exchanged(defences, model, uploads_per_picture=8)
    tensors = NetworkDegraded().tensors(model)
    patches = patches_of(exchange.private.clean, model)
    off, told = [], []
    for uploads in ([exchange.upload], [exchange.upload, *exchange.upload.others]):
        known = UploadedEntries.of(uploads, tensors, scenario.threat, model).known()
        residuals = PickedResiduals(model, exchange.private.labels, known, scenario.threat)
        off.append(float(residuals(patches).square().mean().sqrt()))
        told.append(torch.cat([entries.precision for entries in known.values()]).median())
    assert 0.7 < min(off) <= max(off) < 1.1
    assert abs(off[0] - off[1]) < 0.05
    assert 7.5 < float(told[1] / told[0]) < 8.1


def test_of_pruned_entries_no_mean_is_taken_and_equal_uploads_are_one(model: VitClassifier) -> None:
    scenario, exchange = exchanged("gaussian:noise=0.01+prune:kept=0.1", model, uploads_per_picture=3)
    uploads = [exchange.upload, *exchange.upload.others]
    sent = UploadedEntries.of(uploads, NetworkDegraded().tensors(model), scenario.threat, model)
    assert sent.uploads == 1
    assert all(torch.equal(sent.tensors[name], uploads[0].tensors[name].squeeze(0)) for name in sent.tensors)
    assert different([*uploads, *uploads]) == uploads


def test_several_uploads_of_a_picture_are_averaged_and_those_of_another_are_left_out(
    model: VitClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, exchange = exchanged("gaussian:noise=0.03", model, uploads_per_picture=4)
    stranger = scenario.exchange([bundled_pictures(2, size=32)[1]], model=model, number=1).upload
    elsewhere = replace(exchange.upload.others[0], weights="others")
    mixed = replace(exchange.upload, others=(*exchange.upload.others, replace(stranger, others=()), elsewhere))
    compared: list[float] = []

    def nearest(
        self: NetworkDegraded, chains: object, ordering: Ordering, start: Tensor, until: float
    ) -> OrderedResult:
        compared.append(float(ordering.known_entries[names.PATCH_WEIGHT].precision.mean()))
        minimum = Minimum(start, math.inf, torch.eye(len(start)).double(), 1)
        return OrderedResult(SearchResult(minimum, ordering.space, None, 1, math.inf))  # type: ignore[arg-type]

    monkeypatch.setattr(NetworkDegraded, "_nearest", nearest)
    averaged = []
    for upload in (replace(mixed, others=()), mixed):
        generator = torch.Generator().manual_seed(0)
        (made,) = NetworkDegraded().run([upload], model, scenario.threat, generator=generator)
        averaged.append(made.diagnostics["uploads_averaged"])
    assert averaged == [1, 4]
    assert compared[1] / compared[0] == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("uploads", [1, 4])
def test_random_rounding_leaves_the_noise_that_is_told_of_a_place_between_two_levels(
    uploads: int, model: VitClassifier
) -> None:
    scenario, _ = exchanged("quantise:bits=4", model)
    (quantise,) = scenario.pipeline.defences
    true = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    drawn = torch.stack(
        [
            torch.stack(
                [quantise.change("x", true, SeededRandomness(100 * draw + upload)) for upload in range(uploads)]  # type: ignore[attr-defined]
            ).mean(dim=0)
            for draw in range(200)
        ]
    )
    known = KnownEntries.read(drawn[0], scenario.threat, uploads)
    told = 1 / known.near(true.flatten(), 0.01).precision
    seen = (drawn - true).double().square().mean(dim=0).flatten()
    within = (true.flatten().abs() / known.step) % 1
    for low in (0.1, 0.3, 0.5, 0.7):  # where the least that is allowed for is less
        there = (within >= low) & (within < low + 0.2)
        assert float(seen[there].mean() / told[there].mean()) == pytest.approx(1, abs=0.05)
    near = (within < 0.005) | (within > 0.995)
    assert float(told[near].mean()) == pytest.approx(0.01 * known.step**2 / uploads, rel=1e-3)


def test_where_rounding_leaves_little_noise_entries_say_more(model: VitClassifier) -> None:
    scenario, exchange = exchanged("quantise:bits=5", model)
    space = OpenSpace.of_shown(shown_directions(TokenEmbedding.of(model)), Prior.of(model))
    true = space.unknowns(patches_of(exchange.private.clean, model)[None])
    known, generator = sent_of(exchange.upload, scenario, model).known(), torch.Generator().manual_seed(0)
    entries = partial(PickedResiduals, model, exchange.private.labels, threat=scenario.threat)
    whole = FullSearch(entries(known), entries(some(known, len(true), generator)))
    ordering, attack = Ordering(space, TokenEmbedding.of(model), known, model, generator), NetworkDegraded()
    before = OrderedResult(attack._by_all(whole, math.inf, space, StartPoint(true)))
    after = attack._by_steps(whole, ordering, before, math.inf)
    off = [float((each.result.minimum.point - true).norm()) for each in (before, after)]
    assert off[1] < 0.93 * off[0]
    assert attack._by_steps(whole, ordering, before, 0.0) is before, "there is no time left"


@pytest.mark.parametrize(
    ("defences", "smoothing"), [("gaussian", 0.1), ("prune:kept=0.1", 0.0), ("clip+quantise", 0.1)]
)
def test_slopes_that_are_written_out_are_those_that_torch_finds(
    defences: str, smoothing: float, model: VitClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, exchange = exchanged(defences, model, label_smoothing=smoothing)
    space = OpenSpace.of_shown(shown_directions(TokenEmbedding.of(model)), Prior.of(model))
    few = some(sent_of(exchange.upload, scenario, model).known(), 50, torch.Generator().manual_seed(0))
    point = space.unknowns(patches_of(exchange.private.clean, model)[None])
    point = point + 0.1 * torch.randn(len(point), generator=torch.Generator().manual_seed(1)).double()
    made, downhill = [], []
    for plain in (True, False):
        if not plain:
            monkeypatch.setattr(picked, "is_plain", lambda backbone: False)
        residuals = PickedResiduals(model, exchange.private.labels, few, scenario.threat)
        made.append(residuals.slopes(residuals.compared, space, point))
        begin = point.clone().requires_grad_()
        downhill.append(torch.autograd.grad(residuals(space.patches(begin)[0]).square().sum(), begin)[0])
    assert made[0].shape == (len(point), residuals.count)
    torch.testing.assert_close(*downhill, rtol=1e-9, atol=1e-9 * float(downhill[1].norm()))
    long = made[1].norm(dim=0)
    long = long + 1e-3 * long.median()  # those of keys' biases are 0
    assert float(((made[0] - made[1]).norm(dim=0) / long).max()) < 1e-4


def test_near_a_picture_the_largest_entries_lead_to_all_of_its_tokens(model: VitClassifier) -> None:
    scenario, exchange = exchanged("prune:kept=0.1", model)
    entrance, true = TokenEmbedding.of(model), patches_of(exchange.private.clean, model)
    space = OpenSpace.of_shown(shown_directions(entrance), Prior.of(model))
    start = space.unknowns(true[None])
    known = largest(sent_of(exchange.upload, scenario, model).known(), len(start))
    residuals = PickedResiduals(model, exchange.private.labels, known, scenario.threat)
    assert residuals.count == pytest.approx(2 * len(start), rel=0.15)
    start = start + 0.1 * torch.randn(len(start), generator=torch.Generator().manual_seed(1)).double()
    attack, told = NetworkDegraded({"steps": 40}), []
    attack.on_progress = lambda done, total, loss: told.append((done, total))
    ends = StoppingRule(enough=float(len(start)), fine=0.05)
    minimum = attack._minimum(residuals, space, start, ends)
    assert told == [(done, 40) for done in range(1, len(told) + 1)]
    attack._minimum(residuals, space, start, replace(ends, until=time.thread_time()))
    assert told[-1] == (1, 1), "there is no time for a second step"
    ended, tokens = (entrance.tokens(space.patches(point)[0]) for point in (minimum.point, start))
    error, before = ((made - entrance.tokens(true)).norm() for made in (ended, tokens))
    assert error < before / 100


def test_all_entries_are_compared_where_some_say_how_the_cost_curves(
    model: VitClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, exchange = exchanged("gaussian:noise=0.01", model)
    true = patches_of(exchange.private.clean, model)
    space = OpenSpace.of_shown(shown_directions(TokenEmbedding.of(model)), Prior.of(model))
    known = sent_of(exchange.upload, scenario, model).known()
    drawn = some(known, 1000, torch.Generator().manual_seed(0))
    every, few = (PickedResiduals(model, exchange.private.labels, each, scenario.threat) for each in (known, drawn))
    assert few.count < every.count / 5
    start = space.unknowns(true[None])
    start = start + 0.005 * torch.randn(len(start), generator=torch.Generator().manual_seed(1)).double()
    told: list[int] = []
    whole = FullSearch(every, few)
    gram = whole.gram(space, start)
    found = whole.search(space, start, gram, math.inf, lambda done, *_: told.append(done))
    assert told[-1] == found.steps

    def cost(unknowns: Tensor) -> Tensor:
        left = every(space.patches(unknowns)[0])
        return left @ left + unknowns @ unknowns

    assert found.cost == pytest.approx(float(cost(found.point)))
    ended = found.point.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cost(ended), ended)
    gained = float(slope @ torch.linalg.solve(found.gram, slope)) / 4  # by a further step of Newton's
    assert gained < 1e-4 * found.cost
    assert found.cost < float(cost(space.unknowns(true[None]))), "noise is explained as well"
    monkeypatch.setattr("fedmjp.attacks.gauss_newton.whole.STEPS", AT_A_TIME)
    briefly = whole.search(space, start, gram, math.inf, lambda *_: None)
    assert AT_A_TIME < briefly.steps <= LOOKS * AT_A_TIME, "it looks again at how the cost curves"
    assert briefly.cost < float(cost(start))
    hurried = whole.search(space, start, gram, time.thread_time(), lambda *_: None)
    assert hurried.steps < found.steps
    useless = whole.search(space, start, gram, math.inf, lambda *_: None, below=briefly.cost / 2)
    assert useless.gram is gram
    assert useless.steps == AT_A_TIME, "nothing is asked of a minimum that costs too much"


def test_of_tokens_that_were_found_it_is_known_how_the_cost_curves() -> None:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    gram = half @ half.mT + torch.eye(6)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64).triu() + 3 * torch.eye(6)
    space = OpenSpace(torch.zeros(3, 5).double(), torch.eye(5).double()[:2], root)
    found = SearchResult(Minimum(torch.zeros(6).double(), 0.0, gram, 1), space, None, 1, 1.0)
    stated = PatchPosterior.of(space, found.minimum.point, found.spectrum, torch.zeros(3, 2))
    torch.testing.assert_close(stated.gram(space), gram)
    assert found.learned == pytest.approx(float((1 - 1 / torch.linalg.eigvalsh(gram)).mean()))


def test_a_search_that_leads_nowhere_ends_where_it_began() -> None:
    class Broken:
        """Whose residuals are numbers at one point alone."""

        count = 4

        def __call__(self, patches: Tensor) -> Tensor:
            values = patches.flatten()
            return values + torch.where(values.detach() == 3.0, 0.0, math.nan)

        def compared(self, factors: Factors) -> Tensor:
            raise AssertionError(factors)

        def slopes(self, of: object, space: OpenSpace, unknowns: Tensor) -> Tensor:
            del of, space
            return torch.eye(len(unknowns))

    space = OpenSpace(torch.zeros(1, 4).double(), torch.eye(4).double(), torch.eye(4).double())
    start, broken = torch.full((4,), 3.0).double(), Broken()
    whole = FullSearch(broken, broken)
    found = whole.search(space, start, 2 * torch.eye(4).double(), math.inf, lambda *_: None)
    assert torch.equal(found.point, start)
    assert found.cost == pytest.approx(72)


def test_entries_are_drawn_or_the_largest_and_stay_in_their_order(model: VitClassifier) -> None:
    scenario, exchange = exchanged("quantise:bits=8", model)
    known = sent_of(exchange.upload, scenario, model).known()
    drawn, large = some(known, 1000, torch.Generator().manual_seed(0)), largest(known, 100)
    assert set(known) - set(anywhere(known)) == {names.POSITION_EMBEDDING}
    for name, entries in known.items():
        assert len(drawn[name].rows) == min(400, len(entries.rows))
        left = sorted(entries.values.abs().tolist(), reverse=True)[: len(large[name].rows)]
        assert sorted(large[name].values.abs().tolist(), reverse=True) == left
        for chosen in (drawn[name], large[name]):
            flat = (chosen.rows * (int(entries.columns.max()) + 1) + chosen.columns).tolist()
            assert flat == sorted(set(flat))


@pytest.mark.parametrize(("shape", "count"), [((30, 50), 100), ((4, 50), 100), ((50, 4), 100), ((6, 7), 42)], ids=str)
def test_entries_of_rows_in_columns_are_made_at_once(shape: tuple[int, int], count: int, model: VitClassifier) -> None:
    generator = torch.Generator().manual_seed(0)
    scenario = Scenario.parse({"model": MICRO, "defences": ["gaussian:noise=0.01"]})
    matrix = torch.randn(shape, generator=generator)
    known = KnownEntries.read(matrix, scenario.threat)
    drawn = known.crossed(100, generator)
    assert len(drawn.rows) == count
    torch.testing.assert_close(drawn.values, matrix.double()[drawn.rows, drawn.columns])
    outputs, inputs = torch.randn(5, shape[0], generator=generator), torch.randn(5, shape[1], generator=generator)
    factors = Factors({"layer": inputs}, {"layer": outputs}, torch.zeros(0))
    made = made_entries("layer.weight", replace(drawn, of=10 * drawn.of), factors)
    torch.testing.assert_close(made, (outputs.mT @ inputs)[drawn.rows, drawn.columns])
    few = known.some(40, generator)
    assert few.crossed(20, generator).crossing is None, "not all are known"


def sides_of(exchange: Exchange, scenario: Scenario, model: VitClassifier) -> SignConstraints:
    residuals = PickedResiduals(model, exchange.private.labels, {}, scenario.threat)
    return SignConstraints.of(sent_of(exchange.upload, scenario, model).gradients(), residuals)


@pytest.mark.parametrize("update", ["gradient", "delta"])
def test_a_picture_is_on_the_sides_of_zero_that_its_upload_has(update: str, model: VitClassifier) -> None:
    scenario, exchange = exchanged("sign", model, update=update)
    sides, true = sides_of(exchange, scenario, model), patches_of(exchange.private.clean, model)
    margins = torch.cat([each.flatten() for each in sides.margins(true).values()])
    assert sides.wrong(true) == int((margins < 0).sum()) < 1e-3 * sides.count
    assert margins.mean() == pytest.approx(1, abs=1e-3)
    losses = [float(sides.loss(true, width)) / sides.count for width in (1.0, 0.1, 0.01)]
    assert losses == sorted(losses, reverse=True)
    other = float(sides.loss(patches_of(exchange.private.clean.flip(-1), model), 0.01)) / sides.count
    assert losses[-1] < 0.1 < 10 < other


def test_no_candidate_is_nearer_to_signs_for_larger_gradients(model: VitClassifier) -> None:
    true = {}
    for defences in ("sign", "clip:norm=0.01+sign"):
        scenario, exchange = exchanged(defences, model)
        true[defences] = sides_of(exchange, scenario, model).margins(patches_of(exchange.private.clean, model))
    for name, margins in true["sign"].items():
        torch.testing.assert_close(margins, true["clip:norm=0.01+sign"][name], msg=name, atol=1e-5, rtol=0)


def test_signs_of_which_a_candidate_is_sure_are_not_looked_at(model: VitClassifier) -> None:
    scenario, exchange = exchanged("sign", model)
    sides, other = sides_of(exchange, scenario, model), patches_of(exchange.private.clean.flip(-1), model)
    near, margins = sides.nearest(other, 1000), sides.margins(other)
    assert sum(len(known.rows) for known in near.values()) == pytest.approx(1000, abs=2)
    chosen = [margins[name].view(len(margins[name]), -1)[known.rows, known.columns] for name, known in near.items()]
    told = torch.cat([each[sides.signs[name] != 0] for name, each in margins.items()])
    torch.testing.assert_close(torch.cat(chosen).sort().values[:1000], told.sort().values[:1000])
    assert not set(sides.anywhere.signs) ^ set(sides.signs) - {names.POSITION_EMBEDDING}


def test_a_search_by_sides_ends_where_most_are_right(model: VitClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmjp.attacks.gauss_newton.sides.STEPS", 2 * AT_A_TIME)
    scenario, exchange = exchanged("sign", model)
    sides, true = sides_of(exchange, scenario, model), patches_of(exchange.private.clean, model)
    space = OpenSpace.of_shown(shown_directions(TokenEmbedding.of(model)), Prior.of(model))
    start = space.unknowns(true[None])
    start = start + 0.1 * torch.randn(len(start), generator=torch.Generator().manual_seed(1)).double()

    def wrong(point: Tensor) -> float:
        return sides.wrong(space.patches(point)[0]) / sides.count

    told: list[tuple[int, int]] = []
    found = search(sides, space, start, (0.03, 0.01), math.inf, lambda done, total, _: told.append((done, total)))
    assert told == [(AT_A_TIME * turn, 4 * AT_A_TIME) for turn in range(1, 5)]
    assert found.steps == 4 * AT_A_TIME
    assert wrong(found.point) < wrong(start) / 4
    assert torch.linalg.eigvalsh(found.gram).min() > 1 - 1e-6, "no entry makes less known"
    hurried = search(sides, space, start, (0.03, 0.01), time.thread_time(), lambda *_: None)
    assert hurried.steps == 2 * AT_A_TIME, "each width has its first steps"
    assert wrong(hurried.point) < wrong(start)


def test_signs_are_read_as_what_normal_entries_are_on_average(model: VitClassifier) -> None:
    scenario, _ = exchanged("sign", model)
    drawn = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known = KnownEntries.read(drawn.sign() * drawn.abs().mean(), scenario.threat)
    assert float(known.values.abs().mean()) == pytest.approx(math.sqrt(2 / math.pi), rel=0.02)
    assert float((drawn - known.values).square().mean() * known.precision.mean()) == pytest.approx(1, rel=0.05)


def test_no_candidate_is_scaled_by_less_than_nothing(model: VitClassifier) -> None:
    scenario, exchange = exchanged("clip+quantise:bits=8", model)
    against = {
        name: entries.scaled(-1.0) for name, entries in sent_of(exchange.upload, scenario, model).known().items()
    }
    residuals = PickedResiduals(model, exchange.private.labels, against, scenario.threat)
    assert 0 < residuals.scale(patches_of(exchange.private.clean, model)) < 1e-6


def test_an_upload_that_nothing_degraded_is_solved_exactly(model: VitClassifier) -> None:
    scenario, exchange = exchanged("none", model)
    exact, made = (
        attack.run([exchange.upload], model, scenario.threat, generator=torch.Generator())[0]
        for attack in (PatchEmbeddingDegraded(), NetworkDegraded())
    )
    torch.testing.assert_close(made.images, exact.images)


def test_a_search_that_does_not_arrive_answers_with_the_picture_that_it_began_with(model: VitClassifier) -> None:
    scenario, exchange = exchanged("prune:kept=0.1", model)
    (began,), (made,) = (
        attack.run([exchange.upload], model, scenario.threat, generator=torch.Generator().manual_seed(0))
        for attack in (PatchEmbeddingDegraded(), NetworkDegraded({"steps": 1}))
    )
    assert made.diagnostics["residual"] > 1.5
    torch.testing.assert_close(made.images, began.images)


@pytest.mark.parametrize(("kept", "given"), [(0.1, 0.07), (0.01, 0.0)], ids=["tenth", "hundredth"])
def test_tokens_in_any_order_are_put_where_they_stand_by_a_few_entries_of_both_embeddings(
    kept: float, given: float
) -> None:
    """Of 16 places hardly any has an entry of its own left: none at a hundredth."""
    config = MICRO | {"patch_size": 8}
    scenario = Scenario.parse({"model": config, "defences": [f"prune:kept={kept}"]})
    model, pictures = build_vit(scenario.network), select_for(scenario)
    exchange = scenario.exchange([pictures.load(pictures.entries[0])], model=model)
    entrance, true = TokenEmbedding.of(model), patches_of(exchange.private.clean, model)
    space = OpenSpace.of_shown(shown_directions(entrance), Prior.of(model))
    known = sent_of(exchange.upload, scenario, model).known()
    rows = known[names.POSITION_EMBEDDING].rows
    assert float((rows > 0).sum()) / 1024 <= given
    slopes = (
        PickedResiduals(model, exchange.private.labels, known, scenario.threat).factors(true).at_tokens[0, 1:].double()
    )
    generator = torch.Generator().manual_seed(0)
    stands = torch.randperm(16, generator=generator)
    found = PatchPosterior(
        (true @ space.basis.mT + entrance.shifts(space.basis))[stands] - entrance.shifts(space.basis),
        torch.zeros(0),
        torch.zeros(0),
        slopes[stands],
    )
    sure = torch.zeros(len(space.basis), len(space.basis), dtype=torch.float64)
    placing = PlacementCost.of(
        found, sure, space, entrance, known[names.PATCH_WEIGHT], known[names.POSITION_EMBEDDING], 1
    )
    places = placing.best([torch.arange(16)], generator, math.inf)[0]
    assert places.tolist() == stands.tolist()
    swapped = stands.clone()
    swapped[[3, 8]] = stands[[8, 3]]
    swaps = Swaps(placing, swapped)
    assert float(swaps.more[3, 8]) == pytest.approx(placing.cost(stands) - placing.cost(swapped))
    swaps.take(5, 12)
    swaps.take(3, 8)
    stood = Swaps(placing, swaps.places)
    torch.testing.assert_close(swaps.more, stood.more)
    assert float(stood.more[5, 12]) == pytest.approx(placing.cost(stands) - placing.cost(swaps.places))
    assert placing.cost(stands) < placing.cost(swapped)
    looked_at, more = placing.swaps(swapped), []
    for first, second in itertools.combinations(range(16), 2):
        other = swapped.clone()
        other[[first, second]] = swapped[[second, first]]
        more.append((placing.cost(other) - placing.cost(swapped), (first, second)))
    assert looked_at == [pair for gained, pair in sorted(more) if gained < FAR]
    assert looked_at[0] == (3, 8)


def test_of_tokens_that_are_found_roughly_the_order_is_seen_by_who_knows_how_roughly() -> None:
    scenario = Scenario.parse({"model": MICRO | {"patch_size": 8}, "defences": ["quantise:bits=4"]})
    model, pictures = build_vit(scenario.network), select_for(scenario)
    exchange = scenario.exchange([pictures.load(pictures.entries[0])], model=model)
    entrance, true = TokenEmbedding.of(model), patches_of(exchange.private.clean, model)
    space = OpenSpace.of_shown(shown_directions(entrance), Prior.of(model))
    known = sent_of(exchange.upload, scenario, model).known()
    residuals = PickedResiduals(model, exchange.private.labels, known, scenario.threat)
    slopes = residuals.factors(true).at_tokens[0, 1:].double()
    generator, error = torch.Generator().manual_seed(0), 0.2
    along = true @ space.basis.mT
    rough = along + error * torch.randn(along.shape, generator=generator, dtype=torch.float64)
    found, stand = PatchPosterior(rough, torch.zeros(0), torch.zeros(0), slopes), torch.arange(16)
    likelier = []
    for told in (0.0, error):
        unsure = told**2 * torch.eye(len(space.basis), dtype=torch.float64)
        placing = PlacementCost.of(
            found, unsure, space, entrance, known[names.PATCH_WEIGHT], known[names.POSITION_EMBEDDING], 1
        )
        others = [placing.settled(torch.randperm(16, generator=generator)) for _ in range(20)]
        likelier.append(sum(placing.cost(other) < placing.cost(stand) - 1 for other in others))
    assert likelier[0] > likelier[1] == 0, "orders that seem likelier than the truth"


def test_orders_are_as_likely_as_a_normal_distribution_of_all_that_is_known_says() -> None:
    """Of three tokens, each known along some directions; and swaps lead to the likeliest order."""
    count, rank, entries, generator = 3, 2, 4, torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = count * rank
    half, root, made = drawn(size, size), drawn(size, size), drawn(size, entries)
    said, natural = half @ half.mT + 0.1 * torch.eye(size), root @ root.mT + 0.1 * torch.eye(size)
    along, shifts, mean, left, alone = (
        drawn(*shape) for shape in ((count, rank), (count, rank), (count, rank), (entries,), (count, count))
    )
    shape = (count, rank, count, rank)
    found = PatchPosterior(along, said.view(shape), torch.zeros(count, rank).double(), torch.zeros(0))
    evidence = Evidence(found, shifts, mean, natural.view(shape), made, left, alone)

    def expected(places: Tensor) -> float:
        """The joint density of what a search found in these places and of the entries."""
        where = torch.eye(count).double()[places].kron(torch.eye(rank).double())  # from places to tokens
        covariance = where @ torch.linalg.inv(natural) @ where.mT
        sees = torch.cat([torch.eye(size).double(), made.mT])
        noise = torch.block_diag(torch.linalg.inv(said), torch.eye(entries).double())
        center = sees @ mean[places].flatten()
        seen = torch.cat([(along + shifts - shifts[places]).flatten(), left])
        normal = torch.distributions.MultivariateNormal(center, sees @ covariance @ sees.mT + noise)
        return float(-2 * normal.log_prob(seen) + alone[range(count), places].sum())

    def cost(places: Tensor) -> float:
        return evidence.weighed(places).cost

    orders = [torch.tensor(order) for order in itertools.permutations(range(count))]
    apart = [cost(order) - expected(order) for order in orders]
    assert apart == pytest.approx([apart[0]] * len(orders))
    worst = max(orders, key=cost)

    def every(_: Tensor) -> Iterable[tuple[int, int]]:
        return itertools.combinations(range(count), 2)

    for order, (first, second) in itertools.product(orders, every(worst)):
        swapped = order.clone()
        swapped[[first, second]] = order[[second, first]]
        assert evidence.weighed(order).swapped((first, second)) == pytest.approx(expected(swapped) + apart[0])
    best, *doubtful = evidence.likeliest([worst], every, math.inf)
    assert all(cost(best) < cost(best[swap]) for swap in ([1, 0, 2], [2, 1, 0], [0, 2, 1]))
    costs = [cost(order) for order in (best, *doubtful)]
    assert costs == sorted(costs)
    assert costs[-1] < costs[0] + DOUBT
    spoilt = replace(evidence, alone=alone - 2 * DOUBT * torch.eye(count).double()[best])
    assert [order.tolist() for order in spoilt.likeliest(orders, every, math.inf)] == [best.tolist()], (
        "there is no doubt"
    )
    for swaps, until in ((every, time.thread_time()), (lambda _: [], math.inf)):
        (untried,) = evidence.likeliest([worst], swaps, until)
        assert torch.equal(untried, worst), "there is no time for a swap, or none is in question"


@pytest.mark.parametrize(
    ("residuals", "chosen"), [([5.0, 4.0, 1.0], 1.0), ([1.0], 1.0), ([9.0, 5.0, 7.0], 5.0)], ids=str
)
def test_searches_start_again_until_one_arrives(
    residuals: list[float], chosen: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, ends = [], iter(residuals)

    def again(
        self: NetworkDegraded, compared: object, ordering: Ordering, start: StartPoint, until: float
    ) -> OrderedResult:
        starts.append(start.unknowns)
        return OrderedResult(
            SearchResult(
                Minimum(start.unknowns, 0.0, start.unknowns[:, None], 1), ordering.space, compared, 1, next(ends)
            )
        )

    monkeypatch.setattr(NetworkDegraded, "_search", again)
    begin, generator = torch.zeros(4, dtype=torch.float64), torch.Generator().manual_seed(0)
    ordering = Ordering(None, None, {}, None, generator)
    settled = NetworkDegraded({"starts": 3})._nearest([], ordering, begin, math.inf)
    assert settled.result.residual == chosen
    assert len(starts) == len(residuals)
    assert torch.equal(starts[0], begin)
    assert all(0.1 < float(start.std()) < 1 for start in starts[1:])


@pytest.mark.parametrize(
    ("costs", "asked", "ended"),
    [
        ([9.0, 5.0, 3.0], [[True, False], [True], [False]], 3.0),
        ([9.0, 5.0, 4.5, 3.0], [[True], [True, False, True], [False, True]], 3.0),
        ([9.0, 5.0, 6.0, 4.5], [[True], [True, False, True]], 5.0),
        ([9.0], [[False]], 9.0),
    ],
    ids=["until-in-order", "from-the-next-in-doubt", "until-nothing-is-gained", "in-order"],
)
def test_a_search_goes_on_from_its_tokens_in_their_order(
    costs: list[float], asked: list[list[bool]], ended: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, orders = iter(costs), iter(asked)
    starts = []

    def search(begun: str, space: OpenSpace, start: StartPoint) -> SearchResult:
        starts.append((begun, float(start.unknowns), start.below))
        return SearchResult(Minimum(start.unknowns, next(found, 2.5), TOLD, 2), space, None, 1, 1.0)

    monkeypatch.setattr(Ordering, "of", lambda *_: [OrderedTokens(None, None, moved) for moved in next(orders)])
    monkeypatch.setattr(Ordering, "as_found", lambda *_: OrderedTokens(None, None, False))
    monkeypatch.setattr(Ordering, "sure", lambda *_: False)
    monkeypatch.setattr(Ordering, "begin", lambda _, ordered, below: StartPoint(torch.tensor(7.0), below=below))
    ordering = Ordering(None, None, {}, None, torch.Generator())
    both = SearchMethod(partial(search, "find"), partial(search, "again"))
    made = NetworkDegraded()._settled(both, ordering, StartPoint(torch.tensor(3.0)), math.inf)
    assert made.result.minimum.cost == ended
    assert not made.ordered.moved, "its tokens stand where they were found"
    assert starts[:1] == [("find", 3.0, math.inf)]
    assert {each[:2] for each in starts[1:]} <= {("again", 7.0)}
    best = costs[0]
    for cost, (_, _, below) in zip([*costs[1:], 2.5], starts[1:], strict=False):
        assert below == best - GAIN
        best = cost if cost < below else best
    assert next(orders, None) is None


def test_nothing_is_searched_further_where_entries_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def settled(
        self: NetworkDegraded, search: float, ordering: Ordering, start: StartPoint, until: float
    ) -> OrderedResult:
        tried.append(search)
        gram = torch.diag(torch.tensor([1.0, 1.0 + search]).double())
        return OrderedResult(SearchResult(Minimum(start.unknowns, 1.0, gram, 1), ordering.space, None, 1, 1.0))

    monkeypatch.setattr(NetworkDegraded, "_settled", settled)
    monkeypatch.setattr(Ordering, "start", lambda _, found, until: StartPoint(found.minimum.point))
    ordering = Ordering(None, None, {}, None, torch.Generator())
    settled = NetworkDegraded()._search([[1.0, 1e-4, 1.0], [1.0]], ordering, StartPoint(torch.zeros(2)), math.inf)
    assert tried == [1.0, 1e-4]
    assert settled.result.minimum.steps == 2


@pytest.mark.parametrize(("gram", "asked"), [(TOLD, 1), (1.01 * torch.eye(2).double(), 0)])
def test_no_order_is_asked_of_tokens_of_which_entries_tell_nothing(
    gram: Tensor, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SearchResult(Minimum(torch.zeros(2), 1.0, gram, 1), OpenSpace(*[torch.eye(2).double()] * 3), None, 1, 1.0)
    orders: list[SearchResult] = []
    monkeypatch.setattr(Ordering, "sure", lambda *_: False)
    monkeypatch.setattr(
        Ordering, "of", lambda _, found, until: orders.append(found) or [OrderedTokens(None, None, False)]
    )
    ordering, search = (
        Ordering(found.space, None, {}, None, torch.Generator()),
        SearchMethod(lambda *_: found, lambda *_: found),
    )
    assert NetworkDegraded()._settled(search, ordering, StartPoint(torch.zeros(2)), math.inf).result is found
    assert len(orders) == asked


@pytest.mark.parametrize(
    ("ends", "chosen", "steps"),
    [
        ([(5.0, True, True)], 5.0, 1),
        ([(5.0, True, False), (3.0, True, False), (4.0, True, False)], 3.0, 2),
        ([(5.0, True, False), (3.0, False, False), (6.0, True, True)], 5.0, 1),
    ],
    ids=["in order", "the best of all", "tokens without places, and a worse one"],
)
def test_another_chain_of_searches_is_tried_while_there_is_doubt_of_the_order(
    ends: list[tuple[float, bool, bool]], chosen: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = OpenSpace(torch.zeros(1, 2).double(), torch.eye(2).double(), torch.eye(2).double())
    waiting = iter(ends)

    def chained(
        self: NetworkDegraded, chain: object, ordering: Ordering, start: StartPoint, until: float
    ) -> OrderedResult:
        cost, placed, sure = next(waiting)
        minimum = Minimum(start.unknowns, cost, 9 * torch.eye(2).double(), 1)
        return OrderedResult(SearchResult(minimum, space if placed else space.alike, None, 1, 1.0), sure=sure)

    monkeypatch.setattr(NetworkDegraded, "_chain", chained)
    ordering = Ordering(space, None, {}, None, torch.Generator())
    settled = NetworkDegraded()._search([[], [], []], ordering, StartPoint(torch.zeros(2)), math.inf)
    assert (settled.result.minimum.cost, settled.result.minimum.steps) == (chosen, steps)
    assert next(waiting, None) is None


@pytest.mark.parametrize(
    ("defences", "sure"), [("gaussian:noise=0.001", True), ("quantise:bits=4", False), ("prune:kept=0.1", False)]
)
def test_entries_of_places_tell_whether_the_order_is_sure(defences: str, sure: bool) -> None:
    scenario = Scenario.parse({"model": MICRO | {"patch_size": 8}, "defences": [defences]})
    model, pictures = build_vit(scenario.network), select_for(scenario)
    exchange = scenario.exchange([pictures.load(pictures.entries[0])], model=model)
    space = OpenSpace.of_shown(shown_directions(TokenEmbedding.of(model)), Prior.of(model))
    known = sent_of(exchange.upload, scenario, model).known()
    residuals = PickedResiduals(model, exchange.private.labels, known, scenario.threat)
    ordering = Ordering(space, TokenEmbedding.of(model), known, model, torch.Generator())
    true = patches_of(exchange.private.clean, model)
    interchanged = true.clone()
    interchanged[[3, 8]] = true[[8, 3]]
    point, wrong = (space.unknowns(patches[None]) for patches in (true, interchanged))
    found = SearchResult(Minimum(point, 0.0, point[:, None], 1), space, residuals, 1, 1.0)
    assert ordering.sure(found) == sure
    assert not ordering.sure(replace(found, minimum=replace(found.minimum, point=wrong)))


def test_without_places_patches_are_alike_and_independent() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(5, 2, generator=generator, dtype=torch.float64))[0].mT
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64).triu() + 3 * torch.eye(6, dtype=torch.float64)
    space = OpenSpace(torch.randn(3, 5, generator=generator, dtype=torch.float64), basis, root)
    drawn = torch.randn(50_000, 6, generator=generator, dtype=torch.float64)
    of_one = ((space.patches(drawn.flatten()) - space.natural) @ basis.mT).flatten(0, 1)
    stated = torch.block_diag(*[of_one.mT @ of_one / len(of_one)] * 3)
    alike = ((space.alike.patches(drawn.flatten()) - space.natural) @ basis.mT).flatten(1)
    torch.testing.assert_close(alike.mT @ alike / len(alike), stated, rtol=0.05, atol=0.5)
    torch.testing.assert_close(space.alike.unknowns(space.alike.patches(drawn[:4].flatten())), drawn[:4].flatten())


def test_along_few_directions_pictures_vary_most_and_are_as_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(5, 2, generator=generator, dtype=torch.float64))[0].mT
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64).triu() + 3 * torch.eye(6, dtype=torch.float64)
    space = OpenSpace(torch.randn(3, 5, generator=generator, dtype=torch.float64), basis, root)
    start, moved = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    coarse, along = space.coarse(start, 4)
    torch.testing.assert_close(coarse.patches(along), space.patches(start))
    away = space.unknowns(coarse.patches(moved[:4]))
    gained = away.square().sum() - start.square().sum()
    torch.testing.assert_close(gained, moved[:4].square().sum() - along.square().sum())
    strengths = torch.linalg.svdvals(root)
    torch.testing.assert_close(torch.linalg.svdvals(coarse.root), strengths[:4])


def test_a_pruned_tensor_states_what_was_kept_and_one_of_zeros_nothing(model: VitClassifier) -> None:
    scenario, exchange = exchanged("prune:kept=0.1", model)
    tensor = exchange.upload.tensors[names.PATCH_WEIGHT].flatten(1)
    known = KnownEntries.read(tensor, scenario.threat)
    assert len(known.rows) == int((tensor != 0).sum())
    torch.testing.assert_close(tensor[known.rows, known.columns].double(), known.values)
    assert not len(KnownEntries.read(torch.zeros(5, 3), scenario.threat).rows)


def test_the_directions_that_are_shown_vary_as_whole_pictures_do(model: VitClassifier) -> None:
    prior, shown = Prior.of(model), shown_directions(TokenEmbedding.of(model))
    space = OpenSpace.of_shown(shown, prior)
    root = torch.linalg.cholesky(torch.linalg.inv(prior.precision))
    drawn = torch.randn(2000, len(root), generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ root.mT
    along = (drawn.view(2000, *prior.mean.shape) @ shown.mT).flatten(1)
    measured, stated = along.mT @ along / len(along), space.root @ space.root.mT
    torch.testing.assert_close(measured.diagonal(), stated.diagonal(), rtol=0.15, atol=0)


def test_a_picture_is_completed_as_least_squares_of_everything_say() -> None:
    count, values, rank, dim = 3, 4, 2, 5
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    root, half, shown = drawn(count * values, count * values), drawn(count * rank, count * rank), drawn(rank, values)
    mean, along, slopes, right = drawn(count, values), drawn(count, rank), drawn(count, dim), drawn(dim, values)
    pull, chosen = drawn(count, rank), torch.rand(dim, values, generator=generator) < 0.5
    rows, columns = chosen.nonzero().T
    weights = torch.rand(len(rows), generator=generator, dtype=torch.float64) + 0.5
    variance = torch.full_like(right, 1e12)  # of entries that say nothing
    variance[rows, columns] = 1 / weights
    stated = PatchPosterior(along, (half @ half.mT).view(count, rank, count, rank), pull, slopes)
    made = complete(stated, shown, Prior(mean, root @ root.mT), Entries(variance, right, right))

    moved = along.flatten() + torch.linalg.solve(half @ half.mT, pull.flatten())  # where the pull ends
    parts, targets = [root.mT], [root.mT @ mean.flatten()]
    parts.append(half.mT @ torch.kron(torch.eye(count, dtype=torch.float64), shown))
    targets.append(half.mT @ moved)
    for row, column, weight in zip(rows.tolist(), columns.tolist(), weights.tolist(), strict=True):
        equation = torch.zeros(count, values, dtype=torch.float64)
        equation[:, column] = slopes[:, row]
        parts.append(math.sqrt(weight) * equation.view(1, -1))
        targets.append(math.sqrt(weight) * right[row, column][None])
    least = torch.linalg.lstsq(torch.cat(parts), torch.cat(targets)[:, None]).solution
    torch.testing.assert_close(made.flatten(), least[:, 0])


def test_a_picture_is_completed_by_bounds_as_by_pictures_that_keep_them() -> None:
    generator = torch.Generator().manual_seed(0)
    count, values, dim = 2, 2, 3

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    root, slopes, along, shown = (
        torch.eye(4).double() + 0.3 * drawn(4, 4),
        drawn(count, dim),
        drawn(count, 1),
        drawn(1, values),
    )
    true = drawn(count, values)
    sign = (slopes.mT @ true).sign()
    zero, endless = torch.zeros_like(sign), torch.full_like(sign, torch.inf)
    bounds = Entries(zero, torch.where(sign > 0, zero, -endless), torch.where(sign > 0, endless, zero))
    nothing = torch.zeros(count, 1, count, 1).double()
    stated = PatchPosterior(along, nothing, torch.zeros(count, 1).double(), slopes)
    made = complete(stated, shown, Prior(zero[:count], root @ root.mT), bounds)

    tried = (drawn(400_000, 4) @ torch.linalg.inv(root)).view(-1, count, values)
    kept = tried[((slopes.mT @ tried).sign() == sign).flatten(1).all(dim=1)]
    assert len(kept) > 1000
    assert float((made - kept.mean(dim=0)).abs().max()) < 0.15 * float(kept.std())


def test_what_is_believed_of_unknowns_is_the_mean_of_those_that_keep_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    slopes, at, true = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 6), (3,), (3,)))
    sign = (true @ slopes).sign()
    zero = torch.zeros_like(sign)
    bounds = Entries(zero, zero, zero + torch.inf)
    belief = believed(sign * (at @ slopes), sign * slopes, at, bounds)
    drawn = torch.randn(400_000, 3, generator=generator, dtype=torch.float64)
    kept = drawn[(sign * (drawn @ slopes) > 0).all(dim=1)]
    assert len(kept) > 1000
    torch.testing.assert_close(belief.mean, kept.mean(dim=0), atol=0.05, rtol=0)
    torch.testing.assert_close(torch.linalg.inv(belief.precision), kept.mT.cov(), atol=0.1, rtol=0)


def test_tokens_that_are_put_elsewhere_stay_the_same(model: VitClassifier) -> None:
    _, exchange = exchanged("none", model)
    entrance, true = TokenEmbedding.of(model), patches_of(exchange.private.clean, model)
    shown = shown_directions(entrance)
    along, rank, places = true @ shown.mT, len(shown), torch.tensor([2, 0, 3, 1])
    precision = torch.rand(4, rank, 4, rank, dtype=torch.float64)
    stated = PatchPosterior(along, precision, along, torch.arange(4.0)[:, None])
    moved = stated.moved(places, shown, entrance)
    torch.testing.assert_close(entrance.tokens(moved.along @ shown)[places], entrance.tokens(along @ shown))
    assert moved.slopes[places].flatten().tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(moved.precision[2, :, 3], precision[0, :, 2])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"defences": ["mjp"]}, "takes no masks"),
        ({"batch_size": 2, "pictures_per_client": 2}, "needs uploads of one picture"),
        ({"update": "delta", "local_steps": 3}, "not the sum of 3 steps"),
        (
            {"model": {**MICRO, "image_size": 64, "patch_size": 8}},
            "4032 unknowns are to be found, and most_unknowns is 3200",
        ),
        (
            {"model": {**MICRO, "patch_size": 4}, "defences": ["prune"]},
            "3072 unknowns are to be found of pruned entries or signs, and half of most_unknowns, which is 3200, is",
        ),
        (
            {"model": {**MICRO, "patch_size": 4}, "defences": ["sign"]},
            "3072 unknowns are to be found of pruned entries or signs, and half of most_unknowns, which is 3200, is",
        ),
    ],
    ids=["masks", "a batch", "steps", "many patches", "many pruned patches", "signs of many patches"],
)
def test_it_says_what_it_cannot_take(changes: dict[str, object], reason: str) -> None:
    scenario = Scenario.parse({"model": MICRO, **changes})
    assert reason in str(NetworkDegraded().refusal(build_vit(scenario.network), scenario.threat))


@pytest.mark.parametrize("defence", ["gaussian", "quantise", "round"])
def test_it_takes_64_patches_whose_entries_are_noisy(defence: str) -> None:
    scenario = Scenario.parse({"model": {**MICRO, "patch_size": 4}, "defences": [defence]})
    assert NetworkDegraded().refusal(build_vit(scenario.network), scenario.threat) is None


def test_what_hides_bounds_is_not_taken_into_account(model: VitClassifier) -> None:
    one, both = (
        Scenario.parse({"model": MICRO, "defences": defences}).threat
        for defences in (["prune"], ["prune", "gaussian:noise=0.01"])
    )
    assert NetworkDegraded().handles(model, one) == {"pruned", "noisy", "rounded", "signs", "scaled"}
    assert not NetworkDegraded().handles(model, both)


def test_an_upload_of_zeros_is_refused(model: VitClassifier) -> None:
    scenario, exchange = exchanged("prune:kept=0.1", model)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in exchange.upload.tensors.items()}
    upload = Upload(zeros, exchange.upload.kind, 1, 1, 0, exchange.upload.weights)
    with pytest.raises(AttackNotApplicableError, match="zero for every patch"):
        NetworkDegraded().run([upload], model, scenario.threat, generator=torch.Generator())


def test_a_search_begins_no_second_step_after_its_time() -> None:
    ended = minimise(
        lambda point: torch.cat([point.exp(), (point - 3).square()]), torch.zeros(3).double(), steps=30,
        ends=StoppingRule(until=time.thread_time()),
    )  # fmt: skip
    assert ended.steps == 1
