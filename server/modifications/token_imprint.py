"""Weights that print every patch of a batch, with its place, into the gradients of the MLPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from fedmjp.models import names
from fedmjp.seeds import torch_generator
from fedmjp.threat import Modification, ThreatModel

if TYPE_CHECKING:
    from torch import Tensor

    from fedmjp.models.classifier import VitClassifier
    from fedmjp.records import Upload

# Luminance and colour differences, rows over red, green, blue (ITU-R BT.601).
LUMINANCE = ((0.299, 0.587, 0.114), (-0.1687, -0.3313, 0.5), (0.5, -0.4187, -0.0813))
COARSER = 4.0  # how much less of the frequencies of colour is kept than of those of luminance
MARKS = 4  # dimensions of a token that hold no content: two anchors, the place, and what the MLPs write
ANCHOR = 100.0  # value of the anchors, one positive and one negative: they tell the LayerNorm's scale and shift
STEP = 0.5  # between the marks of neighbouring places
OUTSIDE = -300.0  # mark of tokens that are to be in no bin: the class token, and masked patches
SPREAD = 5.0  # standard deviation of the content's share of the measurement, in steps between places
CONTRAST = 0.25  # of the mean luminance of natural patches: standard deviation, of a range of 1
TAILS = 2.5  # standard deviations beside the places for which there are bins
SHARP = 1e4  # values before the activation across a bin: the step from 0 to 1 takes about ten
WRITTEN = 1e-18  # by a hidden unit into the dimension that MLPs write: too little to change any token
PASSED = 30.0  # how much of that dimension attention passes to the class token


class TokenImprintServer(Modification):
    """Print tokens into the hidden units of all blocks but the last.

    The patch embedding keeps the cosine coefficients of a patch, those of low frequency where there are more than
    dimensions, and the position embedding adds two anchors and a mark of the place. Attention is silent, so that every
    block sees these tokens. All rows of all MLPs measure the same number of a token; their biases are thresholds, in
    equal steps over all blocks. The gradients of neighbouring rows then differ by the tokens between two thresholds:
    a token alone there is read off, with its place (``fedmjp.attacks.token_imprint``).

    What makes these gradients: MLPs write next to nothing into one dimension, which the last block passes to the class
    token. Its weight in the loss is the same for all tokens of a picture, and another one for every picture.

    Of N tokens in n bins, about exp(-N / n) are alone.
    """

    name = "token_imprint"
    paper = "Fowl et al., Robbing the Fed, ICLR 2022, for the tokens of an unmodified vision transformer"
    summary = "weights that print the patches of a whole batch, with their places, into the MLPs' gradients"

    @override
    def refusal(self, model: VitClassifier, threat: ThreatModel, *, trains: bool) -> str | None:
        if threat.update != "gradient":
            return f"{self.name}: reads gradients; a weight change drowns in the rounding of weights as large as these"
        if not model.has_positions:
            return f"{self.name}: marks places by the position embedding, which the model does not have"
        tensors = {name for name, _ in model.named_parameters()}
        missing = [
            name for block in range(len(model.backbone.blocks)) for name in _of_block(block) if name not in tensors
        ]
        strange = [name for name in tensors if ".ls1." in name or name == "index_embedding"]
        if missing or strange:
            return f"{self.name}: is for the blocks of DeiT and ViT, the model has {' and '.join(strange) or 'others'}"
        return None

    @override
    def weights(self, model: VitClassifier, threat: ThreatModel, learnt: object) -> Sequence[Mapping[str, Tensor]]:
        import torch

        changed = {name: torch.zeros_like(value.detach(), device="cpu") for name, value in model.named_parameters()}
        for name, value in changed.items():
            if ".norm" in name and name.endswith("weight"):
                value.fill_(1)
        content = _content(model)
        dim, count = model.backbone.embed_dim, len(content)
        plus, minus, place, written = range(dim - MARKS, dim)
        changed[names.PATCH_WEIGHT].view(dim, -1)[:count] = content
        marks = STEP * (torch.arange(model.grid**2) - (model.grid**2 - 1) / 2)
        positions = changed[names.POSITION_EMBEDDING][0]
        positions[: model.prefix_tokens, place] = OUTSIDE
        rows = positions[model.prefix_tokens :]
        rows[:, plus], rows[:, minus], rows[:, place] = ANCHOR, -ANCHOR, marks
        if model.defended:
            changed[names.UNKNOWN_EMBEDDING][place] = OUTSIDE
        generator = torch_generator(0, self.name)
        measure = torch.zeros(dim)
        share = SPREAD * STEP / (CONTRAST * model.patch_size)
        measure[:count] = 0.3 * share * torch.randn(count, generator=generator)
        measure[0], measure[place] = share, 1.0
        self._print(changed, model, measure, marks)
        passed = torch.randn(dim, generator=generator)
        passed[dim - MARKS :] = 0
        passed[: dim - MARKS] -= passed[: dim - MARKS].mean()
        passed /= passed.norm()
        last = len(model.backbone.blocks) - 1
        qkv, projection, *_ = _of_block(last)
        changed[qkv][2 * dim, written] = PASSED
        changed[projection][:, 0] = passed
        classes = torch.arange(len(changed[names.HEAD_BIAS]))
        values = 4 ** (classes / len(classes)) * (1 - 2 * (classes % 2))
        changed[names.HEAD_WEIGHT] += values[:, None] * passed
        return [{name: value.to(model.mean.device) for name, value in changed.items()}] * threat.pipeline.clients

    def _print(self, changed: dict[str, Tensor], model: VitClassifier, measure: Tensor, marks: Tensor) -> None:
        """Give all blocks but the last their thresholds."""
        import torch

        blocks = len(model.backbone.blocks) - 1
        dim = len(measure)
        scale = float((2 * ANCHOR**2 / dim) ** 0.5)  # what LayerNorm divides by, nearly
        edge = float(marks[-1]) + TAILS * SPREAD * STEP
        hidden = len(changed[_of_block(0)[2]])
        thresholds = torch.linspace(-edge, edge, blocks * hidden, dtype=torch.float64) / scale
        slope = SHARP / float(thresholds[1] - thresholds[0])
        for block in range(blocks):
            _, _, weight, bias, out = _of_block(block)
            changed[weight] += slope * measure
            changed[bias] -= (slope * thresholds[block * hidden : (block + 1) * hidden]).float()
            changed[out][dim - 1] = WRITTEN

    @override
    def view(self, threat: ThreatModel) -> ThreatModel:
        return threat

    @override
    def isolate(self, upload: Upload, model: VitClassifier, threat: ThreatModel) -> Upload:
        return upload


def _of_block(block: int) -> tuple[str, ...]:
    """List the weights of a block that are used: qkv, projection, rows, thresholds and output."""
    parts = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight")
    return tuple(f"backbone.blocks.{block}.{part}" for part in parts)


def _content(model: VitClassifier) -> Tensor:
    """Compute rows (count, 3 * patch_size ** 2) that give a normalised patch's cosine coefficients, mean first."""
    import torch
    from scipy.fft import idctn

    size, count = model.patch_size, model.backbone.embed_dim - MARKS
    costs = [
        (float(row**2 + column**2) * (1.0 if channel == 0 else COARSER), channel, row, column)
        for channel in range(3)
        for row in range(size)
        for column in range(size)
    ]
    rows = []
    for _, channel, row, column in sorted(costs)[:count]:
        wave = np.zeros((size, size))
        wave[row, column] = 1
        pixels = torch.from_numpy(idctn(wave, norm="ortho")).flatten()
        scales = torch.tensor(LUMINANCE[channel], dtype=torch.float64) * model.std.flatten().double().cpu()
        rows.append((scales[:, None] * pixels).flatten())
    return torch.stack(rows).float()
