"""Attacks: against breaching as an oracle, and the contract that all of them keep."""

import doctest
import importlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import Attack
from fedmjp.attacks.gradient_matching import GradientMatching
from fedmjp.attacks.grey import Grey
from fedmjp.attacks.natural_patches import natural_inputs
from fedmjp.attacks.patch_embedding import PatchEmbeddingAttack
from fedmjp.attacks.testing import CHECKS, AttackConformanceError, AttackTrial
from fedmjp.attacks.token_gradients import Reading
from fedmjp.config import ModelConfig
from fedmjp.data.selection import Selection
from fedmjp.defences.base import Mark
from fedmjp.errors import AttackFailedError, AttackNotApplicableError, RecordError, UnknownNameError
from fedmjp.metrics import METRICS
from fedmjp.models import names
from fedmjp.models.build import blueprint, build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import from_patches, to_patches
from fedmjp.records import Reconstruction, Upload
from fedmjp.settings import Picture
from fedmjp.stacked import entrance_gradients
from fedmjp.threat import ThreatModel
from fedmjp.updates import delta
from tests.attacks import QUICK, THREATS, model_of
from tests.conftest import ROOT, batch_of, private_batch, small_model, small_scenario, upload_of


@pytest.fixture(scope="module")
def breaching_april() -> type:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from breaching.attacks.analytic_attack import AprilAttacker
    return AprilAttacker


@pytest.mark.parametrize("index", range(4))
def test_april_equals_breachings_closed_form(
    breaching_april: type, pictures: Selection, threat: ThreatModel, generator: torch.Generator, index: int
) -> None:
    model = small_model("deit_tiny_april")
    upload = upload_of(model, batch_of(pictures, Picture.CLEAN, index))
    # breaching wants the timm model in a container and gradients at fixed positions of a list.
    gradients = [None, upload.tensors[names.POSITION_EMBEDDING], None, None, upload.tensors[names.FIRST_QKV_WEIGHT]]
    patches = breaching_april.closed_form_april(SimpleNamespace(model=model.backbone), {"gradients": gradients})
    theirs = model.denormalise(breaching_april.recover_patch(patches)).float()
    ours = ATTACKS.get("april_min_norm")().run([upload], model, threat, generator=generator)[0]
    assert (ours.images[0] - theirs).norm() / theirs.norm() < 1e-6


