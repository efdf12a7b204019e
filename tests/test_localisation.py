"""Localisation (DAL) against a loop over pictures and patches, and against principal components by numpy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmjp.config import ModelConfig
from fedmjp.errors import BadInputError
from fedmjp.models.build import build
from fedmjp.models.localisation import LocalisationRegressor, grid_positions, localisation_loss
from fedmjp.seeds import scoped_randomness

SIDE, DIM = 5, 12


def draw(kind: str, layers: int = 3) -> tuple[LocalisationRegressor, Tensor]:
    with scoped_randomness(0):
        regressor = LocalisationRegressor(kind, DIM, layers=layers).double()  # type: ignore[arg-type]
    positions = torch.randn(SIDE**2, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return regressor, positions


def masks(*ratios: float) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.stack([torch.rand(SIDE**2, generator=generator) < ratio for ratio in ratios])


def slow_loss(regressor: LocalisationRegressor, positions: Tensor, mask: Tensor) -> float:
    """Eq. 2, one number after another."""
    losses = []
    for picture in mask.tolist():
        errors = []
        for patch, masked in enumerate(picture):
            if not masked:
                row, column = regressor(positions[patch : patch + 1])[0].tolist()
                errors += [abs(row - patch // SIDE), abs(column - patch % SIDE)]
        losses.append(sum(errors) / len(errors) if errors else 0.0)
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("kind", "layers"), [("linear", 3), ("nonlinear", 2), ("nonlinear", 3)])
@pytest.mark.parametrize("ratios", [(0.0,), (0.3,), (0.1, 0.5, 0.9), (1.0,), (1.0, 0.4)])
def test_loss_is_the_mean_over_pictures_of_the_mean_over_their_unmasked_patches(
    kind: str, layers: int, ratios: tuple[float, ...]
) -> None:
    regressor, positions = draw(kind, layers)
    mask = masks(*ratios)
    found = localisation_loss(regressor, positions, mask)
    assert found.item() == pytest.approx(slow_loss(regressor, positions, mask), rel=1e-12)


def test_without_a_mask_every_patch_counts() -> None:
    for kind in ("linear", "nonlinear"):
        regressor, positions = draw(kind)
        nothing = torch.zeros(1, SIDE**2, dtype=torch.bool)
        found = localisation_loss(regressor, positions, None)
        assert found.item() == pytest.approx(slow_loss(regressor, positions, nothing), rel=1e-12)


def test_masked_embeddings_get_no_gradient() -> None:
    regressor, positions = draw("nonlinear")
    positions.requires_grad_()
    mask = masks(0.4)
    localisation_loss(regressor, positions, mask).backward()
    assert positions.grad is not None
    assert torch.equal(positions.grad.abs().sum(dim=1) == 0, mask[0])


def test_pca_projects_on_the_first_two_principal_directions() -> None:
    regressor, positions = draw("pca")
    positions[:, 0] *= 20  # two directions that stand out, so that the approximation converges
    positions[:, 1] *= 8
    _, _, directions = np.linalg.svd((positions - positions.mean(dim=0)).numpy())
    with scoped_randomness(0):
        found = regressor(positions)
    expected = positions.numpy() @ directions[:2].T
    assert np.allclose(np.abs(found.numpy()), np.abs(expected), atol=1e-6)
    assert list(regressor.parameters()) == []


def test_pca_takes_the_unmasked_embeddings_of_each_picture_alone() -> None:
    regressor, positions = draw("pca")
    mask = torch.cat([masks(0.2, 0.6), torch.ones(1, SIDE**2, dtype=torch.bool)])
    with scoped_randomness(0):
        found = localisation_loss(regressor, positions, mask)
    with scoped_randomness(0):
        each = [
            (regressor(positions[~row]) - grid_positions(SIDE**2)[~row]).abs().mean()
            for row in mask[:2]  # too few embeddings have no principal directions
        ]
    assert found.item() == pytest.approx(float(torch.stack(each).mean()), rel=1e-12)
    with scoped_randomness(0):
        assert localisation_loss(regressor, positions, mask[2:]).item() == 0


def test_positions_are_rows_and_columns_from_zero() -> None:
    assert grid_positions(4).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    with pytest.raises(BadInputError, match="6 patches are no square grid"):
        grid_positions(6)


@pytest.mark.parametrize(("kind", "layers", "count"), [("linear", 3, 1), ("nonlinear", 2, 2), ("nonlinear", 3, 3)])
def test_layers_are_as_many_as_asked_for(kind: str, layers: int, count: int) -> None:
    regressor, _ = draw(kind, layers)
    assert sum(isinstance(module, torch.nn.Linear) for module in regressor.modules()) == count


@pytest.mark.parametrize(("name", "patch_size"), [("deit_micro", 8), ("swin_tiny", 4)])
def test_a_model_localises_its_patches_and_not_its_class_token(name: str, patch_size: int) -> None:
    sizes = {"image_size": 64, "patch_size": patch_size}
    model = build(ModelConfig.parse({"name": name, "unknown_embedding": True, "localisation": "linear", **sizes}))
    assert model.localisation is not None
    rows = dict(model.named_parameters())[f"backbone.{model.positions_name}"][0]  # type: ignore[attr-defined]
    patches = rows[1:] if name == "deit_micro" else rows
    assert len(patches) == model.grid**2
    mask = torch.rand(3, model.grid**2, generator=torch.Generator().manual_seed(0)) < 0.4
    expected = localisation_loss(model.localisation, patches, mask)
    assert model.localisation_loss(mask).item() == expected.item()
    model.localisation_loss(mask).backward()
    assert model.unknown_embedding is not None
    assert model.unknown_embedding.grad is None, "DAL reads no masked position"


@pytest.mark.parametrize("name", ["resnet50", "deit_micro"])
def test_models_without_a_regressor_say_so(name: str) -> None:
    model = build(ModelConfig(name=name, image_size=64, patch_size=16, classes=10))
    with pytest.raises(BadInputError, match="build it with localisation linear or nonlinear"):
        model.localisation_loss()
