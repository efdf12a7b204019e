"""Defences: the contract that all of them keep, and each against something that we did not write."""

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.func import functional_call

from fedmjp.defences import DEFENCES
from fedmjp.defences.accounting import composed_epsilon
from fedmjp.defences.base import Client, Defence, Drawn
from fedmjp.defences.gaussian import Gaussian
from fedmjp.defences.jigsaw import Jigsaw
from fedmjp.defences.pipeline import DefenceConfig, Pipeline
from fedmjp.defences.soteria import telling_features
from fedmjp.defences.testing import CHECKS, ConformanceError, Trial
from fedmjp.defences.withhold import Withhold
from fedmjp.errors import ConfigError, DefenceError
from fedmjp.models.classifier import VitClassifier
from fedmjp.randomness import Randomness, SeededRandomness, SystemRandomness

OPACUS = json.loads((Path(__file__).parent / "golden" / "opacus_figures.json").read_text())
CLIENT = Client("gradient")
SEEDED = SeededRandomness(0)


def make(name: str, **options: Any) -> Defence:
    return DEFENCES.get(name)(options)


def protect(name: str, update: Mapping[str, Tensor], seed: int = 0, **options: Any) -> dict[str, Tensor]:
    return make(name, **options).protect(update, CLIENT, randomness=SeededRandomness(seed))


def pipeline(*texts: str) -> Pipeline:
    return Pipeline(tuple(DefenceConfig.model_validate(text) for text in texts))


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TRIALS = [
    *DEFENCES,
    "withhold:roles=head",
    "withhold:roles=body",
    "round:precision=bfloat16",
    "prune:kept=1",
    "quantise:bits=16",
    "local_dp:clipping_norm=100,epsilon=1,rounds=10",
]


@pytest.mark.parametrize("text", TRIALS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Trial], None], text: str) -> None:
    check(Trial(DefenceConfig.model_validate(text).build()))


class _Broken(Gaussian):
    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        made = super().protect(update, client, randomness=randomness)
        return self.breaks(dict(update), made)

    def breaks(self, update: dict[str, Tensor], made: dict[str, Tensor]) -> dict[str, Tensor]:
        return made


class _InPlace(_Broken):
    def breaks(self, update: dict[str, Tensor], made: dict[str, Tensor]) -> dict[str, Tensor]:
        update["large"] += 1
        return made


class _Global(_Broken):
    def breaks(self, update: dict[str, Tensor], made: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**made, "large": made["large"] + torch.rand(())}


class _Drops(_Broken):
    def breaks(self, update: dict[str, Tensor], made: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in made.items() if name != "heavy"}


class _Casts(_Broken):
    def breaks(self, update: dict[str, Tensor], made: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(torch.float16) for name, tensor in made.items()}


class _SkipsScalars(_Broken):
    scope: ClassVar = "update"

    def breaks(self, update: dict[str, Tensor], made: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor if tensor.dim() else update[name] for name, tensor in made.items()}


class _HidesNaN(Gaussian):
    def protect(self, update: Mapping[str, Tensor], client: Client, *, randomness: Randomness) -> dict[str, Tensor]:
        mended = {name: torch.nan_to_num(t, posinf=0) if t.is_floating_point() else t for name, t in update.items()}
        return super().protect(mended, client, randomness=randomness)


class _Divides(_Broken):
    def breaks(self, update: dict[str, Tensor], made: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**made, "large": made["large"] / made["large"].abs().max()}


class _DrawsInSecret(Gaussian):
    draws: ClassVar = False


class _Understates(Gaussian):
    def noise_on(self, uploaded: Tensor) -> float:
        return super().noise_on(uploaded) / 2


class _SeesTheWhole(_Broken):
    def breaks(self, update: dict[str, Tensor], made: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor * len(update) if tensor.is_floating_point() else tensor for name, tensor in made.items()}


