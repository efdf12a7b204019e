"""The most natural picture that agrees with MJP uploads, and the attack that shows it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedmjp.attacks.mjp.affine import AffinePatches, of_one_upload
from fedmjp.attacks.mjp.choice import gradient_distance
from fedmjp.attacks.mjp.closing import close, flatten
from fedmjp.attacks.mjp.facts import linear_facts
from fedmjp.attacks.mjp.prior import MjpPrior
from fedmjp.attacks.natural_pictures import NaturalPictures
from fedmjp.attacks.patch_embedding import PatchEmbeddingAttack
from fedmjp.config import ModelConfig
from fedmjp.data.selection import Selection
from fedmjp.errors import AttackNotApplicableError
from fedmjp.metrics import METRICS
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import from_patches, to_patches
from fedmjp.records import Upload
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from tests.conftest import batch_of, upload_of

PSNR = METRICS["psnr"].function


@pytest.fixture(scope="module")
def tiny() -> VitClassifier:
    return build_vit(ModelConfig(name="deit_tiny", image_size=32, patch_size=8))  # 16 patches of 192 values


@pytest.fixture(scope="module")
def opened() -> AffinePatches:
    """A random picture of which every patch lacks five numbers."""
    random = torch.Generator().manual_seed(0)
    patches = torch.randn(16, 192, dtype=torch.float64, generator=random)
    basis = torch.linalg.qr(torch.randn(192, 5, dtype=torch.float64, generator=random))[0].mT.contiguous()
    return AffinePatches(patches - (patches @ basis.mT) @ basis, basis)


def _slope(patches: Tensor, model: VitClassifier) -> Tensor:
    prior = NaturalPictures.for_model(model)
    image = from_patches(patches[None].float(), 32, 8)[0]
    return to_patches(prior.slope(image)[None], 8)[0].double()


def _dense(affine: AffinePatches, model: VitClassifier) -> Tensor:
    """The coefficients by one dense system."""
    units = torch.eye(16 * 5, dtype=torch.float64).reshape(80, 16, 5)
    system = torch.stack([(_slope(unit @ affine.basis, model) @ affine.basis.mT).reshape(-1) for unit in units])
    mean = NaturalPictures.for_model(model).mean.double().repeat_interleave(64)
    right = -(_slope(affine.fixed - mean, model) @ affine.basis.mT).reshape(-1)
    return torch.linalg.solve(system, right).reshape(16, 5)


def test_close_equals_the_dense_system(opened: AffinePatches, tiny: VitClassifier) -> None:
    coefficients = (close(opened, tiny) - opened.fixed) @ opened.basis.mT
    expected = _dense(opened, tiny)
    assert (coefficients - expected).norm() < 5e-3 * expected.norm()


def test_close_keeps_what_is_known(opened: AffinePatches, tiny: VitClassifier) -> None:
    closed = close(opened, tiny)
    assert torch.allclose(closed - (closed @ opened.basis.mT) @ opened.basis, opened.fixed, atol=1e-12)


def test_close_finds_a_picture_where_every_value_is_open(tiny: VitClassifier) -> None:
    nothing = AffinePatches(torch.zeros(16, 192).double(), torch.eye(192).double())
    mean = NaturalPictures.for_model(tiny).mean.double().repeat_interleave(64)
    assert (close(nothing, tiny) - mean).abs().max() < 0.05


def test_close_returns_what_is_known_where_nothing_is_open(opened: AffinePatches, tiny: VitClassifier) -> None:
    assert close(AffinePatches(opened.fixed, opened.basis[:0]), tiny) is opened.fixed


def test_close_is_near_the_clean_picture(defended: VitClassifier, pictures: Selection) -> None:
    gained = []
    for index in range(4):
        batch = batch_of(pictures, Picture.SHUFFLED, index)
        facts = linear_facts(upload_of(defended, batch), defended)
        truth = to_patches((batch.clean - defended.mean) / defended.std, 8)[0].double()
        error = (close(of_one_upload(facts), defended) - truth).square().mean()
        gained.append(float(10 * torch.log10((facts.outside - truth).square().mean() / error)))
    assert min(gained) > 1
    assert sum(gained) / 4 > 3


def test_mjp_prior_shows_the_clean_picture_of_a_shuffled_upload(
    defended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    batches = [batch_of(pictures, Picture.SHUFFLED, index) for index in range(4)]
    made = MjpPrior().run([upload_of(defended, batch) for batch in batches], defended, threat, generator=generator)
    clean = torch.cat([batch.clean for batch in batches])
    shuffled = torch.cat([batch.shuffled for batch in batches])
    images = torch.cat([each.images for each in made])
    grey = float(PSNR(torch.full_like(clean, 0.45), clean).mean())
    assert PSNR(images, clean).mean() > grey + 3
    assert PSNR(images, clean).mean() > PSNR(images, shuffled).mean() + 1
    for each, batch in zip(made, batches, strict=True):
        assert each.diagnostics["masked_patches"] == batch.mask.sum()
        assert 0 < each.diagnostics["contrast"] < 1
        assert 0.1 < each.diagnostics["energy_per_value"] < 10
        assert each.diagnostics["closed_flat"] == each.diagnostics["closed_naive"] == 0


def test_mjp_prior_is_patch_embedding_without_a_mask(
    undefended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    upload = upload_of(undefended, batch_of(pictures, Picture.CLEAN))
    ours, theirs = (
        attack.run([upload], undefended, threat, generator=generator)[0].images
        for attack in (MjpPrior(), PatchEmbeddingAttack())
    )
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_mjp_prior_refuses_batches(defended: VitClassifier, generator: torch.Generator) -> None:
    with pytest.raises(AttackNotApplicableError, match="uploads of one picture: of 2"):
        MjpPrior().run([], defended, ThreatModel(batch_size=2), generator=generator)


@pytest.mark.parametrize("squares", [0, 4])
def test_pictures_of_one_patch_over_and_over_leave_nothing_open(
    defended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator, squares: int
) -> None:
    """Masked patches that are all the same span one direction, and a level speaks of it."""
    rows = torch.arange(64)
    board = (rows[:, None] // squares + rows // squares) % 2 if squares else torch.ones(64, 64)
    batch = batch_of(pictures, Picture.CLEAN)
    image = board.float().expand(1, 3, 64, 64).clone()
    upload = upload_of(defended, replace(batch, clean=image, shuffled=image))
    made = MjpPrior().run([upload], defended, threat, generator=generator)[0]
    assert PSNR(made.images, image) > 50


def _of(image: Tensor, model: VitClassifier, pictures: Selection) -> tuple[Upload, Tensor]:
    """The upload of another picture (3, 64, 64), under a mask that is returned as well."""
    batch = batch_of(pictures, Picture.CLEAN)
    return upload_of(model, replace(batch, clean=image[None], shuffled=image[None])), batch.mask[0]


def test_a_drawing_leaves_as_much_open_as_its_masked_patches_differ(
    defended: VitClassifier, pictures: Selection
) -> None:
    rows = torch.arange(64)
    disc = ((rows[:, None] - 30).square() + (rows - 35).square() < 400).float().expand(3, 64, 64)
    upload, mask = _of(disc, defended, pictures)
    kinds = len(to_patches(disc[None], 8)[0][mask].unique(dim=0))
    assert 2 < kinds < mask.sum()
    assert len(linear_facts(upload, defended).open) == kinds - 1


def test_flatten_lets_edges_stand(defended: VitClassifier, pictures: Selection, generator: torch.Generator) -> None:
    mosaic = torch.rand(3, 13, 13, generator=generator).repeat_interleave(5, 1).repeat_interleave(5, 2)[:, :64, :64]
    affine = of_one_upload(linear_facts(_of(mosaic, defended, pictures)[0], defended))
    natural = close(affine, defended)
    flat = flatten(affine, natural, defended)
    truth = to_patches((mosaic[None] - defended.mean) / defended.std, 8)[0].double()
    assert (flat - truth).norm() < 0.8 * (natural - truth).norm()
    assert torch.allclose(flat - (flat @ affine.basis.mT) @ affine.basis, affine.fixed, atol=1e-9)


def test_the_picture_itself_has_the_nearest_gradient(
    defended: VitClassifier, pictures: Selection, threat: ThreatModel
) -> None:
    """Without its label told: a wrong one would turn the gradient."""
    for index in range(4):
        batch = batch_of(pictures, Picture.CLEAN, index)
        upload, mask = upload_of(defended, batch), batch.mask[0]
        assert gradient_distance(batch.clean, mask, upload, defended, threat) < 1e-5
        assert gradient_distance(batch.clean.flip(-1), mask, upload, defended, threat) > 1e-2


def test_where_no_prior_explains_an_upload_the_naive_picture_may(
    defended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    rows = torch.arange(64) // 8
    upload, _ = _of(((rows[:, None] + rows) % 2).float().expand(3, 64, 64), defended, pictures)
    ours, naive = (
        attack.run([upload], defended, threat, generator=generator)[0]
        for attack in (MjpPrior(), PatchEmbeddingAttack())
    )
    assert ours.diagnostics["closed_naive"] == 1
    assert torch.allclose(ours.images, naive.images, atol=1e-5)
