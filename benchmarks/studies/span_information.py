"""How exactly one upload determines the masked patches, were the equations of ``mjp_span`` solved.

``python -m fedmjp.benchmarks.studies.span_information --data FOLDER --output DIR --pictures 20 --ratios 0.09,0.27``

What ``mjp_span`` does not find may be hidden, or only hard to find. At the true tokens, with the attention's
output known, every equation measures a patch's coefficients with the noise that rounding of the upload gives it
(``Span.expected``). No unbiased estimate has a smaller covariance than F^-1 with F = sum_i J_i^T J_i / variance_i
(Cramér and Rao); its trace is the squared error of the patch. A bound of what is near the truth: it does not
say that nothing else solves the equations, nor how to get there.

The ``second`` figures add the equations of the second block: what it gets of a token, z2 + MLP(z2), depends on
that token alone once z2 = z + o is given, and after norm1 lies in the span that the gradient of its qkv has.

One row per picture and mask ratio, of pictures that nothing was developed on.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.func import jacfwd

from fedmjp.attacks.base import on_device
from fedmjp.attacks.first_block.block import Linear, Norm, gelu, linear_of, norm_of
from fedmjp.attacks.first_block.equations import Span
from fedmjp.attacks.mjp.facts import linear_facts
from fedmjp.attacks.mjp.span.equations import LEVEL_WEIGHT, PatchEquations, equations
from fedmjp.benchmarks.studies.span import Data, Model, Output, Ratios, keep_rows_of
from fedmjp.exchange import Exchange
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.running import run_function

NEXT_QKV = "backbone.blocks.1.attn.qkv.weight"


@dataclass(frozen=True)
class SecondBlock:
    """What the second block's equations need: z2 -> norm1(z2 + MLP(z2)), and the span of that over the tokens."""

    fc2: Linear
    norm: Norm
    span: Span

    @staticmethod
    def of(upload: Upload, model: VitClassifier, tokens: int) -> "SecondBlock":
        """From the upload and the weights."""
        span = Span.of(on_device(upload, NEXT_QKV, model), tokens)
        return SecondBlock(linear_of(model, "0.mlp.fc2"), norm_of(model, "1.norm1"), span)

    def inputs(self, attended: Tensor, activations: Tensor) -> Tensor:
        """(rows, dim) of z2 and its activations."""
        return self.norm(attended + self.fc2(activations))


def main(
    data: Data,
    output: Output,
    pictures: Annotated[int, typer.Option()] = 20,
    ratios: Ratios = "0.03,0.09,0.27,0.5,0.9",
    model: Model = "",
) -> None:
    """Compute what the folder lacks, and print a summary."""
    rows = keep_rows_of(output, bounds, options={}, model=model, data=data, count=pictures, ratios=ratios)
    groups = rows.groupby(["model", "ratio"])
    figures = groups[["median", "worst", "median_second", "worst_second"]].median().assign(uploads=groups.size())
    typer.echo(figures.round(1).to_string())


def bounds(exchange: Exchange, model: VitClassifier) -> dict[str, Any]:
    """PSNR in dB that an upload allows its masked patches: their median and the worst; nan without any."""
    first, second = patch_bounds(exchange.upload, exchange.private, model)
    worst = [float(decibels.min()) if len(decibels) else float("nan") for decibels in (first, second)]
    return {
        "masked": len(first),
        "median": float(first.median()),
        "worst": worst[0],
        "median_second": float(second.median()),
        "worst_second": worst[1],
    }


def patch_bounds(upload: Upload, batch: PrivateBatch, model: VitClassifier) -> tuple[Tensor, Tensor]:
    """PSNR in dB (masked,) that the equations allow each masked patch: of the first block, and with the second."""
    if not batch.mask.any():
        return torch.empty(0), torch.empty(0)
    facts = linear_facts(upload, model)
    setup = equations(upload, facts, model)
    second = SecondBlock.of(upload, model, 1 + len(facts.mask))
    patches = to_patches((batch.clean.double() - model.mean.double()) / model.std.double(), model.patch_size)[0]
    truth = (patches - facts.known) @ facts.basis.mT
    tokens = setup.tokens(truth, torch.arange(len(truth)))
    attention = setup.block.attention(tokens, setup.block.keys_values(torch.cat([setup.class_token, tokens])))
    bounds = []
    for place in setup.hole.tolist():
        information, further = _information(setup, second, setup.start[place] + attention[place], truth[place])
        bounds.append([_psnr(information, setup, model), _psnr(information + further, setup, model)])
    first, both = torch.tensor(bounds).unbind(dim=1)
    return first, both


def _information(setup: PatchEquations, second: SecondBlock, offset: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """F (unknowns, unknowns) of the first block's equations and of the second's; z + o is ``offset`` + Z c."""

    def seen(coefficients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        after = (offset + setup.directions @ coefficients)[None]
        inputs = setup.block.norm2(after)
        activations = gelu(setup.block.fc1(inputs))
        return inputs, activations, second.inputs(after, activations)

    spans = (setup.inputs, setup.activations, second.span)
    expected = [float(span.expected(rows)) for span, rows in zip(spans, seen(truth), strict=True)]
    slopes = jacfwd(seen)(truth)
    outside = [span.remainder(slope[0].mT).mT for span, slope in zip(spans, slopes, strict=True)]
    parts = [
        slope.mT @ slope * span.outside / variance
        for slope, span, variance in zip(outside, spans, expected, strict=True)
    ]
    level = LEVEL_WEIGHT**2 * torch.outer(setup.level, setup.level) / (expected[0] + expected[1])
    return parts[0] + parts[1] + level, parts[2]


def _psnr(information: Tensor, setup: PatchEquations, model: VitClassifier) -> float:
    """Of the smallest mean squared error per pixel of a patch."""
    error = torch.linalg.eigvalsh(information).clamp(min=torch.finfo(torch.float64).tiny).reciprocal().sum()
    return float(-10 * torch.log10(error / setup.values * model.std.max().double() ** 2))


if __name__ == "__main__":
    run_function(main)
