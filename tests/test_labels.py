"""Labels from the head's bias gradient."""

from dataclasses import replace

import pytest
import torch

from fedmjp.attacks.labels import labels_of
from fedmjp.data.selection import Selection
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models import names
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import delta
from tests.conftest import batch_of, small_model, upload_of


def upload_of_logits(logits: torch.Tensor, labels: list[int], smoothing: float = 0.0) -> Upload:
    """The head-bias gradient of mean cross-entropy at these logits, by autograd."""
    bias = torch.zeros(logits.shape[1], requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits + bias, torch.tensor(labels), label_smoothing=smoothing)
    return Upload({names.HEAD_BIAS: torch.autograd.grad(loss, bias)[0]}, "gradient", len(labels), 1, 0, "w")


@pytest.mark.parametrize("index", range(4))
def test_a_single_label_is_always_found(undefended: VitClassifier, pictures: Selection, index: int) -> None:
    batch = batch_of(pictures, Picture.CLEAN, index)
    found = labels_of(upload_of(undefended, batch), undefended, ThreatModel())
    assert found == tuple(batch.labels.tolist())


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_labels_of_batches_with_repeats_are_found_while_predictions_are_unsure(scale: float, smoothing: float) -> None:
    random, model = torch.Generator().manual_seed(0), small_model()
    for size in range(1, 9):
        labels = torch.randint(0, 5, (size,), generator=random).tolist()
        logits = scale * torch.randn(size, 1000, generator=random)
        upload = upload_of_logits(logits, labels, smoothing)
        stated = ThreatModel(batch_size=size, label_smoothing=smoothing)
        assert labels_of(upload, model, stated) == tuple(sorted(labels))


@pytest.mark.parametrize("factor", [65536.0, 8.0, 0.5, 0.1, 0.003])
@pytest.mark.parametrize("classes", [10, 100])
def test_a_factor_on_the_loss_changes_no_label(factor: float, classes: int) -> None:
    """Clipping, accumulation, sums and loss scales multiply the gradient: an upload of the plain mean is the oracle."""
    random, model = torch.Generator().manual_seed(1), small_model()
    for labels in ([4], [3, 3, 1, 7], [3, 3, 3, 1, 1, 7, 7, 9]):
        upload = upload_of_logits(0.3 * torch.randn(len(labels), classes, generator=random), labels)
        scaled = replace(upload, tensors={name: factor * tensor for name, tensor in upload.tensors.items()})
        threat = ThreatModel(batch_size=len(labels))
        assert labels_of(upload, model, threat) == labels_of(scaled, model, threat) == tuple(sorted(labels))


def test_labels_of_confident_predictions_are_given_to_classes_that_occur() -> None:
    logits = torch.zeros(6, 100)
    labels = [3, 3, 3, 3, 5, 8]
    logits[torch.arange(6), torch.tensor(labels)] = 7.0
    assert labels_of(upload_of_logits(logits, labels), small_model(), ThreatModel(batch_size=6)) == tuple(labels)


def test_labels_of_a_delta_are_found(undefended: VitClassifier, pictures: Selection) -> None:
    batch = batch_of(pictures, Picture.CLEAN)
    threat = ThreatModel(update="delta", local_steps=3, local_learning_rate=0.05)
    upload = Upload(delta(undefended, batch, steps=3, learning_rate=0.05), "delta", 1, 1, 0, "w")
    assert labels_of(upload, undefended, threat) == tuple(batch.labels.tolist())


def test_noise_is_not_taken_for_a_label() -> None:
    upload = upload_of_logits(torch.zeros(2, 1000), [5, 5])
    noisy = upload.tensors[names.HEAD_BIAS].clone()
    noisy[7] -= 1e-2
    found = labels_of(
        Upload({names.HEAD_BIAS: noisy}, "gradient", 2, 1, 0, "w"), small_model(), ThreatModel(batch_size=2)
    )
    assert found == (5, 5)


def test_labels_that_were_told_are_taken() -> None:
    upload = Upload({"any": torch.ones(1)}, "gradient", 3, 1, 0, "w", labels=(5, 1, 5))
    assert labels_of(upload, small_model(), ThreatModel(batch_size=3, labels_known=True)) == (1, 5, 5)


def test_an_upload_without_the_heads_bias_is_refused() -> None:
    upload = Upload({"any": torch.ones(1)}, "gradient", 1, 1, 0, "w")
    with pytest.raises(AttackNotApplicableError, match="recover them from"):
        labels_of(upload, small_model(), ThreatModel())
