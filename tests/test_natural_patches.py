"""The prior of natural patches: against slow statistics, and against pictures that it was not measured on."""

import json

import pytest
import torch

from fedmjp.attacks.held_out import MEASURED, measured_on
from fedmjp.attacks.linear_systems import GaussianPrior, posterior_mean
from fedmjp.attacks.natural_patches import (
    TABLE,
    NaturalPatches,
    patch_covariance,
    prior_refusal,
)
from fedmjp.config import ModelConfig
from fedmjp.data.selection import Selection
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from tests.studies import load_study

autocovariance = load_study("natural_patches/study.py").autocovariance


def test_autocovariance_equals_a_loop_over_pixel_pairs() -> None:
    images = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    measured = autocovariance(images, 2)
    both = torch.cat([images, images.flip(-1)])  # with mirror images
    centred = both - both.mean(dim=(0, 2, 3), keepdim=True)
    for channel, other, down, right in ((0, 0, 0, 0), (0, 1, 1, 2), (2, 1, 2, -1), (1, 1, -2, -2)):
        rows, columns = range(max(0, -down), 6 - max(0, down)), range(max(0, -right), 6 - max(0, right))
        products = [
            centred[:, channel, row, column] * centred[:, other, row + down, column + right]
            for row in rows
            for column in columns
        ]
        assert measured[channel, other, 2 + down, 2 + right] == pytest.approx(float(torch.stack(products).mean()))


def test_covariance_of_a_patch_follows_its_pixel_order() -> None:
    table = torch.randn(3, 3, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
    table[:, :, 3, 3] += torch.eye(3)  # far from singular, so that nothing is lifted
    table = (table + table.transpose(0, 1).flip(-1, -2)) / 2
    covariance = patch_covariance(table, 4)
    pixels = [(channel, row, column) for channel in range(3) for row in range(4) for column in range(4)]
    for first in (0, 17, 47):
        for second in (0, 5, 33):
            (c, y, x), (d, v, u) = pixels[first], pixels[second]
            assert covariance[first, second] == pytest.approx(float(table[c, d, 3 + v - y, 3 + u - x]), abs=1e-12)


def test_the_prior_is_valid_and_describes_pictures_that_it_was_not_measured_on(
    undefended: VitClassifier, pictures: Selection
) -> None:
    prior = NaturalPatches.for_model(undefended)
    variances = torch.linalg.eigvalsh(prior.covariance)
    assert variances.min() > 0
    images = torch.stack([pictures.load(entry).image for entry in pictures.entries])
    patches = to_patches(images, 8).reshape(-1, 192).double() - prior.mean
    energy = (patches * torch.linalg.solve(prior.covariance, patches.T).T).sum(1).mean() / 192
    white = torch.eye(192, dtype=torch.float64) * prior.covariance.diagonal().mean()
    gain = 0.5 * (torch.logdet(white) - torch.logdet(prior.covariance)) / 192  # nats per pixel over white noise
    assert 0.1 < energy < 3
    assert gain > 1


def test_provenance_names_the_pictures_and_none_of_them_may_be_attacked() -> None:
    about = json.loads(MEASURED.read_text())
    assert len(about["pictures"]) == len(set(about["pictures"])) == 300
    assert measured_on(f"val/some-class/{about['pictures'][0]}")
    assert measured_on(f"renamed/{about['pictures'][0].rpartition('.')[0]}.png")
    assert not measured_on("cat")
    assert not measured_on("cat", "0" * 64)
    assert measured_on("cat", about["sha256"]["64"][0] + "0" * 48)
    assert TABLE.stat().st_size < 200_000


@pytest.mark.parametrize(("size", "patch"), [(224, 16), (224, 14), (64, 8), (64, 16), (32, 4), (128, 16)])
def test_there_is_a_prior_for_usual_sizes(size: int, patch: int) -> None:
    model = build_vit(ModelConfig(name="deit_tiny", image_size=size, patch_size=patch))
    assert prior_refusal(model) is None
    assert NaturalPatches.for_model(model).covariance.shape == (3 * patch**2, 3 * patch**2)


@pytest.mark.parametrize(
    ("size", "patch", "reason"), [(48, 8, "none for image size 48"), (64, 32, "up to patch size 16, not 32")]
)
def test_other_sizes_are_refused_with_a_reason(size: int, patch: int, reason: str) -> None:
    model = build_vit(ModelConfig(name="deit_tiny", image_size=size, patch_size=patch))
    assert reason in (prior_refusal(model) or "")


def test_posterior_mean_equals_the_textbook_formula() -> None:
    random = torch.Generator().manual_seed(0)
    unknowns, equations, values = 5, 12, 4
    rows = torch.randn(unknowns, equations, dtype=torch.float64, generator=random)
    root = torch.randn(values, values, dtype=torch.float64, generator=random)
    prior = GaussianPrior(torch.randn(values, dtype=torch.float64, generator=random), root @ root.T)
    truth = prior.mean + torch.randn(unknowns, values, dtype=torch.float64, generator=random) @ root.T
    right = rows.T @ truth + 0.3 * torch.randn(equations, values, dtype=torch.float64, generator=random)
    estimate = posterior_mean(rows[None], right[None], prior, rounding=1e-16)
    # The same noise for every value, as estimated along each eigenvector, in one dense system.
    _, directions = torch.linalg.eigh(prior.covariance)
    rotated = (right - rows.sum(0)[:, None] * prior.mean) @ directions
    outside = rotated - rows.T @ torch.linalg.lstsq(rows.T, rotated).solution
    noise = directions @ torch.diag(outside.square().sum(0) / (equations - unknowns)) @ directions.T
    design = torch.kron(rows.T.contiguous(), torch.eye(values, dtype=torch.float64))
    spread = torch.kron(torch.eye(unknowns, dtype=torch.float64), prior.covariance)
    total = design @ spread @ design.T + torch.kron(torch.eye(equations, dtype=torch.float64), noise)
    centred = (right - rows.sum(0)[:, None] * prior.mean).reshape(-1)
    expected = prior.mean + (spread @ design.T @ torch.linalg.solve(total, centred)).reshape(unknowns, values)
    assert torch.allclose(estimate.values[0], expected, atol=1e-9)


def test_noise_is_estimated_from_the_right_hand_side_alone() -> None:
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 20, 200, dtype=torch.float64, generator=random)
    prior = GaussianPrior(torch.zeros(30, dtype=torch.float64), torch.eye(30, dtype=torch.float64))
    clean = rows.mT @ torch.randn(1, 20, 30, dtype=torch.float64, generator=random)
    for level in (1e-6, 1e-2):
        noise = level * clean.square().mean().sqrt() * torch.randn(clean.shape, dtype=torch.float64, generator=random)
        assert float(posterior_mean(rows, clean + noise, prior, 1e-16).noise) == pytest.approx(level, rel=0.1)