class _DrawsAnother(Jigsaw):
    def ahead(self, grid: int, *, randomness: Sequence[Randomness]) -> Drawn | None:
        return super().ahead(grid, randomness=[source.of("another") for source in randomness])


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        ("changes_nothing_that_it_is_given", _InPlace),
        ("changes_nothing_that_it_is_given", _Global),
        ("is_deterministic", _Global),
        ("is_deterministic", _DrawsInSecret),
        ("keeps_layout", _Drops),
        ("keeps_layout", _Casts),
        ("protects_scalars", _SkipsScalars),
        ("hides_no_broken_numbers", _HidesNaN),
        ("survives_zeros", _Divides),
        ("adds_the_noise_that_it_states", _Understates),
        ("protects_parts_as_the_whole", _SeesTheWhole),
        ("draws_ahead_what_it_arranges", _DrawsAnother),
    ],
)
def test_the_suite_finds_what_is_broken(check: str, broken: type[Defence]) -> None:
    found = next(each for each in CHECKS if each.__name__ == check)
    with pytest.raises(ConformanceError):
        found(Trial(broken()))


BAD = [
    ("gaussian:noise=0", "noise"),
    ("laplace:noise=inf", "noise"),
    ("clip:norm=0", "norm"),
    ("clip:norm=nan", "norm"),
    ("prune:kept=0", "kept"),
    ("prune:kept=1.1", "kept"),
    ("round:precision=float8", "precision"),
    ("quantise:bits=1", "bits"),
    ("quantise:bits=17", "bits"),
    ("local_dp:epsilon=0", "epsilon"),
    ("local_dp:epsilon=-1", "epsilon"),
    ("local_dp:delta=0", "delta"),
    ("local_dp:delta=1", "delta"),
    ("local_dp:clipping_norm=0", "clipping_norm"),
    ("local_dp:rounds=0", "rounds"),
    ("local_dp:epsilon=1e308", "epsilon"),
    ("dp_sgd:sampling_rate=0.01", "unknown key 'sampling_rate'"),
    ("dp_sgd:steps=0", "steps"),
    ("soteria:pruned=1", "pruned"),
    ("secure_sum:clients=1", "clients"),
    ("withhold:roles=", "roles"),
    ("withhold:roles=neck", "roles"),
    ("withhold:roles=head+head", "each once"),
    ("withhold:roles=head+body", "nothing would leave"),
    ("sign:bits=1", "unknown key"),
    ("clip:nrom=1", "did you mean 'norm'"),
]


@pytest.mark.parametrize(("text", "named"), BAD)
def test_an_option_out_of_range_is_refused_in_one_line(text: str, named: str) -> None:
    name, _, pairs = text.partition(":")
    options = dict(pair.split("=", 1) for pair in pairs.split(","))
    with pytest.raises(ConfigError) as error:
        make(name, **options)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (("secure_sum", "clip"), "no client can change the sum"),
        (("local_dp", "soteria"), "guarantee"),
        (("dp_sgd", "soteria"), "guarantee"),
        (("clip", "soteria"), "the head's own gradient"),
        (("round", "soteria"), "the head's own gradient"),
        (("clip", "clip:norm=2"), "named twice"),
    ],
)
def test_orders_that_make_no_sense_are_refused_with_the_reason(texts: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        pipeline(*texts)


@pytest.mark.parametrize(
    "texts",
    [
        ("local_dp", "clip"),
        ("local_dp", "round"),
        ("dp_sgd", "local_dp"),
        ("withhold", "sign"),
        ("withhold", "soteria"),
        ("mjp", "soteria", "local_dp"),
        ("prune", "gaussian", "round"),
        ("clip", "secure_sum"),
    ],
)
def test_orders_that_make_sense_are_allowed(texts: tuple[str, ...]) -> None:
    assert [each.name for each in pipeline(*texts).defences] == list(texts)


def test_clipping_equals_torchs_own() -> None:
    update = {"a": normals(40, 30), "b": normals(7, seed=1), "c": torch.tensor(3.0), "n": torch.tensor([5])}
    parameters = [torch.nn.Parameter(torch.zeros_like(update[name])) for name in "abc"]
    for parameter, name in zip(parameters, "abc", strict=True):
        parameter.grad = update[name].clone()
    torch.nn.utils.clip_grad_norm_(parameters, 2.5)
    clipped = protect("clip", update, norm=2.5)
    for parameter, name in zip(parameters, "abc", strict=True):
        torch.testing.assert_close(clipped[name], parameter.grad, rtol=1e-5, atol=0)
    assert torch.equal(clipped["n"], update["n"])


def test_a_short_update_passes_the_clipping_as_it_is() -> None:
    update = {"a": normals(40), "n": torch.tensor(10**6)}
    assert torch.equal(protect("clip", update, norm=1e3)["a"], update["a"])


@pytest.mark.parametrize(("name", "law"), [("gaussian", stats.norm()), ("laplace", stats.laplace(scale=0.5**0.5))])
def test_relative_noise_follows_its_law(name: str, law: Any) -> None:
    update = {"w": 3 * normals(200_000)}
    rms = float(update["w"].square().mean().sqrt())
    noise = (protect(name, update, noise=0.1)["w"].double() - update["w"].double()) / (0.1 * rms)
    assert stats.kstest(noise.numpy(), law.cdf).pvalue > 1e-3


class _Extreme(SeededRandomness):
    def uniform(self, name: str, shape: Any) -> Tensor:
        return torch.tensor([0.0, 0.5, 1 - 2.0**-24])


def test_laplace_noise_is_finite_for_every_uniform_value() -> None:
    noise = make("laplace", noise=1.0).protect({"w": torch.ones(3)}, CLIENT, randomness=_Extreme(0))["w"] - 1
    assert torch.isfinite(noise).all()
    assert float(noise[0]) == pytest.approx(-float(noise[2]), rel=1e-6)
    assert float(noise[0]) == pytest.approx(stats.laplace(scale=0.5**0.5).ppf(2.0**-25), rel=1e-4)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.999])
