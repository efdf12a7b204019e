"""Weights that have a client spend its whole update on one thing: its label, or a thumbnail."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from fedmjp.config import Config
from fedmjp.models import names
from fedmjp.server.modifications.heads import FirstOfSum, head_refusal, without_sum
from fedmjp.threat import ThreatModel

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.models.classifier import VitClassifier

ANCHOR = 300.0  # one positive and one negative entry of every token: they set what LayerNorms divide by
MARK = 30.0  # of a quadrant, in the position embedding
SHARP = 60.0  # by which the logits of a quadrant's tokens exceed all others before the softmax
STEEP = 1e4  # scale of the last LayerNorm: beside what passes it, the gradient of its bias is next to nothing
# Pairs of entries, x and -x, so that no token has a mean: what the head reads, the anchor, colours, quadrants' marks.
READ, ANCHORED, COLOURED, MARKED = 0, 1, 2, 5
DIMENSIONS = 2 * (MARKED + 4)


class ConcentratorOptions(Config):
    """What clients are made to say."""

    tells: Literal["label", "thumbnail"] = Field(
        "label", description="what the gradient tells: label or thumbnail (four mean colours)"
    )


class Concentrator(FirstOfSum):
    """Make one gradient all that there is, and a chosen function of the picture all that it holds.

    Clipping to a norm keeps a gradient's direction, and noise that hides an update of a million entries has to hide
    these few numbers (``fedmjp.attacks.concentrated``).

    - For the label, the head is zero, and the last LayerNorm makes half of the feature a constant: the gradient of the
      head's weight is all.
    - For a thumbnail, the patch embedding keeps a patch's mean colours, the position embedding marks its quadrant, and
      a head of attention per quadrant takes the mean, less what natural pictures have on average, enlarged. Its
      projection is zero, as are the MLPs: tokens stay as they are, and the projections' gradients are all.

    In a sum, all clients but the first are sent a last LayerNorm of zeros: their gradient of the head's weight is zero.
    """

    name = "concentrator"
    paper = "Boenisch et al., When the curious abandon honesty, EuroS&P 2023, for one number per entry"
    summary = "weights that spend a client's whole update on its label, or on a thumbnail"
    options_type: ClassVar[type[Config]] = ConcentratorOptions

    @override
    def refusal(self, model: VitClassifier, threat: ThreatModel, *, trains: bool) -> str | None:
        if threat.update != "gradient" or threat.batch_size > 1:
            return f"{self.name}: reads gradients of one picture, not {threat.update}s of {threat.batch_size}"
        if refusal := head_refusal(self.name, model, threat):
            return refusal
        return None if self.options.tells == "label" else self._thumbnail_refusal(model)

    def _thumbnail_refusal(self, model: VitClassifier) -> str | None:
        if not model.has_positions or not model.prefix_tokens:
            return f"{self.name}: marks quadrants by positions and reads the class token, which the model has not both"
        tensors = {name for name, _ in model.named_parameters()}
        missing = [part for block in range(len(model.backbone.blocks)) for part in _of_block(block)]
        strange = [name for name in tensors if ".ls1." in name or ".ls2." in name]
        if strange or not tensors.issuperset(missing):
            return f"{self.name}: is for the blocks of DeiT and ViT, the model has {' and '.join(strange) or 'others'}"
        from fedmjp.attacks.concentrated import QUADRANTS

        heads = sum(block.attn.num_heads for block in model.backbone.blocks)
        width = min(model.backbone.embed_dim // block.attn.num_heads for block in model.backbone.blocks)
        if heads < QUADRANTS or width < 4 or model.backbone.embed_dim < DIMENSIONS:
            needed = f"{QUADRANTS} heads of attention of 4 dimensions or more, and {DIMENSIONS} in a token"
            return f"{self.name}: needs {needed}; the model has {heads} of {width}, and {model.backbone.embed_dim}"
        return None

    @override
    def weights(self, model: VitClassifier, threat: ThreatModel, learnt: object) -> Sequence[Mapping[str, Tensor]]:
        import torch

        from fedmjp.attacks.concentrated import LOUD, constant_columns

        head = {
            name: torch.zeros_like(model.get_parameter(name).detach())
            for name in (names.HEAD_WEIGHT, names.HEAD_BIAS, names.NORM_WEIGHT, names.NORM_BIAS)
        }
        first = {name: value.clone() for name, value in head.items()}
        if self.options.tells == "label":
            columns = constant_columns(len(first[names.NORM_BIAS]))
            first[names.NORM_BIAS][:columns] = LOUD / columns**0.5
        else:
            first |= _thumbnail(model)
        return [first, *[head] * (threat.pipeline.clients - 1)]

    @override
    def view(self, threat: ThreatModel) -> ThreatModel:
        return without_sum(threat)


def _of_block(block: int) -> tuple[str, ...]:
    """List the weights of a block that are used: qkv, its bias, and the projection."""
    from fedmjp.attacks.concentrated import projection

    return f"backbone.blocks.{block}.attn.qkv.weight", f"backbone.blocks.{block}.attn.qkv.bias", projection(block)


def _pair(number: int) -> tuple[int, int]:
    """Return the two dimensions of a pair."""
    return 2 * number, 2 * number + 1


def _thumbnail(model: VitClassifier) -> dict[str, Tensor]:
    """Make a body that gathers mean colours of quadrants, and a head that has the projections' gradients show them."""
    import torch

    from fedmjp.attacks.concentrated import quadrant_slots

    changed = {name: torch.zeros_like(value.detach()) for name, value in model.named_parameters()}
    for name, value in changed.items():
        if ".norm1." in name and name.endswith("weight"):
            value.fill_(1)
    dim, side, prefix = model.backbone.embed_dim, model.grid, model.prefix_tokens
    patches = changed[names.PATCH_WEIGHT].view(dim, 3, -1)
    for channel in range(3):
        plus, minus = _pair(COLOURED + channel)
        patches[plus, channel], patches[minus, channel] = 1 / patches.shape[-1], -1 / patches.shape[-1]
    plus, minus = _pair(ANCHORED)
    anchored = [changed[names.POSITION_EMBEDDING]]
    anchored += [changed[names.UNKNOWN_EMBEDDING]] if model.defended else []
    for embedding in anchored:
        embedding[..., plus], embedding[..., minus] = ANCHOR, -ANCHOR
    places = torch.arange(side**2)
    quadrants = 2 * (places // side >= side / 2) + 1 * (places % side >= side / 2)
    for quadrant, slot in enumerate(quadrant_slots(model)):
        plus, minus = _pair(MARKED + quadrant)
        rows = changed[names.POSITION_EMBEDDING][0, prefix:]
        rows[quadrants == quadrant, plus], rows[quadrants == quadrant, minus] = MARK, -MARK
        _gather(changed, model, slot, quadrant)
    plus, minus = _pair(READ)
    changed[names.NORM_WEIGHT][[plus, minus]] = STEEP
    changed[names.HEAD_WEIGHT][0, plus], changed[names.HEAD_WEIGHT][0, minus] = 1.0, -1.0
    changed[names.HEAD_BIAS][0] = math.log(len(changed[names.HEAD_BIAS]) - 1)  # a probability of a half
    return changed


def _gather(changed: dict[str, Tensor], model: VitClassifier, slot: tuple[int, int], quadrant: int) -> None:
    """Have a head of attention take the mean colours of a quadrant, and, of the first one, a constant."""
    from fedmjp.attacks.concentrated import CONSTANT, LOUD, thumbnail_gain, thumbnail_prior

    block, start = slot
    dim = model.backbone.embed_dim
    qkv, bias, _ = (changed[name] for name in _of_block(block))
    scale = (2 * (ANCHOR**2 + MARK**2) / dim) ** 0.5  # what the LayerNorm divides by
    width = dim // model.backbone.blocks[block].attn.num_heads
    bias[start] = SHARP * width**0.5  # of all queries
    plus, minus = _pair(MARKED + quadrant)
    key, value = dim + start, 2 * dim + start
    qkv[key, plus], qkv[key, minus] = scale / (2 * MARK), -scale / (2 * MARK)
    gain = thumbnail_gain()
    for channel in range(3):
        plus, minus = _pair(COLOURED + channel)
        mean, std = (float(part.flatten()[channel]) for part in (model.mean, model.std))
        qkv[value + channel, plus], qkv[value + channel, minus] = gain * std * scale / 2, -gain * std * scale / 2
        bias[value + channel] = gain * (mean - float(thumbnail_prior().mean[channel]))
    if quadrant == 0:
        bias[value + 3] = CONSTANT * LOUD
