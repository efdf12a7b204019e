"""Models: what the defence changes, what it does not, and that building leaves no trace."""

import pytest
import timm
import torch

from fedmjp.config import ModelConfig
from fedmjp.data.selection import Selection
from fedmjp.errors import BadInputError, ConfigError, UnknownNameError
from fedmjp.models.architectures import PARAMETERS
from fedmjp.models.build import ARCHITECTURES, architecture, blueprint, build, build_vit, parameter_count
from fedmjp.models.classifier import Classifier, VitClassifier
from fedmjp.settings import Picture
from fedmjp.updates import gradient
from tests.conftest import SMALL, private_batch, small_model


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
        build_vit(ModelConfig(name="deit_smal", **SMALL))


def test_patch_size_that_does_not_divide_the_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="225"):
        ModelConfig.parse({"name": "deit_tiny", "image_size": 225})


def config_of(name: str, defence: str = "none", **values: object) -> ModelConfig:
    patch_size = architecture(name).patch_size or 8
    masked = defence == "mjp"
    own = {"name": name, "unknown_embedding": masked, "image_size": 64, "patch_size": patch_size, "classes": 10}
    return ModelConfig.parse(own | values)


def draw(model: Classifier, count: int = 2) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pictures, and a mask for each where the model takes one."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 3, 64, 64, generator=generator)
    mask = torch.rand(count, model.grid**2, generator=generator) < 0.3 if model.defended else None
    return images, mask


@pytest.mark.parametrize("name", [*ARCHITECTURES, "timm:vit_tiny_patch16_224", "timm:vit_small_patch32_224"])
def test_every_model_answers_and_its_last_layer_reads_its_features(name: str) -> None:
    for defence in ("none", "mjp"):
        if defence == "mjp" and (name == "resnet50" or "positions" in name):
            continue
        model = build(config_of(name, defence))
        images, mask = draw(model)
        with torch.no_grad():
            logits, features = model(images, mask), model.features(images, mask)
        assert logits.shape == (2, 10)
        assert features.ndim == 2
        assert torch.allclose(model.logits(features), logits, atol=1e-6)
        assert parameter_count(config_of(name, defence)) == sum(p.numel() for p in model.parameters())


def test_parameters_are_as_many_as_are_listed() -> None:
    sizes = {name: known.patch_size or 16 for name, known in ARCHITECTURES.items()}
    counted = {name: parameter_count(ModelConfig(name=name, patch_size=size)) for name, size in sizes.items()}
    assert counted == PARAMETERS


@pytest.mark.parametrize("name", ["deit_micro", "swin_tiny", "timm:vit_tiny_patch16_224"])
def test_a_mask_for_the_batch_is_the_same_mask_for_every_picture(name: str) -> None:
    model = build(config_of(name, "mjp", index_embedding=True))
    images, masks = draw(model)
    assert masks is not None
    with torch.no_grad():
        for embedding in (model.index_embedding, model.unknown_embedding):
            embedding.normal_(generator=torch.Generator().manual_seed(1))
        assert torch.allclose(model(images, masks[:1]), model(images, masks[:1].expand(2, -1)), atol=1e-6)
        one_by_one = torch.cat([model(images[i : i + 1], masks[i : i + 1]) for i in range(2)])
        assert torch.allclose(model(images, masks), one_by_one, atol=1e-5)
        assert not torch.allclose(model(images, masks), model(images), atol=1e-3)


@pytest.mark.parametrize("name", ["deit_micro", "swin_tiny", "timm:vit_tiny_patch16_224"])
@pytest.mark.parametrize("added", [{}, {"localisation": "linear"}, {"localisation": "nonlinear"}])
def test_variants_share_what_they_share_for_the_same_seed(name: str, added: dict[str, str]) -> None:
    plain = build(config_of(name, seed=5)).state_dict()
    defended = build(config_of(name, "mjp", seed=5)).state_dict()
    varied = build(config_of(name, "mjp", seed=5, index_embedding=True, **added)).state_dict()
    assert plain.keys() <= defended.keys() <= varied.keys()
    for smaller, larger in ((plain, defended), (defended, varied)):
        assert all(torch.equal(weight, larger[each]) for each, weight in smaller.items())
    if name != "swin_tiny":
        undefended = build(config_of(name, seed=5, **added)).state_dict()
        assert all(torch.equal(weight, varied[each]) for each, weight in undefended.items())


