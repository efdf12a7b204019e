"""How ``gradvit_oracle.json`` was made: terms of the official code's GradViT on weights and pictures that a rule draws.

Run by hand, with the folders ``gradvit`` and ``data`` of yhlleo/MJP at ``COMMIT``, unmodified, in a folder that is the
only argument. Tests draw the same and compare with the file.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from tests.golden.mjp_oracle import COMMIT, weight

HOW = (
    "official gradvit_losses.py unmodified, float32; timm.models.layers is timm.layers, cv2 and data/__init__.py are "
    "stubs; its random patch embedding replaced by one that gives the patches' own pixels; its ResNet-50 in evaluation "
    "mode, with weights of the rule; labels as classes"
)
SIZE, PATCH = 224, 16  # the only ones of the official seams
MICRO = {"name": "deit_micro", "image_size": 32, "patch_size": 8, "classes": 10}
LABEL = 3


def drawn(name: str, *shape: int) -> Tensor:
    """Numbers in [0, 1] of that name, by the rule."""
    return (weight(name, shape) * 4 + 0.5).clamp(0, 1)


def resnet50_weights() -> dict[str, Tensor]:
    """Of a ResNet-50, by the rule; variances are near one, and branches as loud as in a trained one."""
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in torchvision.models.resnet50().state_dict().items()}
    scale = {name: 20 * max(shape[1] * shape[-1] ** 2, 1) ** -0.5 for name, shape in shapes.items() if len(shape) == 4}
    made = {name: weight(name, shape) * scale.get(name, 1) for name, shape in shapes.items()}
    ones = (".running_var", "bn1.weight", "bn2.weight", "bn3.weight", "downsample.1.weight")
    return {
        name: torch.zeros((), dtype=torch.int64) if name.endswith("batches_tracked")
        else value.abs() + 1 if name.endswith(ones) else value
        for name, value in made.items()
    }  # fmt: skip


def gradients_of(model: nn.Module, image: Tensor) -> list[Tensor]:
    """Of the classification loss, in the order of the parameters."""
    loss = nn.functional.cross_entropy(model(image), torch.tensor([LABEL]))
    return list(torch.autograd.grad(loss, list(model.parameters())))


def micro() -> nn.Module:
    """A small vision transformer with weights of the rule."""
    from fedmjp.config import ModelConfig
    from fedmjp.models.build import build_vit

    model = build_vit(ModelConfig.parse(MICRO))
    model.backbone.load_state_dict(
        {name: weight(name, tuple(v.shape)) for name, v in model.backbone.state_dict().items()}
    )
    return model


class _Patches(nn.Module):
    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, images: Tensor) -> Tensor:
        grid = SIZE // PATCH
        patches = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # (batch, 3, rows, columns, 16, 16)
        return patches.permute(0, 2, 3, 1, 4, 5).reshape(len(images), grid**2, -1)


class _Sup(nn.Module):
    """Answers as the official models do."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, normalised: Tensor) -> SimpleNamespace:
        return SimpleNamespace(sup=self.backbone(normalised))


def _official(folder: Path) -> Mapping[str, float]:
    import timm.layers

    data = ModuleType("data")  # without its __init__, which does not fit today's timm
    data.__path__ = [str(folder / "data")]
    sys.modules |= {"timm.models.layers": timm.layers, "cv2": ModuleType("cv2"), "data": data}
    sys.path[:0] = [str(folder), str(folder / "gradvit")]
    import gradvit_losses as official

    official.PatchEmbed = _Patches
    resnet = torchvision.models.resnet50().eval()
    official.models = SimpleNamespace(resnet50=lambda pretrained: resnet)
    checkpoint = {"state_dict": {f"module.encoder_q.{name}": value for name, value in resnet50_weights().items()}}
    torch.load = lambda *_, **__: checkpoint
    model = micro()
    normalised = (drawn("candidate", 1, 3, 32, 32) - model.mean) / model.std
    network = _Sup(model.backbone)
    inputs = drawn("seams", 1, 3, SIZE, SIZE)
    private = gradients_of(model, drawn("private", 1, 3, 32, 32))
    official.np.sum = sum  # numpy refuses tensors that have a gradient
    distance = official.grad_loss_breaching(
        private, torch.tensor([LABEL]), normalised, network, network, None, DEBUG=True
    )
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    small = (drawn("statistics", 1, 3, 64, 64) - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    return {
        "distance": distance.item(),
        "seams": official.aux_patch_loss(inputs, DEBUG=True).item(),
        "smoothness": official.aux_extra_loss(inputs).item(),
        "batch_norm": official.image_loss(small, DEBUG=True).item(),
    }


if __name__ == "__main__":
    figures = _official(Path(sys.argv[1]).absolute())
    content = {"origin": {"commit": COMMIT, "how": HOW, "torch": torch.__version__}, "terms": figures}
    Path(__file__).with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
