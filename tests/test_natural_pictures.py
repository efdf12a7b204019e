"""The prior of whole pictures: against its windows written out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.attacks.natural_patches import patch_statistics
from fedmjp.attacks.natural_pictures import FLOOR, WINDOW, NaturalPictures
from fedmjp.config import ModelConfig
from fedmjp.errors import AttackNotApplicableError
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import from_patches, to_patches


def _energy_of_all_windows(image: Tensor, model: VitClassifier) -> Tensor:
    """Of (3, size, size), less the mean: mean over the windows of the picture and its mirror images."""
    _, covariance = patch_statistics(model.image_size, WINDOW)
    variances, directions = torch.linalg.eigh(covariance)
    precision = directions @ torch.diag(1 / variances.clamp(min=FLOOR)) @ directions.T
    pixels = image * model.std.flatten()[:, None, None].double()
    mirrored = torch.cat([pixels, pixels.flip(1)], dim=1)
    mirrored = torch.cat([mirrored, mirrored.flip(2)], dim=2)
    windows = F.unfold(F.pad(mirrored[None], (0, WINDOW - 1, 0, WINDOW - 1), mode="circular"), WINDOW)[0]
    return (windows * (precision @ windows)).sum() / (4 * WINDOW**2)


def test_slope_is_half_the_gradient_of_the_energy_of_all_windows() -> None:
    model = build_vit(ModelConfig(name="deit_tiny", image_size=32, patch_size=4))
    image = torch.randn(3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (gradient,) = torch.autograd.grad(_energy_of_all_windows(image, model), image)
    slope = NaturalPictures.for_model(model).slope(image.detach().float())
    assert (slope - gradient / 2).norm() < 1e-5 * slope.norm()


@pytest.mark.parametrize(("down", "right"), [(0, 0), (0, 1), (-1, 2), (2, -1), (3, 0)])
def test_precision_between_patches_is_what_one_does_to_the_slope_at_the_other(
    undefended: VitClassifier, down: int, right: int
) -> None:
    prior = NaturalPictures.for_model(undefended)
    patches = torch.zeros(1, 64, 192)
    value, here, there = 77, 3 * 8 + 3, (3 + down) * 8 + 3 + right  # far from the borders
    patches[0, here, value] = 1.0
    seen = to_patches(prior.slope(from_patches(patches, 64, 8)[0])[None], 8)[0]
    row = prior.between_patches(8, down, right)[value]
    assert torch.allclose(seen[there], row, atol=1e-5 * float(seen.abs().max()))
    assert bool(row.any()) == (max(abs(down), abs(right)) <= prior.reach(8))


def test_a_size_without_statistics_is_refused() -> None:
    model = build_vit(ModelConfig(name="deit_tiny", image_size=48, patch_size=8))
    with pytest.raises(AttackNotApplicableError, match="none for image size 48"):
        NaturalPictures.for_model(model)
