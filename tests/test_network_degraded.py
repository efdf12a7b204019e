"""network_degraded: what it compares, what it makes of few entries, and how it fills in what tokens do not show."""

import math
import time

import pytest
import torch
from torch import Tensor

from attacks.first_mlp.places import Entrance
from attacks.gauss_newton.body import shown_directions
from attacks.gauss_newton.complete import Stated, complete
from attacks.gauss_newton.degraded import NetworkDegraded
from attacks.gauss_newton.levenberg import Ends, Minimum, minimise
from attacks.gauss_newton.ordered import Found, Ordered, Ordering
from attacks.gauss_newton.picked import Known, PickedResiduals
from attacks.gauss_newton.placing import Placing
from attacks.gauss_newton.space import OpenSpace, Prior
from attacks.gauss_newton.stages import Sent, Stage, stages
from attacks.patch_embedding_degraded import PatchEmbeddingDegraded
from fedmjp.data.selection import select_for
from fedmjp.errors import AttackNotApplicableError
from fedmjp.exchange import Exchange
from fedmjp.metrics import metric
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.records import Upload
from fedmjp.scenario import Scenario

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


def sent_of(upload: Upload, scenario: Scenario, model: VitClassifier) -> Sent:
    return Sent.of(upload, NetworkDegraded().tensors(model), scenario.threat, model)


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
    found = []
    for attack in (PatchEmbeddingDegraded(), NetworkDegraded({"seconds": 8})):
        generator = torch.Generator().manual_seed(0)
        (made,) = attack.reconstruct([exchange.upload], model, scenario.threat, generator=generator)
        found.append(float(metric("psnr").function(made.images, exchange.private.clean)))
    assert found[1] > found[0] + 1
    assert made.diagnostics["residual"] < 1.5


def test_near_a_picture_the_largest_entries_lead_to_all_of_its_tokens(model: VitClassifier) -> None:
    scenario, exchange = exchanged("prune:kept=0.1", model)
    entrance, true = Entrance.of(model), patches_of(exchange.private.clean, model)
    space = OpenSpace.of_shown(shown_directions(entrance), Prior.of(model))
    start = space.unknowns(true[None])
    sent = sent_of(exchange.upload, scenario, model)
    (stage,) = stages(sent, sent.known(), len(start), 40, torch.Generator())
    residuals = PickedResiduals(model, exchange.private.labels, stage.entries, scenario.threat)
    assert residuals.count == pytest.approx(2 * len(start), rel=0.15)
    start = start + 0.1 * torch.randn(len(start), generator=torch.Generator().manual_seed(1)).double()
    attack, told = NetworkDegraded(), []
    attack.on_progress = lambda done, total, loss: told.append((done, total))
    minimum = attack._minimum(residuals, space, start, stage.steps, math.inf)
    assert told == [(done, stage.steps) for done in range(1, len(told) + 1)]
    attack._minimum(residuals, space, start, stage.steps, time.thread_time())
    assert told[-1] == (1, 1), "there is no time for a second step"
    ended, tokens = (entrance.tokens(space.patches(point)[0]) for point in (minimum.point, start))
    error, before = ((made - entrance.tokens(true)).norm() for made in (ended, tokens))
    assert error < before / 100


def test_signs_are_those_of_the_picture_and_the_sharper_the_more_they_say(model: VitClassifier) -> None:
    losses: dict[str, list[tuple[float, ...]]] = {}
    for update in ("gradient", "delta"):
        scenario, exchange = exchanged("sign", model, update=update)
        sent, generator = sent_of(exchange.upload, scenario, model), torch.Generator().manual_seed(0)
        known = sent.known()
        assert not any(entries.values.any() for entries in known.values())  # zeros are known: nothing else is
        clean = exchange.private.clean
        for stage in stages(sent, known, 252, 40, generator):
            residuals = PickedResiduals(model, exchange.private.labels, stage.entries, scenario.threat)
            tried = (patches_of(image, model) for image in (clean, clean.flip(-1)))
            losses.setdefault(update, []).append(tuple(float(residuals(one).square().mean()) for one in tried))
    of_true, of_other = zip(*losses["gradient"], strict=True)
    assert list(of_true) == sorted(of_true, reverse=True)
    assert of_true[-1] < 0.1 < 10 < of_other[-1]
    assert losses["delta"][0] == pytest.approx(losses["gradient"][0], rel=0.05)


