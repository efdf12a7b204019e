"""The linear facts of one MJP upload, and the identity of several, in float64."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fedmjp.attacks.mjp.affine import of_several_uploads
from fedmjp.attacks.mjp.facts import LinearFacts, linear_facts, refusal
from fedmjp.attacks.mjp.linking import link
from fedmjp.config import ModelConfig
from fedmjp.data.selection import Selection, select_for
from fedmjp.errors import AttackFailedError
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import delta
from tests.attacks import protected
from tests.conftest import batch_of, private_batch, small_model, upload_of

EXACT = 1e-6


def in_double(model: VitClassifier, batch: PrivateBatch) -> Upload:
    """The upload of a batch, computed in float64."""
    model = model.double()
    images = batch.version(batch.gradient_of).double()
    mask = batch.mask if model.defended else None
    loss = torch.nn.functional.cross_entropy(model(images, mask), batch.labels)
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()))
    return Upload(dict(zip(named, gradients, strict=True)), "gradient", 1, 1, 0, "weights")


def true_patches(model: VitClassifier, batch: PrivateBatch) -> Tensor:
    return to_patches((batch.clean.double() - model.mean.double()) / model.std.double(), model.patch_size)[0]


def outside_of(facts: LinearFacts, patches: Tensor) -> Tensor:
    return patches - patches @ facts.basis.mT @ facts.basis


def unstated(facts: LinearFacts, patches: Tensor) -> Tensor:
    """What the upload states wrongly of the patches."""
    return patches - patches @ facts.open.mT @ facts.open - facts.stated


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("version", list(Picture))
def test_facts_hold_for_the_clean_picture_at_the_true_places(pictures: Selection, version: Picture, index: int) -> None:
    model, batch = small_model(defence="mjp"), batch_of(pictures, version, index)
    facts = linear_facts(in_double(model, batch), model)
    patches, mask = true_patches(model, batch), batch.mask[0]
    assert torch.equal(facts.mask, mask)
    # The span, against an independent one from the private patches themselves.
    span = torch.linalg.svd(patches[mask], full_matrices=False).Vh
    assert torch.linalg.matrix_norm(facts.basis.mT @ facts.basis - span.mT @ span) < EXACT
    assert (outside_of(facts, patches) - facts.outside).abs().max() < EXACT
    assert (patches[mask] @ facts.level - 1).abs().max() < EXACT
    # Along the level nothing is open, of visible patches either.
    assert len(facts.open) == len(facts.basis) - 1
    assert unstated(facts, patches).abs().max() < EXACT


def test_facts_hold_for_a_weight_delta_of_several_steps(pictures: Selection) -> None:
    model, batch = small_model(defence="mjp").double(), batch_of(pictures, Picture.SHUFFLED)
    wide = SimpleNamespace(**{**vars(batch), "targets": batch.targets, "version": lambda _: batch.shuffled.double()})
    upload = Upload(delta(model, wide, steps=3, learning_rate=0.01), "delta", 1, 1, 0, "weights")
    facts, patches = linear_facts(upload, model), true_patches(model, batch)
    assert torch.equal(facts.mask, batch.mask[0])
    assert (outside_of(facts, patches) - facts.outside).abs().max() < EXACT
    assert (patches[batch.mask[0]] @ facts.level - 1).abs().max() < EXACT


def test_without_a_mask_the_facts_are_the_picture(pictures: Selection) -> None:
    model, batch = small_model(), batch_of(pictures, Picture.CLEAN)
    facts = linear_facts(in_double(model, batch), model)
    assert not facts.mask.any()
    assert facts.basis.shape == (0, 192)
    assert (facts.outside - true_patches(model, batch)).abs().max() < EXACT


@pytest.mark.parametrize("uploads", [2, 3])
def test_several_uploads_leave_open_the_differences_of_what_all_masked(pictures: Selection, uploads: int) -> None:
    picture = pictures.load(pictures.entries[1])
    batches = [
        private_batch([picture], grid=8, mask_ratio=0.5, gradient_of=Picture.SHUFFLED, seed=0, number=number)
        for number in range(uploads)
    ]
    models = [small_model(defence="mjp", seed=seed) for seed in range(uploads)]  # weights move in between
    pairs = zip(models, batches, strict=True)
    affine = of_several_uploads([linear_facts(in_double(model, batch), model) for model, batch in pairs])
    patches = true_patches(models[0], batches[0])
    always = torch.cat([batch.mask for batch in batches]).all(dim=0)
    assert len(affine.basis) == int(always.sum()) - 1 > 0
    differences = patches[always] - patches[always][0]
    assert (differences - differences @ affine.basis.mT @ affine.basis).abs().max() < EXACT
    assert (patches - patches @ affine.basis.mT @ affine.basis - affine.fixed).abs().max() < EXACT


@pytest.mark.parametrize("index", range(4))
def test_the_expected_error_is_of_the_size_of_the_error(
    defended: VitClassifier, pictures: Selection, index: int
) -> None:
    batch = batch_of(pictures, Picture.SHUFFLED, index)
    facts = linear_facts(upload_of(defended, batch), defended)
    error = unstated(facts, true_patches(defended, batch))[~facts.mask].square().mean()
    assert 0.1 < error / facts.variance[~facts.mask].mean() < 30
    # White over the patches it is so, too.
    shown = ~facts.mask
    root = torch.linalg.cholesky(facts.covariance[shown][:, shown])
    white = torch.linalg.solve_triangular(root, unstated(facts, true_patches(defended, batch))[shown], upper=False)
    assert 0.1 < white.square().mean() < 30


def test_the_mask_is_read_through_noise(defended: VitClassifier, pictures: Selection) -> None:
    batch = batch_of(pictures, Picture.SHUFFLED)
    threat = ThreatModel(defences="gaussian:noise=0.001")
    upload = protected(upload_of(defended, batch), defended, threat)
    assert not linear_facts(upload, defended).mask.any()
    assert torch.equal(linear_facts(upload, defended, threat).mask, batch.mask[0])


def test_equal_patches_do_no_harm(defended: VitClassifier, pictures: Selection) -> None:
    batch = batch_of(pictures, Picture.CLEAN)
    sky = batch.clean.clone()
    sky[..., :32, :] = 1.0  # half of the picture saturated: patches that depend on each other
    batch = PrivateBatch(**{**vars(batch), "clean": sky, "shuffled": sky})
    facts = linear_facts(in_double(small_model(defence="mjp"), batch), defended)
    patches = true_patches(defended, batch)
    assert (outside_of(facts, patches) - facts.outside).abs().max() < EXACT


def test_an_upload_with_every_patch_masked_states_nothing(defended: VitClassifier, pictures: Selection) -> None:
    upload = upload_of(defended, batch_of(pictures, Picture.CLEAN))
    silent = dict(upload.tensors)
    silent[names.POSITION_EMBEDDING] = torch.zeros_like(silent[names.POSITION_EMBEDDING])
    with pytest.raises(AttackFailedError, match="every patch is masked"):
        linear_facts(Upload(silent, "gradient", 1, 1, 0, "weights"), defended)


def test_a_model_with_more_patches_than_dimensions_is_refused() -> None:
    model = build_vit(ModelConfig(name="deit_tiny"))
    assert "196 patches are more than the 192 dimensions" in (refusal(model, ThreatModel()) or "")


@pytest.fixture(scope="module")
def square() -> tuple[VitClassifier, list[PrivateBatch]]:
    """A model of as many dimensions as patches, 64, and one picture under several masks."""
    scenario = Scenario.parse({"model": {"name": "deit_micro", "image_size": 32, "patch_size": 4}, "defences": "mjp"})
    selection = select_for(scenario)
    picture = selection.load(selection.entries[0])
    batches = [
        private_batch([picture], grid=8, mask_ratio=0.27, gradient_of=Picture.SHUFFLED, seed=0, number=number)
        for number in range(2)
    ]
    return build_vit(scenario.network), batches


def test_of_as_many_patches_as_dimensions_one_product_is_unknown(
    square: tuple[VitClassifier, list[PrivateBatch]],
) -> None:
    model, batches = square
    for batch in batches:
        facts = linear_facts(upload_of(model, batch), model)
        patches = true_patches(model, batch)
        wrong = facts.stated - (patches - patches @ facts.open.mT @ facts.open)
        singular = torch.linalg.svdvals(wrong)
        assert (facts.errs, len(facts.open)) == (1, int(batch.mask.sum()) - 1)
        assert singular[0] > 10 * singular[1]


def test_where_noise_hides_the_empty_dimension_nothing_is_said_of_it_and_nothing_is_joined(
    square: tuple[VitClassifier, list[PrivateBatch]],
) -> None:
    model, batches = square
    noise = torch.Generator().manual_seed(0)
    facts = []
    for batch in batches:
        upload = upload_of(model, batch)
        disturbed = {
            name: tensor * (1 + 1e-3 * torch.randn(tensor.shape, generator=noise))
            for name, tensor in upload.tensors.items()
        }
        facts.append(linear_facts(replace(upload, tensors=disturbed), model))
    assert all(each.covariance.isinf().all() and each.leak.diagonal().isinf().all() for each in facts)
    assert link(facts).same == [0]


def test_nearly_flat_patches_leave_open_all_that_they_span(defended: VitClassifier, pictures: Selection) -> None:
    """Their small singular values, after a wide gap, are no rounding that repeats itself."""
    batch = batch_of(pictures, Picture.CLEAN)
    masked = batch.mask[0].view(8, 8).repeat_interleave(8, 0).repeat_interleave(8, 1)
    sky = 0.02 + 0.01 * torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    image = torch.where(masked, sky, batch.clean)
    facts = linear_facts(upload_of(defended, replace(batch, clean=image, shuffled=image)), defended)
    assert len(facts.open) == int(batch.mask.sum()) - 1
