"""Models: what the defence changes, what it does not, and that building leaves no trace."""

import pytest
import timm
import torch
from torch import nn

from fedmjp.config import ModelConfig
from fedmjp.errors import BadInputError, ConfigError, UnknownNameError
from fedmjp.models.build import ARCHITECTURES, build
from fedmjp.models.classifier import VitClassifier
from tests.conftest import SMALL, small_model


def test_defended_model_without_mask_equals_the_undefended_one(
    defended: VitClassifier, undefended: VitClassifier, generator: torch.Generator
) -> None:
    images = torch.rand(2, 3, 64, 64, generator=generator)
    assert torch.equal(defended(images), undefended(images))
    nothing = torch.zeros(2, 64, dtype=torch.bool)
    assert torch.equal(defended(images, nothing), undefended(images))


def test_undefended_model_is_timms_on_normalised_images(undefended: VitClassifier, generator: torch.Generator) -> None:
    timm_model = timm.create_model("deit_tiny_patch16_224", img_size=64, patch_size=8).eval()
    timm_model.load_state_dict(undefended.backbone.state_dict())
    images = torch.rand(2, 3, 64, 64, generator=generator)
    mean = torch.tensor(timm_model.default_cfg["mean"]).view(3, 1, 1)
    std = torch.tensor(timm_model.default_cfg["std"]).view(3, 1, 1)
    assert torch.allclose(undefended(images), timm_model((images - mean) / std))


def test_masked_tokens_get_the_unknown_embedding_per_picture(
    defended: VitClassifier, generator: torch.Generator
) -> None:
    mask = torch.rand(2, 64, generator=generator) < 0.3
    positions = defended.masked_position_embedding(mask)
    for picture in range(2):
        for patch in range(64):
            own = defended.backbone.pos_embed[0, patch + 1]
            expected = defended.unknown_embedding if mask[picture, patch] else own
            assert torch.equal(positions[picture, patch + 1], expected)
        assert torch.equal(positions[picture, 0], defended.backbone.pos_embed[0, 0])


def test_vit_small_is_deit_small_with_another_normalisation(generator: torch.Generator) -> None:
    vit, deit = small_model("vit_small"), small_model("deit_small")
    assert all(torch.equal(a, b) for a, b in zip(vit.parameters(), deit.parameters(), strict=True))
    pictures = torch.rand(1, 3, 64, 64, generator=generator)
    assert torch.allclose(vit(pictures), vit.backbone(2 * pictures - 1), atol=1e-6)
    assert torch.allclose(vit(pictures), deit(deit.std * (2 * pictures - 1) + deit.mean), atol=1e-5)


def test_mask_on_an_undefended_model_is_refused(undefended: VitClassifier) -> None:
    with pytest.raises(BadInputError, match="without an unknown position embedding"):
        undefended(torch.zeros(1, 3, 64, 64), torch.zeros(1, 64, dtype=torch.bool))


def test_april_model_computes_a_block_without_first_norm_and_residuals(generator: torch.Generator) -> None:
    april, plain = small_model("deit_tiny_april"), small_model("deit_tiny")
    block = plain.backbone.blocks[0]
    tokens = torch.rand(1, 65, 192, generator=generator)
    expected = block.mlp(block.norm2(block.attn(tokens)))
    assert torch.allclose(april.backbone.blocks[0](tokens), expected)
    assert not any("blocks.0.norm1" in name for name, _ in april.named_parameters())


def test_building_is_deterministic_and_leaves_torchs_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, second, other = small_model(seed=3), small_model(seed=3), small_model(seed=4)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.backbone.pos_embed, other.backbone.pos_embed)


def test_normalisation_is_no_part_of_the_weights(undefended: VitClassifier) -> None:
    assert {name for name, _ in undefended.named_parameters()} == set(undefended.state_dict())


def test_unknown_model_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="deit_small"):
        build(ModelConfig(name="deit_smal", **SMALL))


def test_patch_size_that_does_not_divide_the_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="225"):
        ModelConfig.parse({"name": "deit_tiny", "image_size": 225})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_listed_model_builds_and_answers(name: str) -> None:
    model = build(ModelConfig(name=name, **SMALL))
    assert isinstance(model, nn.Module)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