def test_signs_do_not_tell_how_an_update_was_scaled(model: VitClassifier) -> None:
    scenario, exchange = exchanged("clip+sign", model)
    (first, *_) = stages(sent_of(exchange.upload, scenario, model), {}, 252, 40, torch.Generator().manual_seed(0))
    residuals = PickedResiduals(model, exchange.private.labels, first.entries, scenario.threat)
    patches = patches_of(exchange.private.clean, model)
    assert residuals.scale(patches) == 1
    assert residuals(patches).isfinite().all()


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
        attack.reconstruct([exchange.upload], model, scenario.threat, generator=torch.Generator())[0]
        for attack in (PatchEmbeddingDegraded(), NetworkDegraded())
    )
    torch.testing.assert_close(made.images, exact.images)


def test_a_search_that_does_not_arrive_answers_with_the_picture_that_it_began_with(model: VitClassifier) -> None:
    scenario, exchange = exchanged("prune:kept=0.1", model)
    (began,), (made,) = (
        attack.reconstruct([exchange.upload], model, scenario.threat, generator=torch.Generator().manual_seed(0))
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
    entrance, true = Entrance.of(model), patches_of(exchange.private.clean, model)
    space = OpenSpace.of_shown(shown_directions(entrance), Prior.of(model))
    known = sent_of(exchange.upload, scenario, model).known()
    rows = known[names.POSITION_EMBEDDING].rows
    assert float((rows > 0).sum()) / 1024 <= given
    slopes = (
        PickedResiduals(model, exchange.private.labels, known, scenario.threat).factors(true).at_tokens[0, 1:].double()
    )
    generator = torch.Generator().manual_seed(0)
    stands = torch.randperm(16, generator=generator)
    found = Stated(
        (true @ space.basis.mT + entrance.shifts(space.basis))[stands] - entrance.shifts(space.basis),
        torch.zeros(0),
        torch.zeros(0),
        slopes[stands],
    )
    sure = torch.zeros(len(space.basis), len(space.basis), dtype=torch.float64)
    placing = Placing.of(found, sure, space, entrance, known[names.PATCH_WEIGHT], known[names.POSITION_EMBEDDING], 1)
    places = placing.best([torch.arange(16)], generator, math.inf)
    assert places.tolist() == stands.tolist()
    swapped = stands.clone()
    swapped[[3, 8]] = stands[[8, 3]]
    assert float(placing._swapped(swapped)[3, 8]) == pytest.approx(placing.cost(stands))
    assert placing.cost(stands) < placing.cost(swapped)


def test_of_tokens_that_are_found_roughly_the_order_is_seen_by_who_knows_how_roughly() -> None:
    scenario = Scenario.parse({"model": MICRO | {"patch_size": 8}, "defences": ["quantise:bits=4"]})
    model, pictures = build_vit(scenario.network), select_for(scenario)
    exchange = scenario.exchange([pictures.load(pictures.entries[0])], model=model)
    entrance, true = Entrance.of(model), patches_of(exchange.private.clean, model)
    space = OpenSpace.of_shown(shown_directions(entrance), Prior.of(model))
    known = sent_of(exchange.upload, scenario, model).known()
    residuals = PickedResiduals(model, exchange.private.labels, known, scenario.threat)
    slopes = residuals.factors(true).at_tokens[0, 1:].double()
    generator, error = torch.Generator().manual_seed(0), 0.2
    along = true @ space.basis.mT
    rough = along + error * torch.randn(along.shape, generator=generator, dtype=torch.float64)
    found, stand = Stated(rough, torch.zeros(0), torch.zeros(0), slopes), torch.arange(16)
    likelier = []
    for told in (0.0, error):
        unsure = told**2 * torch.eye(len(space.basis), dtype=torch.float64)
        placing = Placing.of(
            found, unsure, space, entrance, known[names.PATCH_WEIGHT], known[names.POSITION_EMBEDDING], 1
        )
        others = [placing.settled(torch.randperm(16, generator=generator)) for _ in range(20)]
        likelier.append(sum(placing.cost(other) < placing.cost(stand) - 1 for other in others))
    assert likelier[0] > likelier[1] == 0, "orders that seem likelier than the truth"


@pytest.mark.parametrize(
    ("residuals", "chosen"), [([5.0, 4.0, 1.0], 1.0), ([1.0], 1.0), ([9.0, 5.0, 7.0], 5.0)], ids=str
)
def test_searches_start_again_until_one_arrives(
    residuals: list[float], chosen: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, ends = [], iter(residuals)

    def search(self: NetworkDegraded, compared: object, ordering: Ordering, start: Tensor, until: float) -> Found:
        starts.append(start)
        return Found(Minimum(start, 0.0, start[:, None], 1), ordering.space, compared, next(ends))

    monkeypatch.setattr(NetworkDegraded, "_search", search)
    begin, generator = torch.zeros(4, dtype=torch.float64), torch.Generator().manual_seed(0)
    ordering = Ordering(None, None, {}, None, generator)
    found = NetworkDegraded({"starts": 3})._nearest([], ordering, begin, math.inf)
    assert found.residual == chosen
    assert len(starts) == len(residuals)
    assert torch.equal(starts[0], begin)
    assert all(0.1 < float(start.std()) < 1 for start in starts[1:])


@pytest.mark.parametrize(
    ("costs", "moved", "ended"),
    [([9.0, 5.0, 4.0], [True, True, False], 4.0), ([9.0, 5.0, 6.0], [True, True], 5.0), ([9.0], [False], 9.0)],
    ids=["until-in-order", "until-nothing-is-gained", "in-order"],
)
def test_a_search_goes_on_from_its_tokens_in_their_order(
    costs: list[float], moved: list[bool], ended: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, asked = iter(costs), iter(moved)
    starts = []

    def search(self: NetworkDegraded, residuals: object, space: object, start: Tensor, *_: object) -> Found:
        starts.append(float(start))
        return Found(Minimum(start, next(found), start, 2), space, residuals, 1.0)

    monkeypatch.setattr(NetworkDegraded, "_found", search)
    monkeypatch.setattr(Ordering, "of", lambda *_: Ordered(None, None, next(asked)))
    monkeypatch.setattr(Ordering, "unknowns", lambda *_: torch.tensor(7.0))
    ordering = Ordering(None, None, {}, None, torch.Generator())
    made = NetworkDegraded()._settled(None, ordering, torch.tensor(3.0), Stage({}, 5), math.inf)
    assert made.minimum.cost == ended
    assert starts == [3.0, *[7.0] * (len(costs) - 1)]
    assert next(asked, None) is None


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


def test_a_pruned_tensor_states_what_was_kept_and_one_of_zeros_nothing(model: VitClassifier) -> None:
    scenario, exchange = exchanged("prune:kept=0.1", model)
    tensor = exchange.upload.tensors[names.PATCH_WEIGHT].flatten(1)
    known = Known.read(tensor, scenario.threat)
    assert len(known.rows) == int((tensor != 0).sum())
    torch.testing.assert_close(tensor[known.rows, known.columns].double(), known.values)
    assert not len(Known.read(torch.zeros(5, 3), scenario.threat).rows)


def test_the_directions_that_are_shown_vary_as_whole_pictures_do(model: VitClassifier) -> None:
    prior, shown = Prior.of(model), shown_directions(Entrance.of(model))
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
    known = Known(rows, columns, right[rows, columns], weights, dim * values)
    stated = Stated(along, (half @ half.mT).view(count, rank, count, rank), pull, slopes)
    made = complete(stated, shown, Prior(mean, root @ root.mT), known)

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


def test_tokens_that_are_put_elsewhere_stay_the_same(model: VitClassifier) -> None:
    _, exchange = exchanged("none", model)
    entrance, true = Entrance.of(model), patches_of(exchange.private.clean, model)
    shown = shown_directions(entrance)
    along, rank, places = true @ shown.mT, len(shown), torch.tensor([2, 0, 3, 1])
    precision = torch.rand(4, rank, 4, rank, dtype=torch.float64)
    stated = Stated(along, precision, along, torch.arange(4.0)[:, None])
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
    ],
    ids=["masks", "a batch", "steps", "many patches"],
)
def test_it_says_what_it_cannot_take(changes: dict[str, object], reason: str) -> None:
    scenario = Scenario.parse({"model": MICRO, **changes})
    assert reason in str(NetworkDegraded().refusal(build_vit(scenario.network), scenario.threat))


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
        NetworkDegraded().reconstruct([upload], model, scenario.threat, generator=torch.Generator())


def test_a_search_begins_no_second_step_after_its_time() -> None:
    ended = minimise(
        lambda point: torch.cat([point.exp(), (point - 3).square()]), torch.zeros(3).double(), steps=30,
        ends=Ends(until=time.thread_time()),
    )  # fmt: skip
    assert ended.steps == 1
