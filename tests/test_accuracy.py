"""Accuracy against a loop over single pictures, and what must not be silently wrong."""

import math

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from fedmjp.data.loading import Batch
from fedmjp.errors import DataError
from fedmjp.models.classifier import VitClassifier
from fedmjp.training.accuracy import top1

CLASSES = 5


def small_classifier(*, seed: int = 0, drop: float = 0.0, defended: bool = False) -> VitClassifier:
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # noqa: TID251
        backbone = VisionTransformer(
            img_size=16, patch_size=2, num_classes=CLASSES, embed_dim=16, depth=2, num_heads=2, proj_drop_rate=drop
        )
        for parameter in backbone.parameters():  # as timm draws them, all logits would be nearly equal
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.5)
        backbone.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
        return VitClassifier(backbone, defended=defended)


def random_batches(*sizes: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(sum(sizes), 3, 16, 16, generator=generator).split(sizes)
    labels = torch.randint(CLASSES, (sum(sizes),), generator=generator).split(sizes)
    indices = [tuple(each.tolist()) for each in torch.arange(sum(sizes)).split(sizes)]
    return list(map(Batch, images, labels, indices))


def test_equals_a_loop_over_single_pictures():
    model, batches = small_classifier(), random_batches(7, 7, 3)
    losses, hits = [], 0
    for batch in batches:
        for image, label in zip(batch.images, batch.labels, strict=True):
            logits = model(image[None])[0].detach().numpy().astype(np.float64)
            hits += int(np.argmax(logits) == int(label))
            losses.append(-logits[label] + np.log(np.exp(logits).sum()))
    found = top1(model, batches)
    assert (found.correct, found.total, found.undecided) == (hits, 17, 0)
    assert 0 < hits < 17
    assert found.top1 == hits / 17
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_dropout_is_off_and_every_mode_is_put_back():
    model, batches = small_classifier(drop=0.5).train(), random_batches(20)
    model.backbone.norm.eval()  # frozen by whoever trains
    before = [module.training for module in model.modules()]
    assert top1(model, batches) == top1(model, batches)
    assert [module.training for module in model.modules()] == before
    assert model.training
    assert not model.backbone.norm.training


def test_the_mode_is_put_back_after_an_error():
    model = small_classifier().train()
    with pytest.raises(RuntimeError):
        top1(model, [Batch(torch.rand(1, 4, 16, 16), torch.tensor([0]), (0,))])
    assert model.training


def test_pictures_without_finite_logits_are_wrong_and_told():
    model = small_classifier()
    (batch,) = random_batches(6)
    finite = top1(model, [Batch(batch.images[1:], batch.labels[1:], batch.indices[1:])])
    batch.images[0] = math.nan
    batch.labels[0] = 0  # where argmax finds the first NaN
    found = top1(model, [batch])
    assert (found.undecided, found.total, found.correct) == (1, 6, finite.correct)
    assert found.loss == pytest.approx(finite.loss)


def test_a_model_that_decides_nothing_has_infinite_loss():
    (batch,) = random_batches(2)
    batch.images[:] = math.nan
    found = top1(small_classifier(), [batch])
    assert (found.correct, found.undecided, found.loss) == (0, 2, math.inf)


def test_no_picture_is_an_error():
    with pytest.raises(DataError, match="no picture to evaluate on"):
        top1(small_classifier(), [])
