"""Roles of tensors, by structure, in layouts of several libraries."""

from collections.abc import Mapping

import pytest
import timm
import torch
import torchvision

from fedmjp.config import ModelConfig
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.roles import roles_of_tensors
from fedmjp.models.sent import SentWeights
from fedmjp.scenario import Scenario

TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2, "num_classes": 7}


def _timm() -> Mapping[str, torch.Tensor]:
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **TIMM).state_dict()


def _torchvision() -> Mapping[str, torch.Tensor]:
    vit = torchvision.models.VisionTransformer(32, 8, 2, 2, 48, 96, num_classes=7)
    state: Mapping[str, torch.Tensor] = vit.state_dict()
    return state


EXPECTED = {
    _timm: ({"patch_embed.proj.weight", "patch_embed.proj.bias"}, {"pos_embed"}, {"head.weight", "head.bias"}),
    _torchvision: (
        {"conv_proj.weight", "conv_proj.bias"},
        {"encoder.pos_embedding"},
        {"heads.head.weight", "heads.head.bias"},
    ),
}


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("library", EXPECTED, ids=lambda library: library.__name__)
def test_roles_are_found_with_and_without_names(library: object, numbered: bool) -> None:
    with torch.random.fork_rng():
        state = library()
    order = {name: str(place) if numbered else name for place, name in enumerate(state)}
    roles = roles_of_tensors({order[name]: tensor for name, tensor in state.items()})
    patches, positions, head = ({order[name] for name in expected} for expected in EXPECTED[library])
    assert roles["patch_embedding"] == patches
    assert roles["position_embedding"] == positions
    assert roles["head"] == head
    assert roles["body"] == set(order.values()) - head


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"localisation": "nonlinear"},
        {"index_embedding": True},
        {"unknown_embedding": True, "localisation": "linear"},
    ],
)
def test_roles_of_our_own_classifier(fields: Mapping[str, object]) -> None:
    model = build_vit(
        ModelConfig.parse({"name": "deit_tiny", "image_size": 32, "patch_size": 16, "classes": 5, **fields})
    )
    assert isinstance(model, VitClassifier)
    roles = roles_of_tensors(dict(model.named_parameters()))
    assert roles["patch_embedding"] == {names.PATCH_WEIGHT, names.PATCH_BIAS}
    expected = {names.POSITION_EMBEDDING} | ({names.UNKNOWN_EMBEDDING} if model.defended else set())
    assert roles["position_embedding"] == expected | ({"index_embedding"} if "index_embedding" in fields else set())
    assert roles["head"] == {"backbone.head.weight", names.HEAD_BIAS}


def test_a_network_without_patches_and_positions_has_no_such_roles() -> None:
    roles = roles_of_tensors({"0.weight": torch.zeros(5, 4), "0.bias": torch.zeros(5), "1.weight": torch.zeros(2, 5)})
    assert not roles["patch_embedding"]
    assert not roles["position_embedding"]
    assert roles["head"] == {"1.weight"}
    assert roles["body"] == {"0.weight", "0.bias"}


def test_positions_are_found_in_weights_as_they_are_sent_beside_the_unknown_embedding_of_mjp() -> None:
    model = {"name": "deit_micro", "image_size": 32, "patch_size": 8, "classes": 4}
    for defences in ((), ("mjp",)):
        network = build_vit(Scenario.parse({"model": model, "defences": defences}).network)
        sent = SentWeights.of(network.state_dict())
        assert torch.equal(sent.get_parameter(names.POSITION_EMBEDDING), network.state_dict()[names.POSITION_EMBEDDING])
        assert (sent.image_size, sent.patch_size, sent.prefix_tokens) == (32, 8, 1)