def test_pruning_keeps_the_largest_entries_as_they_are(kept: float) -> None:
    update = {"matrix": normals(40, 30), "vector": normals(500, seed=1) ** 3, "zeros": torch.zeros(7)}
    pruned = protect("prune", update, kept=kept)
    for name in ("matrix", "vector"):
        before, after = update[name].flatten().numpy(), pruned[name].flatten().numpy()
        largest = np.argsort(-np.abs(before), kind="stable")[: round(kept * before.size)]
        assert set(np.flatnonzero(after)) == set(largest)
        np.testing.assert_array_equal(after[largest], before[largest])
    assert not pruned["zeros"].any()


def test_bits_after_pruning_are_the_entropy_of_what_is_left() -> None:
    assert make("prune", kept=0.1).bits(32.0) == pytest.approx(3.2 + stats.bernoulli(0.1).entropy() / math.log(2))


@pytest.mark.parametrize(("precision", "bits"), [("float16", 11), ("bfloat16", 8)])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e5])
def test_rounded_entries_have_the_bits_of_their_precision(precision: str, bits: int, scale: float) -> None:
    update = {"w": scale * normals(40, 30)}
    rounded = protect("round", update, precision=precision)["w"]
    mantissas, _ = np.frexp(rounded.numpy())
    assert (mantissas * 2.0**bits == np.round(mantissas * 2.0**bits)).all()
    error = (rounded - update["w"]).abs()
    finest = float(update["w"].abs().max()) * 2.0**-38  # a scaled float16 ends there
    assert (error <= make("round", precision=precision).rounding * update["w"].abs() + finest).all()


@given(st.floats(1e-44, 1e30), st.sampled_from(["float16", "bfloat16"]))
def test_rounding_never_leaves_the_range(largest: float, precision: str) -> None:
    rounded = protect("round", {"w": torch.tensor([largest, -largest / 3, 0.0])}, precision=precision)["w"]
    assert rounded.isfinite().all()
    assert rounded[2] == 0


def test_no_defence_leaves_an_update_as_it_is() -> None:
    update = {"w": normals(40, 30)}
    assert torch.equal(pipeline().protect(update, CLIENT, randomness=SEEDED)["w"], update["w"])


def test_noise_after_pruning_is_of_the_stated_size_on_every_entry_of_what_is_left() -> None:
    update = {"w": torch.cat([torch.full((50_000,), 2.0), torch.full((50_000,), 1e-3)])}
    left = torch.tensor([2.0] * 50_000 + [0.0] * 50_000).double()
    both = pipeline("prune:kept=0.5", "gaussian:noise=0.1")
    noise = both.protect(update, CLIENT, randomness=SEEDED)["w"].double() - left
    assert float(noise.std()) == pytest.approx(0.1 * math.sqrt(2), rel=0.02)
    assert float((noise / noise.std()).pow(4).mean()) == pytest.approx(3, rel=0.05)
    assert not (noise == 0).any()


