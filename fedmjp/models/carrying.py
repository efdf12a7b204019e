"""Carry somebody's vision transformer over to our classes, so that whatever reads or runs ours takes theirs.

Which tensor is which is told by structure: blocks are the longest list of like modules, and inside of one stand norms
and matrices in the order in which they are applied. Whether that is right is measured: both networks are run on a
random picture, and must give the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, cast

import timm
import torch
from torch import Tensor, nn

from fedmjp.errors import BadInputError
from fedmjp.models.classifier import VitClassifier
from fedmjp.models.probing import EntranceLayout, before_embedding, find_entrance, tensors_of

SAME = 1e-3  # relative difference of outputs; rounding leaves 1e-5
Sources = dict[str, tuple[str, ...]]  # of each parameter of timm's, those of the module that make it, one below another


@dataclass(frozen=True)
class Carried:
    """A network of ours that computes what the module computes.

    Attributes:
        classifier: The network, with the module's weights.
        sources: Of each of its parameters, by name, the module's.
        pixel_order: As of ``EntranceLayout``.
    """

    classifier: VitClassifier
    sources: Mapping[str, tuple[str, ...]]
    pixel_order: tuple[int, ...]

    def tensors(self, module_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Translate an update or a state of the module into the classifier's names; omit what is incomplete.

        Args:
            module_tensors: Tensors by the names of the module.
        """
        shapes = {name: parameter.shape for name, parameter in self.classifier.named_parameters()}
        return {
            name: _shaped([module_tensors[part] for part in parts], shapes[name], self.pixel_order)
            for name, parts in self.sources.items()
            if all(part in module_tensors for part in parts)
        }


def carry(module: nn.Module, *, mean: Sequence[float], std: Sequence[float]) -> Carried:
    """Carry a vision transformer over; the module is not changed.

    Args:
        module: Takes normalised pictures (batch, 3, size, size); of timm, torchvision, transformers or your own.
        mean: What is subtracted from pictures in [0, 1] before they enter it.
        std: What they are divided by then.

    Raises:
        BadInputError: If it is no vision transformer of the common kind, with the first difference.
    """
    entrance = find_entrance(module)
    if entrance.pixels[0] != entrance.pixels[1]:
        sides = " x ".join(map(str, entrance.pixels))
        raise BadInputError(f"its pictures are {sides}: the network behind the tokens is read for squares only")
    inside_mean, inside_std = before_embedding(entrance, mean, std)
    parameters = dict(module.named_parameters())
    blocks = _blocks(module)
    sources: Sources = {"patch_embed.proj.weight": (f"{entrance.embedding.name}.weight",)}
    sources["pos_embed"] = (entrance.positions.name,)
    if f"{entrance.embedding.name}.bias" in parameters:
        sources["patch_embed.proj.bias"] = (f"{entrance.embedding.name}.bias",)
    if entrance.class_token is not None:
        sources["cls_token"] = (entrance.class_token,)
    for place, (prefix, block) in enumerate(blocks):
        sources |= {f"blocks.{place}.{name}": parts for name, parts in _block_sources(prefix, block).items()}
    sources |= _end_sources(module, blocks, entrance)
    for backbone in _candidates(module, blocks, entrance, sources):
        backbone.pretrained_cfg = {"mean": inside_mean.flatten().tolist(), "std": inside_std.flatten().tolist()}
        classifier = VitClassifier(backbone, defended=False)
        whole = {f"backbone.{name}": parts for name, parts in sources.items()}
        carried = Carried(classifier, whole, entrance.pixel_order)
        state = carried.tensors({name: parameter.detach() for name, parameter in parameters.items()})
        if state.keys() != dict(classifier.named_parameters()).keys():
            continue
        classifier.load_state_dict(state)
        if _agree(module, classifier, (torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1))):
            return carried
    raise BadInputError(
        f"a {type(module).__name__} computes something else than timm's VisionTransformer of the same sizes: "
        "only what its entrance and its head show can be read"
    )


def _blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    lists = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len({type(item) for item in part}) == 1
    }
    name = max(lists, key=lambda like: sum(p.numel() for p in lists[like].parameters()), default=None)
    if name is None:
        raise BadInputError("found no list of like blocks")
    return [(f"{name}.{inner}", block) for inner, block in lists[name].named_children()]


