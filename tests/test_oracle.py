"""Models, localisation and their gradients against figures of the official code (golden/mjp_oracle.json)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.models.build import build
from fedmjp.models.classifier import PositionedClassifier
from fedmjp.seeds import scoped_randomness
from tests.golden.mjp_oracle import CASES, CLASSES, LABELS, SEED, WEIGHT_OF_DAL, fingerprint, inputs, values, weight

GOLDEN = json.loads((Path(__file__).parent / "golden" / "mjp_oracle.json").read_text())["cases"]
TOLERANCE = {"rel": 1e-8, "abs": 1e-12}  # both in float64
RENAMED = {"index_embedding": "index_embed", "localisation.": "dlocr.", "head.fc.": "head."}


def config_of(case: dict[str, Any], weights: Checkpoint | None = None) -> ModelConfig:
    return ModelConfig(
        name=case["model"],
        unknown_embedding=case["unknown"],
        index_embedding=case["index"],
        localisation=case["localisation"],
        localisation_layers=2,
        image_size=case["image_size"],
        patch_size=case["patch_size"],
        classes=CLASSES,
        weights=weights,
    )


def official_name(name: str) -> str:
    """What the official code calls a parameter of a defended or an undefended model of ours."""
    name = name.removeprefix("backbone.")
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return re.sub(r"^layers\.(\d)\.downsample", lambda match: f"layers.{int(match[1]) - 1}.downsample", name)


def official_shapes(model: PositionedClassifier) -> dict[str, tuple[int, ...]]:
    shapes = {official_name(name): tuple(each.shape) for name, each in model.named_parameters()}
    if shapes.pop("unknown_embedding", None):
        theirs = {"pos_embed": "pos_embed.weight", "patch_embed.pos_embed": "absolute_pos_embed.weight"}
        _, rows, dim = shapes.pop(model.positions_name)
        shapes[theirs[model.positions_name]] = (rows + 1, dim)
    return shapes


def drawn(name: str, folder: Path) -> PositionedClassifier:
    """Our model, filled through a checkpoint of the official layout."""
    empty = build(config_of(CASES[name]))
    assert isinstance(empty, PositionedClassifier)
    shapes = official_shapes(empty)
    assert fingerprint(shapes) == GOLDEN[name]["parameters"], "names and shapes are the official ones"
    torch.save({each: weight(each, shape) for each, shape in shapes.items()}, folder / "official.pth")
    model = build(config_of(CASES[name], Checkpoint.of(folder / "official.pth")))
    assert isinstance(model, PositionedClassifier)
    return model.double()


def close(found: Tensor, expected: dict[str, Any]) -> bool:
    made = values(found)
    entries = pytest.approx(expected["entries"], rel=1e-6, abs=1e-8 * expected["norm"] + 1e-12)
    return made["norm"] == pytest.approx(expected["norm"], **TOLERANCE) and made["entries"] == entries


def gradients(model: PositionedClassifier) -> dict[str, Tensor]:
    """By official names; of E_pos and E_unk as of the rows of one embedding."""
    found = {official_name(name): each.grad for name, each in model.named_parameters() if each.grad is not None}
    positions = found[model.positions_name]
    if model.unknown_embedding is not None:
        unknown = found.get("unknown_embedding", torch.zeros_like(model.unknown_embedding))
        rows = torch.cat([positions[0], unknown[None]])
        found |= {"unknown": unknown, "pos_embed.weight": rows, "absolute_pos_embed.weight": rows}
    return found


@pytest.mark.parametrize("name", CASES)
def test_logits_losses_and_gradients_are_those_of_the_official_code(name: str, tmp_path: Path) -> None:
    model, case, expected = drawn(name, tmp_path), CASES[name], GOLDEN[name]
    images, mask = inputs(case)
    logits = model(images.double(), mask)
    assert torch.allclose(logits, torch.tensor(expected["logits"], dtype=torch.float64), rtol=1e-8, atol=1e-10)
    loss = F.cross_entropy(logits, torch.tensor(LABELS))
    if "dal" in expected:
        with scoped_randomness(SEED):  # the approximate principal directions are drawn
            localisation = model.localisation_loss(mask)
        assert localisation.item() == pytest.approx(expected["dal"], **TOLERANCE)
        loss = loss + WEIGHT_OF_DAL * localisation
    assert loss.item() == pytest.approx(expected["loss"], **TOLERANCE)
    loss.backward()
    found = gradients(model)
    assert expected["gradients"].keys() <= found.keys()
    for each, wanted in expected["gradients"].items():
        assert close(found[each], wanted), each


@pytest.mark.parametrize("name", [name for name, golden in GOLDEN.items() if "predictions" in golden])
def test_predicted_positions_are_those_of_the_official_code(name: str, tmp_path: Path) -> None:
    model, (_, mask) = drawn(name, tmp_path), inputs(CASES[name])
    assert model.localisation is not None
    rows = model.backbone.pos_embed[0, 1:]
    with scoped_randomness(SEED), torch.no_grad():
        predicted = model.localisation(rows if mask is None else rows[~mask[0]])
    assert close(predicted, GOLDEN[name]["predictions"])