def test_a_pipeline_protects_a_part_as_the_whole_and_by_the_seed_alone() -> None:
    update = {"matrix": normals(40, 30), "vector": normals(500, seed=1) ** 3}
    all_three = pipeline("prune:kept=0.5", "gaussian:noise=0.1", "round:precision=float16")
    whole, again, other = (all_three.protect(update, CLIENT, randomness=SeededRandomness(seed)) for seed in (0, 0, 1))
    part = all_three.protect({"vector": update["vector"]}, CLIENT, randomness=SEEDED)
    assert torch.equal(part["vector"], whole["vector"])
    assert torch.equal(again["matrix"], whole["matrix"])
    assert not torch.equal(other["matrix"], whole["matrix"])


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_quantisation_has_its_levels_and_is_right_on_average(bits: int) -> None:
    update = {"w": torch.linspace(-1, 1, 41).repeat(2000) * 0.7}
    levels = 2 ** (bits - 1) - 1
    quantised = protect("quantise", update, bits=bits)["w"].double()
    steps = quantised / (0.7 / levels)
    assert float((steps - steps.round()).abs().max()) < 1e-2
    assert float(steps.abs().max()) == pytest.approx(levels, rel=1e-6)
    assert (steps - update["w"].double() / (0.7 / levels)).abs().max() < 1 + 1e-2
    # The variance of a stochastic rounding is p (1 - p) steps squared (Alistarh et al., Lemma 3.1).
    exact = np.linspace(-1, 1, 41) * levels
    p = np.abs(exact) - np.floor(np.abs(exact))
    deviation = np.sqrt(p * (1 - p) / 2000) + 1e-5
    means = steps.reshape(2000, 41).mean(dim=0).numpy()
    assert (np.abs(means - exact) < 4.5 * deviation + 1e-2 * (levels > 1000)).all()
    assert not quantised.reshape(2000, 41)[:, 20].any()


def test_signs_have_one_magnitude_per_tensor_which_minimises_the_error() -> None:
    update = {"w": normals(300), "v": 5 * normals(20, seed=1)}
    for name, tensor in protect("sign", update).items():
        assert torch.equal(tensor.sign(), update[name].sign())
        # The best scale in least squares: <x, sign x> / <sign x, sign x>.
        sign = update[name].sign()
        assert float(tensor.abs().max()) == pytest.approx(float(update[name] @ sign / (sign @ sign)), rel=1e-5)
        assert tensor.abs().unique().numel() == 1


ROLES = {
    "patch_embedding": frozenset({"p"}),
    "position_embedding": frozenset({"e"}),
    "head": frozenset({"h", "b"}),
    "body": frozenset({"p", "e", "w"}),
}


@pytest.mark.parametrize(
    ("roles", "left"),
    [("patch_embedding+position_embedding", "whb"), ("head", "pew"), ("body", "hb"), (["position_embedding"], "pwhb")],
)
def test_withheld_tensors_are_missing_and_the_others_untouched(roles: Any, left: str) -> None:
    update = {name: normals(3) for name in "pewhb"}
    defence = Withhold({"roles": roles})
    protected = defence.protect(update, Client("delta", roles=ROLES), randomness=SEEDED)
    assert list(protected) == [name for name in update if name in left]
    assert all(torch.equal(update[name], tensor) for name, tensor in protected.items())
    assert DefenceConfig.model_validate(
        DefenceConfig(name="withhold", options={"roles": roles}).text
    ).build().options == (defence.options)


@pytest.mark.parametrize(
    ("roles", "present", "reason"),
    [
        ("position_embedding", {**ROLES, "position_embedding": frozenset()}, "no tensors"),
        ("head", {}, "no tensors"),
        ("body", {"body": frozenset("pew"), "head": frozenset()}, "all that there is"),
    ],
)
def test_withholding_what_is_not_there_or_all_is_refused(roles: str, present: Any, reason: str) -> None:
    with pytest.raises(DefenceError, match=reason) as error:
        Withhold({"roles": roles}).withheld(present)
    assert "\n" not in str(error.value)


# Rounds and epsilon of a nominal (1, 1e-5) mechanism by the classic formula, counted for replaced data sets.
CLASSIC = math.sqrt(2 * math.log(1.25e5)) / 2