def test_a_plain_swin_is_timms_own() -> None:
    model = build(config_of("swin_tiny"))
    own = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, num_classes=10).eval()
    own.load_state_dict(model.backbone.state_dict())
    images, _ = draw(model)
    with torch.no_grad():
        assert torch.allclose(model(images), own((images - model.mean) / model.std), atol=1e-6)


def test_swin_embeds_patches_positions_and_the_unknown_one_instead_of_masked_positions() -> None:
    """Against timm's own patch embedding, patch by patch."""
    plain, model = build(config_of("swin_tiny")), build(config_of("swin_tiny", "mjp"))
    images, mask = draw(model)
    assert mask is not None
    assert model.unknown_embedding is not None
    seen: list[torch.Tensor] = []
    model.backbone.layers.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(images, mask)
        expected = plain.backbone.patch_embed((images - model.mean) / model.std)
        for picture in range(2):
            for patch in range(256):
                row = model.backbone.patch_embed.pos_embed[0, patch]
                added = model.unknown_embedding if mask[picture, patch] else row
                expected[picture, patch // 16, patch % 16] += added
    assert torch.allclose(seen[0], expected, atol=1e-6)
    assert "backbone.patch_embed.pos_embed" in model.no_weight_decay()


def test_a_convolutional_model_is_timms_own() -> None:
    model = build(config_of("resnet50"), drop_path=0.1)
    assert not model.has_positions
    own = timm.create_model("resnet50", num_classes=10).eval()
    own.load_state_dict(model.backbone.state_dict())
    images, _ = draw(model)
    with torch.no_grad():
        assert torch.allclose(model(images), own((images - model.mean) / model.std), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "resnet50",
            {"defence": "mjp"},
            "no position embedding, which an unknown embedding needs: a jigsaw shuffles its patches",
        ),
        ("resnet50", {"localisation": "linear"}, "no position embedding, which localisation needs"),
        (
            "swin_tiny",
            {"localisation": "linear"},
            "with an unknown one alone, which localisation needs: take a defence that adds it",
        ),
        ("swin_tiny", {"patch_size": 16}, "swin_tiny has patches of 4 pixels, not 16: set patch size to 4"),
        ("timm:vit_small_patch32_224", {"patch_size": 16}, "patches of 32 pixels, not 16"),
    ],
)
def test_what_a_model_cannot_be_is_refused(name: str, values: dict[str, str | int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(config_of(name, **values))


@pytest.mark.parametrize("name", ["swin_tiny", "resnet50"])
def test_attacks_are_given_transformers_alone(name: str) -> None:
    for make in (build_vit, blueprint):
        with pytest.raises(ConfigError, match=f"{name} is no vision transformer"):
            make(config_of(name))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("timm:vit_tiny_patch16_22", UnknownNameError, "Did you mean vit_tiny_patch16_224"),
        ("timm:vit_tiny_patch16_224.augreg", UnknownNameError, r"Did you mean vit_tiny_patch16_224\.augreg_in21k"),
        ("timm:", UnknownNameError, "None of .* names is near it"),
        ("timm:resnet18", ConfigError, "is a ResNet: take a VisionTransformer"),
        ("timm:deit3_small_patch16_224", ConfigError, "no learned position for the class token"),
        ("timm:deit_tiny_distilled_patch16_224", ConfigError, "2 tokens before the patches"),
        ("timm:vit_small_patch14_reg4_dinov2", ConfigError, "5 tokens before the patches"),
        ("timm:vit_small_r26_s32_224", ConfigError, "does more to patches"),
        ("timm:vit_base_patch16_clip_224", ConfigError, r"has no patch_embed\.proj\.bias"),
    ],
)
def test_models_of_timm_that_would_be_misread_are_refused(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        architecture(name)
    assert len(str(caught.value)) < 250


def test_a_model_of_timm_is_attacked_as_our_own(pictures: Selection) -> None:
    """``timm:deit_tiny_patch16_224`` is ``deit_tiny`` under another name."""
    values = {"image_size": 64, "patch_size": 16, "classes": 1000}
    ours, timms = (build_vit(config_of(name, "mjp", **values)) for name in ("deit_tiny", "timm:deit_tiny_patch16_224"))
    loaded = [pictures.load(pictures.entries[0])]
    batch = private_batch(loaded, grid=4, mask_ratio=0.3, gradient_of=Picture.SHUFFLED, seed=0)
    expected, found = gradient(ours, batch), gradient(timms, batch)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[each], found[each]) for each in expected)
