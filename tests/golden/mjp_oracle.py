"""How ``mjp_oracle.json`` was made: figures of the official MJP models on weights and pictures that a rule draws.

Run by hand, with munch installed and with the folders ``models`` and ``ssl_mjp`` of yhlleo/MJP at ``COMMIT``,
unmodified, in a folder that is given as the only argument. Tests draw the same weights and compare with the file.
"""

import hashlib
import json
import sys
import types
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmjp.seeds import scoped_randomness

COMMIT = "8aa0590bc7be14b0219da641f17fdf6389ba5d66"
HOW = (
    "official files unmodified; timm.models.registry replaced by a stub whose register_model does nothing, since the "
    "official defaults do not fit today's timm; evaluation mode, float64; loss = cross-entropy + 0.01 L1 of the "
    "predicted positions; values of a tensor are its norm and 8 entries at equal distances"
)
WEIGHT_OF_DAL = 0.01
CLASSES = 10
LABELS = (3, 7)
SEED = 0
ENTRIES = 8

MICRO = {"model": "deit_micro", "image_size": 64, "patch_size": 8}
SMALL = {"model": "deit_small", "image_size": 224, "patch_size": 16}
SWIN = {"model": "swin_tiny", "image_size": 224, "patch_size": 4}
NOTHING = {"unknown": True, "index": False, "localisation": "none", "mask": "none"}
CASES: dict[str, dict[str, Any]] = {
    "plain": MICRO | NOTHING | {"unknown": False},
    "plain, linear": MICRO | NOTHING | {"unknown": False, "localisation": "linear"},
    "unmasked": MICRO | NOTHING,
    "masked": MICRO | NOTHING | {"mask": "picture"},
    "index, linear": MICRO | NOTHING | {"index": True, "localisation": "linear", "mask": "batch"},
    "nonlinear": MICRO | NOTHING | {"localisation": "nonlinear", "mask": "batch"},
    "unmasked, nonlinear": MICRO | NOTHING | {"localisation": "nonlinear"},
    "pca": MICRO | NOTHING | {"localisation": "pca", "mask": "batch"},
    "deit_small, nonlinear": SMALL | NOTHING | {"localisation": "nonlinear", "mask": "batch"},
    "swin": SWIN | NOTHING | {"index": True, "mask": "picture"},
}


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """The weight of that name, by the rule; scales of norms are near one."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.05
    return drawn + 1 if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")) else drawn


def fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Of names and shapes."""
    text = "\n".join(f"{name} {tuple(shape)}" for name, shape in sorted(shapes.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def inputs(case: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Pictures in [0, 1] and the mask of their patches."""
    generator = torch.Generator().manual_seed(SEED)
    images = torch.rand(len(LABELS), 3, case["image_size"], case["image_size"], generator=generator)
    rows = {"none": 0, "batch": 1, "picture": len(LABELS)}[case["mask"]]
    patches = (case["image_size"] // case["patch_size"]) ** 2
    return images, torch.rand(rows, patches, generator=generator) < 0.3 if rows else None


def values(tensor: Tensor) -> dict[str, Any]:
    """What is kept of a tensor."""
    flat = tensor.detach().flatten()
    places = torch.linspace(0, len(flat) - 1, ENTRIES).long()
    return {"norm": float(flat.norm()), "entries": flat[places].tolist()}


def _official(case: Mapping[str, Any]) -> Any:
    from models.swin import SwinTransformer
    from models.vit_timm import VisionTransformer

    options = {
        "img_size": case["image_size"],
        "patch_size": case["patch_size"],
        "num_classes": CLASSES,
        "use_unk": case["unknown"],
        "use_idx_emb": case["index"],
        "use_dlocr": case["localisation"] != "none",
        "dlocr_type": case["localisation"],
    }
    if case["model"] == "swin_tiny":
        return SwinTransformer(ape=True, **options)
    shape = {"deit_micro": (64, 4, 2), "deit_small": (384, 12, 6)}[case["model"]]
    return VisionTransformer(**dict(zip(("embed_dim", "depth", "num_heads"), shape, strict=True)), **options)


def _normalised(images: Tensor) -> Tensor:
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    mean, std = (torch.tensor(each).view(3, 1, 1).double() for each in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    return (images.double() - mean) / std


def figures(case: Mapping[str, Any]) -> dict[str, Any]:
    """Run the official model."""
    model = _official(case)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weight(name, tuple(parameter.shape)))
    model.double().eval()
    images, mask = inputs(case)
    unk_mask = None if mask is None else mask.long()
    if unk_mask is not None and case["model"] != "swin_tiny":
        unk_mask = F.pad(unk_mask, (1, 0))  # the class token is never masked
    with scoped_randomness(SEED):
        outs = model(_normalised(images), unk_mask)
    loss = F.cross_entropy(outs.sup, torch.tensor(LABELS))
    made = {"parameters": fingerprint({name: tuple(each.shape) for name, each in parameters.items()})}
    made |= {"logits": outs.sup.tolist()}
    if outs.predxy is not None:
        dal = F.l1_loss(outs.xy.double(), outs.predxy)
        loss = loss + WEIGHT_OF_DAL * dal
        made |= {"dal": dal.item(), "predictions": values(outs.predxy)}
    loss.backward()
    read = ("pos_embed", "index_embed", "dlocr", "absolute_pos_embed", "patch_embed.proj.weight")
    grads = {name: each.grad for name, each in model.named_parameters() if name.startswith(read)}
    made |= {"loss": loss.item(), "gradients": {name: values(each) for name, each in grads.items()}}
    for name in ("pos_embed.weight", "absolute_pos_embed.weight"):
        if name in grads:
            made["gradients"] |= {"unknown": values(grads[name][-1])}
    return made


def main(folder: str) -> None:
    """Write the figures of all cases."""
    registry: Any = types.ModuleType("timm.models.registry")
    registry.register_model = lambda function: function
    sys.modules["timm.models.registry"] = registry
    sys.path.insert(0, folder)
    origin = {"repository": "yhlleo/MJP", "commit": COMMIT, "files": ["models/", "ssl_mjp/"], "how": HOW}
    origin |= {"script": Path(__file__).name, "torch": torch.__version__}
    made = {"origin": origin, "cases": {name: figures(case) for name, case in CASES.items()}}
    Path(__file__).with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