@pytest.mark.parametrize(("rounds", "epsilon"), [(1, 1.61), (10, 5.98), (100, 25.4)])
def test_epsilon_composes_as_privacy_loss_distributions_say(rounds: int, epsilon: float) -> None:
    ours = composed_epsilon(CLASSIC, 1e-5, rounds)
    assert ours == pytest.approx(epsilon, rel=5e-3)
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(CLASSIC), rounds))
    pld = accountant.get_epsilon(1e-5)
    assert ours <= pld <= ours * 1.003  # PLD rounds up


@pytest.mark.parametrize("case", OPACUS["accountants"], ids=lambda case: f"{case['steps']} at {case['rate']}")
def test_opacus_accountants_agree(case: Mapping[str, float]) -> None:
    ours = composed_epsilon(case["multiplier"], OPACUS["delta"], int(case["steps"]), case["rate"])
    assert ours <= case["rdp"] < 1.3 * ours
    assert case["prv"] == pytest.approx(ours, abs=0.02, rel=0.01)


def test_epsilon_with_sampling_is_that_of_privacy_loss_distributions() -> None:
    assert composed_epsilon(1.0, 1e-5, 1000, 0.01) == pytest.approx(1.828, abs=2e-3)


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.1, 1), (1.0, 1), (8.0, 1), (8.0, 50)])
def test_local_dp_costs_what_was_asked_and_no_less(epsilon: float, rounds: int) -> None:
    defence = make("local_dp", epsilon=epsilon, rounds=rounds, clipping_norm=3.0)
    accountant = PLDAccountant()
    sensitivity = 2 * 3.0  # a whole update exchanged for another
    deviation = defence.noise_on(torch.ones(2))
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(deviation / sensitivity), rounds))
    assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon, rel=5e-3)
    spent = defence.spent(rounds)
    assert spent is not None
    assert (spent.relation, spent.unit, spent.uploads) == ("replace-one", "client", rounds)
    assert spent.epsilon == pytest.approx(epsilon, rel=1e-6)


def test_local_dp_noise_is_that_of_its_calibration_on_every_entry() -> None:
    update = {"w": 5 * normals(100_000), "s": torch.tensor(4.0), "zeros": torch.zeros(100_000), "n": torch.tensor([3])}
    defence = make("local_dp", epsilon=8, clipping_norm=2.0)
    protected = defence.protect(update, CLIENT, randomness=SystemRandomness())
    clipped = protect("clip", update, norm=2.0)
    for name in ("w", "zeros"):
        noise = (protected[name] - clipped[name]) / defence.noise_on(protected[name])
        assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-4
    assert not protected["n"].any()


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_noise_of_the_system_is_finite_whatever_the_system_gives(monkeypatch: pytest.MonkeyPatch, byte: bytes) -> None:
    monkeypatch.setattr("os.urandom", lambda count: byte * count)
    assert 8 < abs(float(SystemRandomness().normal("x", (1,)))) < 9
    assert 0 <= float(SystemRandomness().uniform("x", (1,))) < 1


def test_the_clipping_norm_sets_the_noise() -> None:
    small, large = (make("local_dp", clipping_norm=norm).noise_on(torch.ones(1)) for norm in (1.0, 10.0))
    assert large == pytest.approx(10 * small)


def test_dp_sgd_clips_each_example_as_opacus_does() -> None:
    case = OPACUS["dp_sgd"]
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    weights = {name: torch.tensor(values) for name, values in case["weights"].items()}

    def loss(weights: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (one[None],)), label[None])

    single = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    gradients = single(weights, torch.tensor(case["inputs"]), torch.tensor(case["labels"]))
    ours = make("dp_sgd", epsilon=1e9, clipping_norm=case["norm"], batch_size=6)
    protected = ours.protect_examples(gradients, randomness=SEEDED)
    for name, values in case["gradient"].items():
        noise = 6 * ours.noise_on(protected[name])
        torch.testing.assert_close(protected[name], torch.tensor(values), rtol=1e-4, atol=max(1e-6, noise))


def test_dp_sgd_noise_is_on_the_sum_of_the_batch() -> None:
    defence = make("dp_sgd", epsilon=2, clipping_norm=3.0, batch_size=4, steps=5)
    protected = defence.protect_examples({"w": torch.zeros(4, 100_000)}, randomness=SEEDED)["w"]
    multiplier = float(protected.std()) * 4 / 3.0
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(multiplier), 5))
    assert accountant.get_epsilon(1e-5) == pytest.approx(2, rel=0.02)
    assert float(protected.std()) == pytest.approx(defence.noise_on(protected), rel=0.02)