def _block_sources(prefix: str, block: nn.Module) -> Sources:
    """Assign norms and matrices of a block by their places."""
    norms = [name for name, part in block.named_modules() if isinstance(part, nn.LayerNorm)]
    matrices = [(name, parameter) for name, parameter in block.named_parameters() if parameter.ndim == 2]
    split = bool(matrices) and matrices[0][1].shape[0] == matrices[0][1].shape[1]
    if len(norms) != 2 or len(matrices) != (6 if split else 4):
        raise BadInputError(f"block {prefix} has {len(norms)} norms and {len(matrices)} matrices, not those of a ViT")
    parameters = set(dict(block.named_parameters()))
    first = 3 if split else 1
    sources = {"attn.qkv": [name for name, _ in matrices[:first]]}
    for part, (name, _) in zip(("attn.proj", "mlp.fc1", "mlp.fc2"), matrices[first:], strict=True):
        sources[part] = [name]
    for part, norm in zip(("norm1", "norm2"), norms, strict=True):
        sources[part] = [f"{norm}.weight"]
    named_sources: Sources = {}
    for part, names in sources.items():
        named_sources[f"{part}.weight"] = tuple(f"{prefix}.{name}" for name in names)
        biases = [f"{name.removesuffix('weight')}bias" for name in names]
        if all(bias in parameters for bias in biases):
            named_sources[f"{part}.bias"] = tuple(f"{prefix}.{bias}" for bias in biases)
    surplus = parameters - {name.removeprefix(f"{prefix}.") for names in named_sources.values() for name in names}
    if surplus:
        raise BadInputError(f"block {prefix} has more than a ViT's: {', '.join(sorted(surplus)[:3])}")
    return named_sources


def _end_sources(module: nn.Module, blocks: Sequence[tuple[str, nn.Module]], entrance: EntranceLayout) -> Sources:
    if entrance.head is None:
        raise BadInputError("found no linear layer that gives the module's output")
    inside = tuple(f"{prefix}." for prefix, _ in blocks)
    norms = [
        name for name, part in module.named_modules() if isinstance(part, nn.LayerNorm) and not name.startswith(inside)
    ]
    if len(norms) != 1:
        raise BadInputError(f"found {len(norms)} norms outside of the blocks, not the one before the head")
    parts = {"norm": norms[0], "head": entrance.head}
    parameters = dict(module.named_parameters())
    return {
        f"{part}.{kind}": (f"{name}.{kind}",)
        for part, name in parts.items()
        for kind in ("weight", "bias")
        if f"{name}.{kind}" in parameters
    }


def _candidates(
    module: nn.Module, blocks: Sequence[tuple[str, nn.Module]], entrance: EntranceLayout, sources: Sources
) -> Iterator[Any]:
    """Yield networks of the module's sizes with each head and pooling, which weights do not tell, likeliest first."""
    parameters = dict(module.named_parameters())
    dim = entrance.embedding.dim
    hidden = parameters[sources["blocks.0.mlp.fc1.weight"][0]].shape[0]
    epsilon = next(part.eps for part in blocks[0][1].modules() if isinstance(part, nn.LayerNorm))
    stated = {
        int(value)
        for part in module.modules()
        for name, value in vars(part).items()
        if name in ("num_heads", "num_attention_heads") and isinstance(value, int)
    }
    heads = list(dict.fromkeys([*stated, dim // 64, *range(1, 17)]))
    token = entrance.class_token is not None
    for pool, count in product(["token", "avg"] if token else ["avg"], heads):
        if not count or dim % count or (pool == "avg" and token and entrance.prefix_tokens > 1):
            continue
        yield timm.models.vision_transformer.VisionTransformer(
            img_size=entrance.pixels[0],
            patch_size=entrance.embedding.patch_size,
            num_classes=parameters[sources["head.weight"][0]].shape[0],
            global_pool=cast(Any, pool),
            embed_dim=dim,
            depth=len(blocks),
            num_heads=count,
            mlp_ratio=hidden / dim,
            qkv_bias="blocks.0.attn.qkv.bias" in sources,
            class_token=token,
            fc_norm=False,
            norm_layer=partial(nn.LayerNorm, eps=epsilon),
        )


def _agree(module: nn.Module, classifier: VitClassifier, normalisation: tuple[Tensor, Tensor]) -> bool:
    """Tell whether both networks give the same on a random picture, which the module takes normalised."""
    generator = torch.Generator().manual_seed(0)
    mean, std = normalisation
    picture = torch.rand(1, 3, *classifier.pixels, generator=generator)
    was = module.training
    module.eval()
    classifier.eval()
    try:
        with torch.no_grad():
            logits = next(iter(tensors_of(module((picture - mean) / std))))
            carried_logits = classifier(picture)
    finally:
        module.train(was)
    if logits.shape != carried_logits.shape:
        return False
    return bool((logits - carried_logits).norm() <= SAME * logits.norm())


def _shaped(parts: Sequence[Tensor], shape: torch.Size, pixel_order: Sequence[int]) -> Tensor:
    joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if len(shape) == 4 and joined.ndim == 2:
        sides = shape[1:]
        pixels = joined.reshape(shape[0], *(sides[axis] for axis in pixel_order))
        back = sorted(range(3), key=lambda place: pixel_order[place])
        return pixels.permute(0, *(1 + place for place in back)).contiguous()
    if math.prod(joined.shape) != math.prod(shape):
        raise BadInputError(f"a tensor of shape {tuple(joined.shape)} does not make one of {tuple(shape)}")
    return joined.reshape(shape)
