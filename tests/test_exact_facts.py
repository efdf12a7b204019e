"""What linear algebra says about MJP's gradients, checked on small real models."""

import pytest
import torch

from fedmjp.attacks import ATTACKS
from fedmjp.data.selection import Selection
from fedmjp.metrics import METRICS
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import gradient
from tests.conftest import batch_of, small_model, upload_of


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("version", list(Picture))
def test_masked_rows_of_the_position_gradient_are_exactly_zero_and_reveal_the_mask(
    defended: VitClassifier, pictures: Selection, index: int, version: Picture
) -> None:
    batch = batch_of(pictures, version, index)
    rows = gradient(defended, batch)[names.POSITION_EMBEDDING][0, 1:]
    assert torch.equal((rows == 0).all(dim=1), batch.mask[0])


@pytest.mark.parametrize("index", range(4))
def test_the_shuffle_is_invisible_in_the_gradient(defended: VitClassifier, pictures: Selection, index: int) -> None:
    clean = gradient(defended, batch_of(pictures, Picture.CLEAN, index))
    shuffled = gradient(defended, batch_of(pictures, Picture.SHUFFLED, index))
    for name, tensor in clean.items():
        assert relative_difference(shuffled[name], tensor) < 2e-5, name


def test_the_shuffle_is_visible_without_the_unknown_embedding(undefended: VitClassifier, pictures: Selection) -> None:
    clean = gradient(undefended, batch_of(pictures, Picture.CLEAN))
    shuffled = gradient(undefended, batch_of(pictures, Picture.SHUFFLED))
    assert relative_difference(shuffled[names.PATCH_WEIGHT], clean[names.PATCH_WEIGHT]) > 2e-4


def test_the_unknown_embeddings_gradient_is_the_sum_over_the_masked_tokens(pictures: Selection) -> None:
    model = small_model(defence="mjp").double()
    batch = batch_of(pictures, Picture.SHUFFLED)
    positions = model.masked_position_embedding(batch.mask).detach().requires_grad_()
    images = (batch.shuffled.double() - model.mean) / model.std
    logits = torch.func.functional_call(model.backbone, {"pos_embed": positions}, (images,))
    per_token = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, batch.labels), positions)[0][0, 1:]

    loss = torch.nn.functional.cross_entropy(model(batch.shuffled.double(), batch.mask), batch.labels)
    unknown = torch.autograd.grad(loss, model.unknown_embedding)[0]
    assert relative_difference(per_token[batch.mask[0]].sum(0), unknown) < 1e-12


@pytest.mark.parametrize("index", range(4))
def test_patch_embedding_inverts_an_undefended_gradient_exactly_in_float64(
    pictures: Selection, threat: ThreatModel, generator: torch.Generator, index: int
) -> None:
    model = small_model().double()
    batch = batch_of(pictures, Picture.CLEAN, index)
    loss = torch.nn.functional.cross_entropy(model(batch.clean.double()), batch.labels)
    named = dict(model.named_parameters())
    gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    upload = Upload(gradients, "gradient", 1, 1, 0, "weights")
    made = ATTACKS.get("patch_embedding")().run([upload], model, threat, generator=generator)[0]
    # What is left is the rounding of the picture itself to float32, 6e-8 of full scale.
    assert (made.images - batch.clean).abs().max() < 2e-7


def test_patch_embedding_beats_60_db_undefended_and_fails_naively_on_masked_uploads(
    undefended: VitClassifier,
    defended: VitClassifier,
    pictures: Selection,
    threat: ThreatModel,
    generator: torch.Generator,
) -> None:
    attack = ATTACKS.get("patch_embedding")()
    psnr = METRICS["psnr"].function
    for index in range(4):
        batch = batch_of(pictures, Picture.SHUFFLED, index)
        for model, holds in ((undefended, lambda value: value > 60), (defended, lambda value: value < 25)):
            made = attack.run([upload_of(model, batch)], model, threat, generator=generator)[0]
            assert holds(psnr(made.images, batch.shuffled).item()), (batch.pictures, model.defended)


def test_the_naive_reading_of_an_empty_mask_is_exact(
    defended: VitClassifier, pictures: Selection, threat: ThreatModel, generator: torch.Generator
) -> None:
    batch = batch_of(pictures, Picture.SHUFFLED, mask_ratio=0.0)
    made = ATTACKS.get("patch_embedding")().run([upload_of(defended, batch)], defended, threat, generator=generator)[0]
    assert made.diagnostics["masked_patches"] == 0
    assert METRICS["psnr"].function(made.images, batch.clean).item() > 60