def test_dp_sgd_counts_steps_and_refuses_more_pictures_than_it_divides_by() -> None:
    defence = make("dp_sgd", epsilon=2, steps=20, steps_per_upload=5)
    spent = defence.spent(4)
    assert spent is not None
    assert spent.epsilon == pytest.approx(2, rel=1e-6)
    assert (spent.relation, spent.unit) == ("add-or-remove-one", "picture")
    with pytest.raises(DefenceError, match="set it to 3"):
        defence.protect_examples({"w": torch.zeros(3, 2)}, randomness=SEEDED)


def _official_mask(features: Tensor, pictures: Tensor, percentile: float) -> np.ndarray[Any, Any]:
    """jeremy313/Soteria, DLG_attack/Defend_DLG.ipynb, with the paper's norm of the feature for the feature."""
    deviation = torch.zeros_like(features)
    for f in range(features.size(1)):
        target = torch.zeros_like(features)
        target[:, f] = 1
        (slope,) = torch.autograd.grad(features, pictures, target, retain_graph=True)
        deviation[:, f] = torch.norm(slope.view(slope.size(0), -1), dim=1) / features.data[:, f].abs()
    summed = deviation.detach().sum(axis=0)
    threshold = np.percentile(summed.flatten().numpy(), percentile)
    return np.where(abs(summed) < threshold, 0, 1)


@pytest.fixture(scope="module")
def tiny() -> VitClassifier:
    return Trial(Gaussian()).client().model


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_soteria_removes_the_features_that_the_official_code_removes(tiny: VitClassifier, share: float) -> None:
    pictures = normals(2, 3, 16, 16).sigmoid().requires_grad_()
    kept = _official_mask(tiny.features(pictures), pictures, 100 * share)
    removed = telling_features(tiny, pictures, None, share=share)
    assert removed.tolist() == (kept == 0).tolist()


def test_soteria_removes_columns_of_the_heads_weight_and_nothing_else(tiny: VitClassifier) -> None:
    trial = Trial(make("soteria", pruned=0.5))
    update, protected = trial.update(), trial.protected()
    assert trial.client().images is not None
    removed = telling_features(tiny, trial.client().images, None, share=0.5)
    for name, tensor in update.items():
        if name == "backbone.head.weight":
            assert not protected[name][:, removed].any()
            assert torch.equal(protected[name][:, ~removed], tensor[:, ~removed])
        else:
            assert torch.equal(protected[name], tensor)


def test_soteria_sees_the_mask_of_a_defended_model(tiny: VitClassifier) -> None:
    defended = VitClassifier(copy.deepcopy(tiny.backbone), defended=True)
    defended.unknown_embedding = torch.nn.Parameter(5 * normals(tiny.backbone.embed_dim))
    with torch.no_grad():
        defended.backbone.pos_embed.mul_(4)
    images, mask = normals(1, 3, 16, 16).sigmoid().requires_grad_(), torch.tensor([[True, True, False, True]])
    with_mask = telling_features(defended, images, mask, share=0.8)
    assert with_mask.tolist() == (_official_mask(defended.features(images, mask), images, 80) == 0).tolist()
    assert not torch.equal(with_mask, telling_features(defended, images, None, share=0.8))


def test_soteria_takes_many_pictures_in_parts(tiny: VitClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = normals(5, 3, 16, 16).sigmoid()
    at_once = telling_features(tiny, pictures, None, share=0.5)
    monkeypatch.setattr("fedmjp.defences.soteria.PICTURES", 2)
    assert torch.equal(telling_features(tiny, pictures, None, share=0.5), at_once)


def test_soteria_without_model_and_pictures_is_refused() -> None:
    with pytest.raises(DefenceError, match="a mod does not see"):
        protect("soteria", {"w": torch.ones(2, 2)})


def test_a_secure_sum_is_over_its_clients_and_changes_no_update() -> None:
    made = pipeline("clip", "secure_sum:clients=5")
    assert made.clients == 5
    assert "summed" in made.marks
    assert "ideal" in " ".join(each.told for each in made.defences)