def test_april_inverts_exactly_in_float64_where_the_embedding_is_square(
    pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    model = small_model("deit_tiny_april").double()  # 192 x 192: no rank limit
    batch = batch_of(pictures, Picture.CLEAN)
    loss = torch.nn.functional.cross_entropy(model(batch.clean.double()), batch.labels)
    named = dict(model.named_parameters())
    gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    upload = Upload(gradients, "gradient", 1, 1, 0, "weights")
    made = ATTACKS.get("april")().run([upload], model, threat, generator=generator)[0]
    assert METRICS["psnr"].function(made.images, batch.clean).item() > 60


SHOWING = [name for name in ATTACKS if ATTACKS.get(name).reveals == "pictures"]
OURS = [name for name in ATTACKS if ATTACKS.get(name).role == "attack" and not name.startswith("breaching_")]
CLOSED_FORMS = [name for name in OURS if not ATTACKS.get(name).optimises]


@pytest.mark.parametrize("name", [*CLOSED_FORMS, "grey", "chance"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[AttackTrial], None], name: str) -> None:
    # The published form of APRIL drowns in float32 rounding where the embedding is square; a thumbnail is blurred.
    gain = {"grey": None, "chance": None, "april_min_norm": None, "concentrated_thumbnail": 2.5}.get(name, 5.0)
    check(
        AttackTrial(ATTACKS.get(name)(QUICK.get(name, {})), model_of(name), THREATS.get(name, ThreatModel()), gain=gain)
    )


@pytest.mark.parametrize("name", list(ATTACKS))
def test_no_attack_has_a_parameter_for_private_data(name: str) -> None:
    attack, parties = ATTACKS.get(name), ["model", "threat"]
    assert list(inspect.signature(attack.run).parameters) == ["self", "uploads", *parties, "generator"]
    assert list(inspect.signature(attack.reconstruct).parameters) == ["self", "upload", *parties, "generator"]
    assert list(inspect.signature(attack.reconstruct_stack).parameters) == ["self", "uploads", *parties, "generators"]
    assert attack.run is Attack.run, "the checks of the contract cannot be left out"


def test_april_refuses_a_deployed_architecture(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(undefended, batch_of(pictures, Picture.CLEAN))
    with pytest.raises(AttackNotApplicableError, match="_april variant"):
        ATTACKS.get("april")().run([upload], undefended, threat, generator=generator)


def test_patch_embedding_refuses_an_underdetermined_model(threat: ThreatModel, generator: torch.Generator) -> None:
    from fedmjp.config import ModelConfig
    from fedmjp.models.build import build_vit

    model = build_vit(ModelConfig(name="deit_tiny"))  # 196 patches, dim 192
    with pytest.raises(AttackNotApplicableError, match="196 patches are more unknowns than the 192"):
        ATTACKS.get("patch_embedding")().run([], model, threat, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient_matching", "breaching_april", "breaching_invertinggradients"])
def test_conformance_of_breaching_and_of_what_optimises(name: str) -> None:
    model = model_of(name) if "april" in name else "deit_micro"  # iterations go through the whole model
    trial = AttackTrial(ATTACKS.get(name)(QUICK.get(name, {})), model, gain=None, tolerance=0.05)
    for check in CHECKS:
        check(trial)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["patch_embedding", "patch_embedding_wiener"])
def test_weight_deltas_of_one_picture_are_inverted_whatever_the_number_of_steps(name: str, steps: int) -> None:
    threat = ThreatModel(update="delta", local_steps=steps, local_learning_rate=0.1)
    for check in CHECKS:
        check(AttackTrial(ATTACKS.get(name)(), "deit_tiny", threat, gain=25.0))


def test_weight_deltas_are_exact_in_float64(pictures: Selection, generator: torch.Generator) -> None:
    model, batch = small_model().double(), batch_of(pictures, Picture.CLEAN)
    wide = SimpleNamespace(**{**vars(batch), "targets": batch.targets, "version": lambda _: batch.clean.double()})
    threat = ThreatModel(update="delta", local_steps=4, local_learning_rate=0.01)
    upload = Upload(delta(model, wide, steps=4, learning_rate=0.01), "delta", 1, 1, 0, "weights")
    made = ATTACKS.get("patch_embedding")().run([upload], model, threat, generator=generator)[0]
    assert (made.images - batch.clean).abs().max() < 1e-6


def test_a_batch_is_answered_with_a_mixture_and_says_so(undefended: VitClassifier) -> None:
    threat, attack = ThreatModel(batch_size=2), ATTACKS.get("patch_embedding")()
    assert "underdetermined" in (attack.caveat(undefended, threat) or "")
    assert attack.caveat(undefended, ThreatModel()) is None
    trial = AttackTrial(attack, "deit_tiny", threat, gain=None)
    for check in CHECKS:
        check(trial)
    made = trial.run(trial.uploads(undefended), undefended)[0]
    assert torch.equal(made.images[0], made.images[1])
    assert made.diagnostics["equations_per_unknown"] == 192 / 128


@pytest.mark.parametrize("name", ["april", "april_min_norm"])
@pytest.mark.parametrize(
    ("threat", "reason"),
    [
        (ThreatModel(batch_size=2), "single picture"),
        (ThreatModel(update="delta", local_steps=5), "change over 5 steps"),
        (ThreatModel(defences="secure_sum:clients=2"), "each client's own update"),
    ],
)
def test_april_refuses_what_breaks_its_equation(
    name: str, threat: ThreatModel, reason: str, generator: torch.Generator
) -> None:
    with pytest.raises(AttackNotApplicableError, match=reason):
        ATTACKS.get(name)().run([], small_model("deit_tiny_april"), threat, generator=generator)


def test_april_takes_a_delta_of_one_step() -> None:
    threat = ThreatModel(update="delta", local_learning_rate=0.1)
    for check in CHECKS:
        check(AttackTrial(ATTACKS.get("april")(), "deit_tiny_april", threat, gain=3.0))


@pytest.mark.parametrize("name", ["april", "april_min_norm", "patch_embedding", "patch_embedding_wiener"])
def test_empty_gradients_are_refused(
    name: str, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    model = small_model(model_of(name))
    upload = upload_of(model, batch_of(pictures, Picture.CLEAN))
    nothing = Upload({key: value * 0 for key, value in upload.tensors.items()}, "gradient", 1, 1, 0, "weights")
    with pytest.raises(AttackNotApplicableError, match="zero for every patch"):
        ATTACKS.get(name)().run([nothing], model, threat, generator=generator)


@pytest.mark.parametrize("reading", list(Reading))
def test_each_reading_is_the_minimum_norm_solution_of_its_own_system(
    reading: Reading, defended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(defended, batch_of(pictures, Picture.SHUFFLED))
    rows = upload.tensors[names.POSITION_EMBEDDING].double()[0, 1:].clone()
    mask = (rows == 0).all(dim=1)
    unknown = upload.tensors[names.UNKNOWN_EMBEDDING].double()
    if reading is Reading.ONE_TOKEN:
        rows[mask] = unknown / mask.sum()
    if reading is Reading.COPIED:
        rows[mask] = unknown
    if reading is Reading.SEPARATE:
        rows = torch.cat([rows, unknown[None]])
    right = upload.tensors[names.PATCH_WEIGHT].double().flatten(1)
    patches = torch.linalg.pinv(rows.T, rtol=1e-10) @ right
    expected = defended.denormalise(from_patches(patches[None, :64], 64, 8)).float()
    made = ATTACKS.get("patch_embedding")({"reading": reading}).run([upload], defended, threat, generator=generator)[0]
    assert torch.allclose(made.images, expected, atol=1e-4)


@pytest.mark.parametrize("reading", list(Reading))
def test_the_wiener_variant_solves_the_written_out_system_of_each_reading(
    reading: Reading, defended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(defended, batch_of(pictures, Picture.SHUFFLED))
    rows = upload.tensors[names.POSITION_EMBEDDING].double()[0, 1:].clone()
    mask = (rows == 0).all(dim=1)
    unknown = upload.tensors[names.UNKNOWN_EMBEDDING].double()
    rows[mask] = {Reading.ONE_TOKEN: unknown / mask.sum(), Reading.COPIED: unknown}.get(reading, unknown * 0)
    if reading is Reading.SEPARATE:
        rows = torch.cat([rows, unknown[None]])
    prior = natural_inputs(defended)
    right = upload.tensors[names.PATCH_WEIGHT].double().flatten(1) - rows.sum(0)[:, None] * prior.mean
    variances, directions = torch.linalg.eigh(prior.covariance)
    rotated, basis = right @ directions, torch.linalg.qr(rows.T)[0]
    noise = (rotated - basis @ (basis.T @ rotated)).square().sum(0) / (192 - len(rows))
    gains = [
        variance * rows @ torch.linalg.solve(variance * rows.T @ rows + level * torch.eye(192), column)
        for variance, level, column in zip(variances, noise, rotated.T, strict=True)
    ]
    patches = prior.mean + torch.stack(gains, dim=1) @ directions.T
    expected = defended.denormalise(from_patches(patches[None, :64], 64, 8)).float()
    made = ATTACKS.get("patch_embedding_wiener")({"reading": reading}).run(
        [upload], defended, threat, generator=generator
    )[0]
    assert torch.allclose(made.images, expected, atol=1e-4)


@pytest.mark.parametrize(("bound", "least"), [("oracle_patch_embedding", 60.0), ("oracle_april", 25.0)])
def test_bounds_see_through_the_mask_and_are_no_attacks(
    bound: str, least: float, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    attack, model = ATTACKS.get(bound)(), small_model(model_of(bound), "mjp")
    assert attack.role == "bound"
    batch = batch_of(pictures, Picture.SHUFFLED)
    tensors = entrance_gradients(model, [batch], attack.tensors(model))[0]
    made = attack.run([Upload(tensors, "gradient", 1, 1, 0, "w")], model, threat, generator=generator)[0]
    assert METRICS["psnr"].function(made.images, batch.shuffled).item() > least
    with pytest.raises(AttackNotApplicableError, match=r"no tensor 'oracle\.token_gradients'"):
        attack.run([upload_of(model, batch)], model, threat, generator=generator)


def test_the_bound_takes_equal_patches_under_one_embedding(
    pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    model, whole = small_model("deit_tiny", "mjp"), batch_of(pictures, Picture.SHUFFLED, mask_ratio=0.5)
    image = whole.clean.clone()
    image[..., :, 32:] = 0.8  # the right half is one colour: equal patches, told apart by positions alone
    batch = replace(whole, clean=image, gradient_of=Picture.CLEAN)
    attack = ATTACKS.get("oracle_patch_embedding")()
    tensors = entrance_gradients(model, [batch], attack.tensors(model))[0]
    made = attack.run([Upload(tensors, "gradient", 1, 1, 0, "w")], model, threat, generator=generator)[0]
    assert METRICS["psnr"].function(made.images, image).item() > 50


def test_aprils_prior_is_worth_ten_decibels_where_the_embedding_loses_half(pictures: Selection) -> None:
    model = build_vit(ModelConfig(name="deit_tiny_april", image_size=64, patch_size=16))  # 768 pixels to 192 numbers
    psnr, found = METRICS["psnr"].function, {}
    for name in ("april", "april_min_norm"):
        for index in range(2):
            loaded = [pictures.load(pictures.entries[index])]
            batch = private_batch(loaded, grid=4, mask_ratio=0.0, gradient_of=Picture.CLEAN, seed=0)
            made = ATTACKS.get(name)().run(
                [upload_of(model, batch)], model, ThreatModel(), generator=torch.Generator()
            )[0]
            found.setdefault(name, []).append(psnr(made.images, batch.clean).item())
    assert min(a - b for a, b in zip(found["april"], found["april_min_norm"], strict=True)) > 10


DEGRADED = {
    "half precision": lambda tensor, _: tensor.half(),
    "bfloat16": lambda tensor, _: tensor.bfloat16(),
    "noise 1e-3": lambda tensor, random: tensor + 1e-3 * tensor.std() * torch.randn(tensor.shape, generator=random),
    "16-bit steps": lambda tensor, _: (tensor / tensor.abs().max() * 32767).round() * tensor.abs().max() / 32767,
}


@pytest.mark.parametrize("kind", list(DEGRADED))
def test_wiener_beats_least_squares_on_degraded_uploads_without_being_told_the_noise(
    kind: str, undefended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    gains = []
    for index in range(4):
        batch, random = batch_of(pictures, Picture.CLEAN, index), torch.Generator().manual_seed(index)
        whole = upload_of(undefended, batch)
        tensors = {
            key: DEGRADED[kind](whole.tensors[key], random) for key in (names.POSITION_EMBEDDING, names.PATCH_WEIGHT)
        }
        upload = Upload(tensors, "gradient", 1, 1, 0, "weights")
        psnr = [
            METRICS["psnr"].function(made.images, batch.clean).item()
            for name in ("patch_embedding_wiener", "patch_embedding")
            for made in ATTACKS.get(name)().run([upload], undefended, threat, generator=generator)
        ]
        gains.append(psnr[0] - psnr[1])
    assert min(gains) > 0
    assert sum(gains) / len(gains) > 1


def test_uploads_that_were_pruned_to_equal_rows_show_every_patch_alike(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(undefended, batch_of(pictures, Picture.CLEAN))
    tensors = {
        key: upload.tensors[key] * (upload.tensors[key].abs() >= upload.tensors[key].abs().quantile(0.999))
        for key in (names.POSITION_EMBEDDING, names.PATCH_WEIGHT)
    }
    tensors[names.POSITION_EMBEDDING][0, 1:] = 0
    tensors[names.POSITION_EMBEDDING][0, 1:, 5] = 1e-3  # every row has one entry left, the same one
    dependent = Upload(tensors, "gradient", 1, 1, 0, "weights")
    (made,) = ATTACKS.get("patch_embedding")().run([dependent], undefended, threat, generator=generator)
    patches = to_patches(made.images, 8)[0]
    assert torch.allclose(patches, patches[:1].expand_as(patches), atol=1e-5)
    assert ATTACKS.get("patch_embedding_wiener")().run([dependent], undefended, threat, generator=generator)


def test_wiener_takes_more_patches_than_dimensions(threat: ThreatModel) -> None:
    model = build_vit(ModelConfig(name="deit_tiny"))  # 196 patches, 192 dimensions
    assert "196 patches" in (ATTACKS.get("patch_embedding")().refusal(model, threat) or "")
    assert ATTACKS.get("patch_embedding_wiener")().refusal(model, threat) is None


def test_attacks_with_a_prior_refuse_sizes_that_it_does_not_know(threat: ThreatModel) -> None:
    for name, size in (("patch_embedding_wiener", 48), ("april", 48)):
        model = build_vit(ModelConfig(name=model_of(name), image_size=size, patch_size=8))
        assert "no prior" in (ATTACKS.get(name)().refusal(model, threat) or "none").replace("there is none", "no prior")


class Greedy(PatchEmbeddingAttack):
    """Declares to read what no upload holds."""

    def tensors(self, model: VitClassifier) -> list[str]:
        return [names.ORACLE_TOKEN_GRADIENTS, names.POSITION_EMBEDDING, names.PATCH_WEIGHT]


def test_only_bounds_may_read_what_no_upload_holds(
    undefended: VitClassifier, threat: ThreatModel, generator: torch.Generator
) -> None:
    with pytest.raises(AttackNotApplicableError, match="only a bound may"):
        Greedy().run([], undefended, threat, generator=generator)


class Wrong(Grey):
    """Gives what it is told to give."""

    given: ClassVar[object] = None

    def reconstruct_stack(self, uploads: Sequence[Upload], *_: object, **__: object) -> list[Reconstruction]:
        return [self.given for _ in uploads]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (torch.zeros(1, 3, 64, 64), "a Tensor instead of a Reconstruction"),
        (Reconstruction(torch.zeros(1, 3, 32, 32)), r"shape \(1, 3, 32, 32\) instead of \(1, 3, 64, 64\)"),
        (Reconstruction(torch.zeros(2, 3, 64, 64)), r"shape \(2, 3, 64, 64\)"),
    ],
)
def test_what_is_no_reconstruction_of_the_upload_is_a_failure(
    given: object,
    reason: str,
    undefended: VitClassifier,
    pictures: Selection,
    threat: ThreatModel,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Wrong, "given", given)
    upload = upload_of(undefended, batch_of(pictures, Picture.CLEAN))
    with pytest.raises(AttackFailedError, match=reason):
        Wrong().run([upload], undefended, threat, generator=generator)


class Singular(Grey):
    """Solves what has no solution."""

    solve: ClassVar[Callable[[], object]]

    def reconstruct_stack(self, *_: object, **__: object) -> list[Reconstruction]:
        type(self).solve()
        raise AssertionError


@pytest.mark.parametrize(
    "solve",
    [lambda: torch.linalg.cholesky(-torch.eye(2)), lambda: np.linalg.cholesky(-np.eye(2))],
    ids=["torch", "numpy"],
)
def test_equations_without_a_solution_are_a_failure(
    solve: Callable[[], object],
    undefended: VitClassifier,
    threat: ThreatModel,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Singular, "solve", staticmethod(solve), raising=False)
    with pytest.raises(AttackFailedError, match=r"grey: a system of equations has no solution: .*positive"):
        Singular().run([], undefended, threat, generator=generator)


class Vandal(PatchEmbeddingAttack):
    """Breaks the contract in the way that it is told to."""

    way: ClassVar[str] = ""

    def reconstruct_stack(
        self, uploads: Sequence[Upload], model: VitClassifier, threat: ThreatModel, **named: Any
    ) -> list[Reconstruction]:
        if self.way == "upload":
            uploads[0].tensors[names.PATCH_WEIGHT].clamp_(min=0)
        if self.way == "model":
            model.get_parameter(names.PATCH_BIAS).data.add_(1)
        if self.way == "hook":
            model.register_forward_hook(lambda *_: None)
        if self.way == "random":
            torch.rand(1)
        if self.way == "undeclared":
            _ = uploads[0].tensors[names.HEAD_BIAS]
        made = super().reconstruct_stack(uploads, model, threat, **named)
        if self.way == "chance":
            return [Reconstruction((each.images + 1e-3 * torch.rand(1)).clamp(0, 1)) for each in made]
        if self.way == "neighbours":
            return [Reconstruction(sum(other.images for other in made) / len(made)) for _ in made]
        return made


@pytest.mark.parametrize(
    ("way", "check"),
    [
        ("upload", "changes_nothing"),
        ("model", "changes_nothing"),
        ("hook", "changes_nothing"),
        ("random", "changes_nothing"),
        ("undeclared", "reads_what_it_declares"),
        ("chance", "is_deterministic"),
        ("neighbours", "treats_uploads_independently"),
    ],
)
def test_the_conformance_suite_catches(way: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = AttackTrial(Vandal(), "deit_tiny")
    checks = {each.__name__: each for each in CHECKS}
    checks[check](trial)
    monkeypatch.setattr(Vandal, "way", way)
    with pytest.raises(AttackConformanceError):
        checks[check](trial)


class Boaster(PatchEmbeddingAttack):
    """Solves its own system whatever was done to the upload, and claims to take it all into account."""

    def handles(self, model: VitClassifier, threat: ThreatModel) -> frozenset[Mark]:
        return frozenset(get_args(Mark))


class Nameless(PatchEmbeddingAttack):
    """Says nothing of its source."""

    paper = " "


class Silent(Attack):
    """Forgets to say how it reconstructs."""

    name = "silent"

    def tensors(self, model: VitClassifier) -> list[str]:
        return [names.PATCH_BIAS]


def test_an_attack_that_reconstructs_nothing_says_so(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(undefended, batch_of(pictures, Picture.CLEAN))
    with pytest.raises(AttackFailedError, match="silent: its class overrides neither reconstruct nor"):
        Silent().run([upload], undefended, threat, generator=generator)


class Eager(PatchEmbeddingAttack):
    """Refuses nothing."""

    def refusal(self, model: VitClassifier, threat: ThreatModel) -> str | None:
        return None


@pytest.mark.parametrize(
    ("attack", "check", "reason"),
    [
        (Boaster(), "adapts_to_what_it_claims", r"is adapted to .* dB where .* dB are possible"),
        (Eager(), "refuses_sums_and_what_is_withheld", "its refusal is None"),
        (Nameless(), "states_what_it_is", "states no paper"),
    ],
)
def test_the_conformance_suite_catches_false_claims(attack: Attack, check: str, reason: str) -> None:
    checks = {each.__name__: each for each in CHECKS}
    checks[check](AttackTrial(PatchEmbeddingAttack(), "deit_tiny"))
    with pytest.raises(AttackConformanceError, match=reason):
        checks[check](AttackTrial(attack, "deit_tiny"))


ENTRIES = "patch_embedding_degraded"
READ_FACTS = {"mjp_intersection", "mjp_prior", "mjp_span"}
MATCH = {"gradient_matching", "mjp_matching"}
# Attacks that no row of the table below names. What a later attack claims is held by ``adapts_to_what_it_claims``.
NEVER = {"april_min_norm", "body_newton", "gauss_newton", "network_degraded", "token_imprint"}
NEVER |= {"concentrated_label", "concentrated_thumbnail"}
NEVER |= {name for name in ATTACKS if name.startswith("breaching_")}
CLAIMING = {"april", "first_mlp", "first_mlp_patches", "first_mlp_positions", "gradvit", "patch_embedding"}
CLAIMING |= {"patch_embedding_wiener", ENTRIES} | READ_FACTS | MATCH


@pytest.mark.parametrize(
    ("name", "defences", "adapted"),
    [
        ("deit_tiny", "none", set()),
        ("deit_tiny", "mjp", READ_FACTS | {"mjp_matching"}),
        ("deit_tiny", "mjp:shuffle=false", READ_FACTS | MATCH | {"gradvit"}),
        ("deit_tiny", ["mjp", "clip"], READ_FACTS),
        *(
            ("deit_tiny", ["mjp", each], READ_FACTS)
            for each in ("gaussian", "gaussian:noise=0.3", "laplace", "round", "local_dp", "dp_sgd")
        ),
        *(("deit_tiny", ["mjp", each], set()) for each in ("prune", "quantise", "sign", "soteria")),
        ("deit_tiny", ["mjp", "gaussian", "prune"], set()),
        ("deit_tiny", ["mjp", "secure_sum:clients=2"], set()),
        ("deit_tiny", ["mjp", "withhold:roles=position_embedding"], set()),
        ("deit_tiny", ["mjp", "withhold:roles=head"], READ_FACTS),
        ("deit_tiny", "jigsaw", set()),
        ("deit_tiny", ["jigsaw", "gaussian"], set()),
        ("deit_tiny", "gaussian", READ_FACTS | {"patch_embedding_wiener", ENTRIES}),
        ("deit_tiny", "clip", READ_FACTS | {"patch_embedding", "patch_embedding_wiener", ENTRIES}),
        (
            "deit_tiny_april",
            "round:precision=bfloat16",
            {"april", "mjp_intersection", "mjp_prior", "patch_embedding_wiener", ENTRIES},
        ),
        ("deit_tiny_april", ["mjp", "round"], {"mjp_intersection", "mjp_prior"}),
        # With as many patches as dimensions no equation is left over to tell the noise by.
        ("deit_micro", "gaussian", {ENTRIES}),
        ("deit_micro", ["mjp", "round"], set()),
        ("deit_micro", "round", {"patch_embedding_wiener", ENTRIES}),
        *(("deit_tiny", each, {ENTRIES}) for each in ("prune", "quantise", "sign")),
        ("deit_tiny", "withhold:roles=patch_embedding", {"first_mlp", "first_mlp_positions"}),
        ("deit_tiny", "withhold:roles=position_embedding", {"first_mlp", "first_mlp_patches"}),
        ("deit_micro", ["mjp", "clip"], {"mjp_intersection", "mjp_prior"}),
    ],
    ids=lambda value: None if isinstance(value, set) else str(value),  # sets have no order
)
def test_an_attack_is_adapted_where_it_takes_all_that_was_done_into_account(
    name: str, defences: object, adapted: set[str]
) -> None:
    scenario = small_scenario(name, defences=defences, clients=2)
    model = blueprint(scenario.network)
    attacks = {each: ATTACKS.get(each)() for each in CLAIMING | NEVER}
    found = {each for each, made in attacks.items() if made.adapted(scenario.pipeline, model, scenario.threat)}
    assert found == adapted


@pytest.mark.parametrize("name", sorted(MATCH))
def test_what_optimises_does_not_claim_more_than_it_can(name: str) -> None:
    checks = {each.__name__: each for each in CHECKS}
    trial = AttackTrial(ATTACKS.get(name)(QUICK[name]), "deit_tiny")
    for check in ("adapts_to_what_it_claims", "refuses_sums_and_what_is_withheld"):
        checks[check](trial)


def test_matching_is_adapted_to_mjp_only_where_it_runs_the_network_with_the_mask(defended: VitClassifier) -> None:
    masked = "mjp:shuffle=false"
    one, two = small_scenario(defences=masked), small_scenario(defences=masked, pictures_per_client=2, batch_size=2)
    reading, naive = GradientMatching(), GradientMatching({"mask": "ignore"})
    assert reading.adapted(one.pipeline, defended, one.threat)
    assert not reading.adapted(two.pipeline, defended, two.threat), "masks of a batch cannot be told apart"
    assert not naive.adapted(one.pipeline, defended, one.threat)
    shuffled = small_scenario(defences="mjp")
    assert not reading.adapted(shuffled.pipeline, defended, shuffled.threat), "it finds the shuffled picture"
    assert reading.adapted(shuffled.pipeline, defended, shuffled.threat, besides=frozenset({"shuffled"}))
    hidden = small_scenario(defences=["mjp", "gaussian", "prune"])
    assert not reading.adapted(hidden.pipeline, defended, hidden.threat)
    assert "without a mask" in (reading.caveat(defended, hidden.threat) or "")


@pytest.mark.parametrize("role", ["patch_embedding", "position_embedding", "head"])
def test_what_is_withheld_is_refused_before_there_is_an_upload(role: str, defended: VitClassifier) -> None:
    threat = ThreatModel.parse({"defences": f"withhold:roles={role}"})
    missing = {"head": names.HEAD_BIAS, "patch_embedding": names.PATCH_WEIGHT}.get(role, names.POSITION_EMBEDDING)
    told = GradientMatching().refusal(defended, threat) or ""
    assert "which withhold withholds" in told
    assert missing in told
    assert Grey().refusal(defended, threat) is None, "it reads nothing"


class Dice(Grey):
    """A random attack, to see where its randomness comes from."""

    def reconstruct_stack(
        self,
        uploads: Sequence[Upload],
        model: VitClassifier,
        threat: ThreatModel,
        *,
        generators: Sequence[torch.Generator],
    ) -> list[Reconstruction]:
        return [Reconstruction(torch.rand(1, 3, 64, 64, generator=generator)) for generator in generators]

    def tensors(self, model: VitClassifier) -> list[str]:
        return [names.PATCH_BIAS]


def test_a_random_attack_does_not_depend_on_the_rest_of_the_stack(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel
) -> None:
    uploads = [upload_of(undefended, batch_of(pictures, Picture.CLEAN, index)) for index in range(2)]
    stack = Dice().run(uploads, undefended, threat, generator=torch.Generator().manual_seed(5))
    alone = Dice().run(uploads[1:], undefended, threat, generator=torch.Generator().manual_seed(5))
    other = Dice().run(uploads[1:], undefended, threat, generator=torch.Generator().manual_seed(6))
    assert torch.equal(stack[1].images, alone[0].images)
    assert not torch.equal(stack[0].images, stack[1].images)
    assert not torch.equal(alone[0].images, other[0].images)


def test_upload_without_a_needed_tensor_is_named(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(undefended, batch_of(pictures, Picture.CLEAN))
    rest = {key: value for key, value in upload.tensors.items() if key != names.PATCH_WEIGHT}
    broken = Upload(rest, "gradient", 1, 1, 0, "weights")
    with pytest.raises(AttackNotApplicableError, match=r"no tensor 'backbone\.patch_embed\.proj\.weight'"):
        ATTACKS.get("patch_embedding")().run([broken], undefended, threat, generator=generator)


def test_upload_of_another_model_is_named(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(undefended, batch_of(pictures, Picture.CLEAN))
    cut = {**upload.tensors, names.POSITION_EMBEDDING: upload.tensors[names.POSITION_EMBEDDING][:, :10]}
    with pytest.raises(AttackNotApplicableError, match=r"shape \(1, 10, 192\)"):
        ATTACKS.get("patch_embedding")().run(
            [Upload(cut, "gradient", 1, 1, 0, "weights")], undefended, threat, generator=generator
        )


def test_unknown_attack_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="april"):
        ATTACKS.get("apirl")


def test_a_reconstruction_with_nan_is_no_reconstruction() -> None:
    with pytest.raises(RecordError, match="NaN"):
        Reconstruction(torch.full((1, 3, 8, 8), float("nan")))


EXAMPLES = sorted(path for path in (ROOT / "attacks").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_of_docstrings_run(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert doctest.testmod(importlib.import_module(f"fedmjp.{module}")).failed == 0
