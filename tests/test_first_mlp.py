"""first_mlp: all tokens from the first block alone, held against timm's own forward and backward pass."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.first_block.block import FC1_WEIGHT, FC2_WEIGHT, PROJ_WEIGHT, first_block, linear_of
from fedmjp.attacks.first_block.equations import Span, TokenEquations
from fedmjp.attacks.first_block.first_mlp import FirstMlp, FirstMlpPatches, FirstMlpPositions
from fedmjp.attacks.first_block.joint import JointCost
from fedmjp.attacks.first_block.places import TokenEmbedding, fill
from fedmjp.attacks.first_block.search import find_near, search
from fedmjp.attacks.first_block.starts import NaturalStarts
from fedmjp.attacks.first_block.tokens import PartialTokens, centred, class_token, entering
from fedmjp.attacks.mjp.affine import AffinePatches
from fedmjp.attacks.natural_pictures import NaturalPictures
from fedmjp.attacks.testing import CHECKS, AttackTrial
from fedmjp.config import ModelConfig
from fedmjp.data.selection import Selection
from fedmjp.errors import AttackFailedError
from fedmjp.metrics import metric
from fedmjp.models import names
from fedmjp.models.build import blueprint, build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import from_patches, to_patches
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import gradient
from tests.conftest import batch_of

WITHHELD = {
    "first_mlp": "patch_embedding+position_embedding",
    "first_mlp_positions": "patch_embedding",
    "first_mlp_patches": "position_embedding",
}
TINY = {"name": "deit_tiny", "image_size": 64, "patch_size": 16}  # 16 patches of 768 values, 192 dimensions


@dataclass(frozen=True)
class Truth:
    """What timm's own first block computed, and the slopes at its MLP's output, in float64."""

    entering: Tensor
    attended: Tensor
    whitened: Tensor
    slopes: Tensor
    projection: Tensor  # gradient of the attention's last weight
    equations: TokenEquations


def upload_of(model: VitClassifier, batch: PrivateBatch) -> Upload:
    return Upload(gradient(model, batch), "gradient", 1, 1, 0, "weights")


@pytest.fixture(scope="module")
def model() -> VitClassifier:
    return build_vit(ModelConfig.parse(TINY))


@pytest.fixture(scope="module")
def batch(pictures: Selection) -> PrivateBatch:
    return batch_of(pictures, Picture.CLEAN)


@pytest.fixture(scope="module")
def truth(batch: PrivateBatch) -> Truth:
    network = build_vit(ModelConfig.parse(TINY)).double()
    seen: dict[str, Tensor] = {}
    block = network.backbone.blocks[0]
    block.register_forward_pre_hook(lambda _, given: seen.update(entering=given[0][0]))
    block.norm2.register_forward_pre_hook(lambda _, given: seen.update(behind=given[0][0]))
    block.attn.proj.register_forward_pre_hook(lambda _, given: seen.update(attended=given[0][0]))
    block.mlp.register_full_backward_hook(lambda _, __, slopes: seen.update(slopes=slopes[0][0]))
    loss = torch.nn.functional.cross_entropy(network(batch.clean.double()), batch.labels)
    loss.backward()
    weights = [network.get_parameter(name).grad for name in (FC1_WEIGHT, FC2_WEIGHT, PROJ_WEIGHT)]
    for module in (block, block.norm2, block.attn.proj):
        module._forward_pre_hooks.clear()
    block.mlp._backward_hooks.clear()
    first, second, projection = (weight for weight in weights if weight is not None)
    equations = TokenEquations(first_block(network), linear_of(network, "0.mlp.fc2"), first, second, 17)
    whitened = equations.block.norm2.whiten(seen["behind"].detach())[0]
    return Truth(seen["entering"].detach(), seen["attended"].detach(), whitened, seen["slopes"], projection, equations)


def test_every_true_token_is_a_zero_that_states_its_own_slopes(truth: Truth) -> None:
    point = truth.equations.at(truth.whitened)
    assert (point.cost.sqrt() <= 1e-6 * point.activations.norm(dim=1)).all()
    slopes, _ = truth.equations.slopes(truth.whitened)
    assert ((slopes - truth.slopes).norm(dim=1) <= 1e-4 * truth.slopes.norm(dim=1)).all()


def test_what_is_taken_out_is_no_zero_any_more(truth: Truth) -> None:
    left = truth.equations.without(truth.whitened[:9])
    cost = left.at(truth.whitened).cost.sqrt() / left.at(truth.whitened).activations.norm(dim=1)
    assert cost[9:].max() < 1e-4 < 1e-2 < cost[:9].min()


def test_search_meets_every_token_and_algebra_leads_back_to_the_entrance(
    truth: Truth, model: VitClassifier, batch: PrivateBatch, generator: torch.Generator
) -> None:
    upload = upload_of(model, batch)
    gradients = {name: tensor.double() for name, tensor in upload.tensors.items()}
    equations = TokenEquations(
        first_block(model), linear_of(model, "0.mlp.fc2"), gradients[FC1_WEIGHT], gradients[FC2_WEIGHT], 17
    )
    all_tokens = search(equations, 10, 96, generator)
    assert all_tokens.proven == 17
    distances = torch.cdist(all_tokens.whitened, truth.whitened) / math.sqrt(192)
    assert sorted(distances.argmin(1).tolist()) == list(range(17))
    assert distances.amin(1).max() < 1e-3
    made = entering(model, gradients, all_tokens.whitened)
    errors = torch.cdist(made.tokens, centred(truth.entering)).amin(1) / centred(truth.entering).norm(dim=1).min()
    assert errors.max() < 1e-2
    misses = (made.attended - truth.attended[distances.argmin(1)]).norm(dim=1) / truth.attended.norm(dim=1).max()
    assert misses.max() < 1e-2


def test_tokens_that_were_met_lead_back_without_the_others(truth: Truth, model: VitClassifier) -> None:
    names_needed = {PROJ_WEIGHT: truth.projection}
    kept = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 10, 12, 13, 14, 16])  # the class token and twelve patches
    some = PartialTokens.of(truth.equations, names_needed, truth.whitened[kept], model)
    assert len(some.behind) == 12
    tokens, expected = some.entering(truth.entering[1:]), centred(truth.entering)[kept[1:]]
    assert ((tokens - expected).norm(dim=1) <= 1e-3 * expected.norm(dim=1)).all()
    # Those that are missing are found from near, and only those.
    missing = torch.tensor([3, 6, 11, 15])
    guesses = some.guesses(truth.entering[1:], missing - 1)
    assert torch.allclose(guesses, truth.whitened[missing], atol=1e-6)
    noise = torch.randn(guesses.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    known, every = truth.whitened[kept], torch.cat([guesses, truth.whitened[kept][:2]])
    new, of_guess = find_near(truth.equations, known, every + 0.1 * torch.cat([noise, noise[:2]]))
    assert sorted(of_guess.tolist()) == [0, 1, 2, 3]
    assert ((new - guesses[of_guess]).norm(dim=1) <= 1e-2 * math.sqrt(192)).all()


def test_what_fills_empty_places_has_no_slope_where_it_is_free(model: VitClassifier, batch: PrivateBatch) -> None:
    patches = to_patches((batch.clean.double() - model.mean.double()) / model.std.double(), 16)[0]
    basis = torch.linalg.qr(torch.randn(768, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0].mT
    missing = torch.zeros(16, dtype=torch.bool)
    missing[[5, 6, 9]] = True
    known = patches - patches @ basis.mT @ basis
    filled = fill(AffinePatches(known, basis), missing, model)
    assert torch.allclose((filled - known)[~missing] @ basis.mT @ basis, (filled - known)[~missing], atol=1e-5)
    prior = NaturalPictures.for_model(model)

    def slope(picture: Tensor) -> Tensor:
        image = from_patches(picture[None].float(), 64, 16)[0] - prior.mean[:, None, None]
        return to_patches(prior.slope(image)[None], 16)[0].double()

    grey = torch.where(missing[:, None], prior.mean.double().repeat_interleave(256), known)
    assert slope(filled)[missing].norm() <= 0.02 * slope(grey)[missing].norm()
    assert (slope(filled)[~missing] @ basis.mT).norm() <= 0.02 * (slope(grey)[~missing] @ basis.mT).norm()


def test_searches_start_at_tokens_of_unit_variance(model: VitClassifier, generator: torch.Generator) -> None:
    starts = NaturalStarts.of(model).draw(20, generator)
    assert starts.shape == (20, 192)
    assert torch.allclose(starts.var(1, correction=0), torch.ones(20, dtype=torch.float64), rtol=1e-3)
    assert starts.mean(1).abs().max() < 1e-9


def test_what_was_found_is_answered_and_nothing_is_told_as_such(
    model: VitClassifier, batch: PrivateBatch, generator: torch.Generator
) -> None:
    upload = upload_of(model, batch)
    attack = FirstMlpPositions({"rounds": 1, "starts": 8, "steps": 0})
    made = attack.run([upload], model, ThreatModel(), generator=generator)[0]
    assert 0 < made.diagnostics["tokens_met"] < 17
    assert made.images.shape == (1, 3, 64, 64)
    with pytest.raises(AttackFailedError, match="no token was met in 1e-06 seconds"):
        FirstMlp({"seconds": 1e-6}).run([upload], model, ThreatModel(), generator=generator)


def test_the_joint_searchs_derivatives_are_those_of_its_cost(
    truth: Truth, model: VitClassifier, batch: PrivateBatch
) -> None:
    entrance = TokenEmbedding.of(model)
    normalised = (batch.clean.double() - model.mean.double()) / model.std.double()
    patches = to_patches(normalised, 16)[0]
    few = torch.linalg.svd(patches, full_matrices=False)[2][:2]  # two directions per patch keep the matrix small
    prior = type(entrance.prior)(entrance.prior.mean @ few.mT, few @ entrance.prior.covariance @ few.mT)
    fixed = torch.cat([centred(class_token(model))[None], entrance.shift + entrance.positions])
    queries = Span.of(torch.randn(576, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 17)
    joint = JointCost(truth.equations, queries, entrance.weight @ few.mT, fixed, prior)
    start = patches @ few.mT * 1.1

    def residual_cost(values: Tensor) -> Tensor:
        block = truth.equations.block
        point = truth.equations.at(block.norm2.whiten(joint.attended(values))[0])
        outside = queries.remainder(block.norm1(joint.tokens(values)))[1:]
        moved = values - prior.mean
        return (point.cost.sum() + outside.square().sum() + (moved @ joint.precision * moved).sum()) / 2

    ones = torch.ones(17, dtype=torch.float64)
    matrix, slope = joint.normal(start, ones, ones)
    assert torch.allclose(slope, jacrev(residual_cost)(start).flatten(), rtol=1e-8, atol=1e-10)
    assert torch.linalg.eigvalsh(matrix).min() > 0


@pytest.mark.parametrize("name", list(WITHHELD))
def test_pictures_come_without_the_embeddings_that_are_withheld(
    name: str, model: VitClassifier, batch: PrivateBatch, generator: torch.Generator
) -> None:
    threat = ThreatModel(defences=(f"withhold:roles={WITHHELD[name]}",))
    upload = upload_of(model, batch)
    sent = {key: upload.tensors[key] for key in ATTACKS.get(name)().tensors(model)}
    attack = ATTACKS.get(name)()
    assert attack.adapted(threat.pipeline, model, threat)
    made = attack.run([Upload(sent, "gradient", 1, 1, 0, "weights")], model, threat, generator=generator)[0]
    assert made.diagnostics["tokens_certified"] == 1
    # 192 dimensions show a quarter of a patch's 768 values; only the patch embedding's gradient shows all.
    assert metric("psnr").function(made.images, batch.clean).item() > (60 if name == "first_mlp_patches" else 20)


def test_an_upload_of_another_picture_is_not_certified(
    model: VitClassifier, batch: PrivateBatch, pictures: Selection, generator: torch.Generator
) -> None:
    one, other = upload_of(model, batch), upload_of(model, batch_of(pictures, Picture.CLEAN, 1))
    last = "backbone.blocks.11."
    mixed = {name: (other if name.startswith(last) else one).tensors[name] for name in one.tensors}
    made = FirstMlpPatches({"steps": 0}).run(
        [Upload(mixed, "gradient", 1, 1, 0, "weights")], model, ThreatModel(), generator=generator
    )[0]
    assert made.diagnostics["tokens_certified"] == 0


def test_what_does_not_come_apart_is_refused_with_the_numbers() -> None:
    attack = FirstMlp()
    many = blueprint(ModelConfig.parse({"name": "deit_tiny"}))
    assert "197 tokens are not fewer than their 192 dimensions" in (attack.refusal(many, ThreatModel()) or "")
    small = blueprint(ModelConfig.parse(TINY))
    assert attack.refusal(small, ThreatModel()) is None
    assert "single picture" in (attack.refusal(small, ThreatModel(batch_size=2)) or "")
    withheld = ThreatModel(defences=("withhold:roles=head",))
    assert names.HEAD_BIAS in (attack.refusal(small, withheld) or "")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[AttackTrial], None]) -> None:
    """Of the variant that needs no prior, which takes long where patches have far more values than dimensions."""
    check(AttackTrial(FirstMlpPatches({"steps": 0}), "deit_micro", gain=None, tolerance=0.05, patch_size=16))


@pytest.mark.parametrize("name", ["first_mlp", "first_mlp_positions"])
def test_the_variants_read_what_they_declare_and_refuse_what_they_cannot(name: str) -> None:
    trial = AttackTrial(ATTACKS.get(name)({"steps": 0}), "deit_micro", gain=None, tolerance=0.05, patch_size=16)
    for check in CHECKS:
        if check.__name__.startswith(("reads", "refuses")):
            check(trial)
