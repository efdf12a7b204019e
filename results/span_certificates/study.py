"""Two questions about ``mjp_span``: are its certificates right, and how exactly does one upload determine a picture?

``python results/span_certificates/study.py certificates --data FOLDER --output DIR --pictures 20 --ratios 0.09,0.27``
asks how often ``mjp_span`` certifies the patches of a picture, whether that is right, and how long it takes. A
certificate is wrong if any patch of the picture, the masked ones under the best assignment, is below 30 dB. It says
nothing of their order: *in order* counts the certified pictures that are exact in true order. Where the draw of a mask
masks nothing, there is nothing to certify, and the row counts nowhere in the summary. Many certificates in little time:
``--model name=deit_tiny,image_size=64,patch_size=8 --ratios 0.06,0.09,0.12``.

``python results/span_certificates/study.py information --data FOLDER --output DIR --pictures 20 --ratios 0.09,0.27``
asks how exactly one upload would determine the masked patches if the equations of ``mjp_span`` were solved: a patch
that the attack does not find may be hidden, or only hard to find. At the true tokens, with the attention's output
known, every equation measures a patch's coefficients with the noise that rounding of the upload gives it
(``Span.expected``). No unbiased estimate has a smaller covariance than F^-1 with F = sum_i J_i^T J_i / variance_i
(Cramér and Rao); its trace is the squared error of the patch. The bound holds near the truth: other solutions far away
may exist, and it does not say how to get there. The ``second`` figures add the equations of the second block: its
input at a token, z2 + MLP(z2), depends on that token alone once z2 = z + o is given, and after norm1 lies in the span
that the gradient of its qkv has.

Both write one row per picture and mask ratio, of pictures that attacks have not seen before
(``fedmjp.attacks.held_out``); ``--development`` takes those that the attack was developed on instead.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.func import jacfwd

from fedmjp import provenance
from fedmjp.attacks.base import on_device
from fedmjp.attacks.first_block.block import Linear, Norm, gelu, linear_of, norm_of
from fedmjp.attacks.first_block.equations import Span
from fedmjp.attacks.mjp.facts import linear_facts
from fedmjp.attacks.mjp.prior import MjpPrior
from fedmjp.attacks.mjp.span.attack import MjpSpan
from fedmjp.attacks.mjp.span.equations import LEVEL_WEIGHT, PatchEquations, equations
from fedmjp.benchmarks.leaderboard.statistics import share
from fedmjp.benchmarks.scripts import keep_table, select_unseen
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.data.selection import open_source
from fedmjp.errors import ConfigError
from fedmjp.exchange import Exchange
from fedmjp.metrics import EXACT, metric
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction, Upload
from fedmjp.running import run
from fedmjp.scenario import Scenario
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel

RIGHT = 30.0  # dB that every patch of a certified picture must reach: what a certificate promises
CERTIFICATE = {
    "content_certified": "content_certified",
    "found": "found_patches",
    "residual_median": "residual_median",
    "residual_max": "residual_max",
    "expected_error": "expected_error",
}
NEXT_QKV = "backbone.blocks.1.attn.qkv.weight"
NAMED = ("ratio", "picture")
DIGITS = 16  # of the digest of the code that made a row
ROWS = "rows.csv"
Data = Annotated[str, typer.Option(help="A picture source.", metavar="FOLDER")]
Output = Annotated[Path, typer.Option(help=f"Folder of the study; its {ROWS} is added to.", metavar="DIR")]
Ratios = Annotated[str, typer.Option(help="Mask ratios, comma-separated.")]
Model = Annotated[str, typer.Option(help="KEY=VALUE,... of the model; weights=FILE for trained ones.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def certificates(
    data: Data,
    output: Output,
    pictures: Annotated[int, typer.Option()] = 50,
    ratios: Ratios = "0.09,0.27",
    seconds: Annotated[float, typer.Option(help="Budget per upload.")] = 60.0,
    model: Model = "",
    after: Annotated[int, typer.Option(help="Pictures of the draw to pass over, which another run had.")] = 0,
    development: Annotated[bool, typer.Option(help="The pictures that the attack was developed on.")] = False,
) -> None:
    """Attack what the folder lacks, and print a summary."""
    rows = measure_rows(
        output,
        attacked,
        options={"seconds_allowed": seconds},
        model=model,
        data=data,
        count=pictures,
        ratios=ratios,
        after=after,
        development=development,
    )
    typer.echo(summary(rows))


def attacked(exchange: Exchange, network: VitClassifier, *, seconds_allowed: float) -> dict[str, Any]:
    """Compare what an attack states with the truth: ``worst_patch``, PSNR in dB, and that of ``mjp_prior``."""
    made, prior = (
        attack.run([exchange.upload], network, ThreatModel(), generator=torch_generator(0, "mjp_span"))[0]
        for attack in (MjpSpan({"seconds": seconds_allowed}), MjpPrior())
    )
    psnr, diagnostics = metric("psnr").function, made.diagnostics
    return {
        "masked": int(diagnostics["masked_patches"]),
        **{column: diagnostics.get(name) for column, name in CERTIFICATE.items()},  # empty where nothing is masked
        "worst_patch": worst_patch(made, exchange.private, network.patch_size),
        "psnr": float(psnr(made.images, exchange.private.clean)),
        "psnr_prior": float(psnr(prior.images, exchange.private.clean)),
        "seconds": diagnostics["seconds"],
    }


def worst_patch(made: Reconstruction, batch: PrivateBatch, patch_size: int) -> float:
    """PSNR of the worst patch, masked ones under the assignment of least squared error."""
    mask = batch.mask[0]
    recovered, true = (to_patches(images.double(), patch_size)[0] for images in (made.images, batch.clean))
    errors = (recovered - true).square().mean(dim=1)[~mask]
    distances = torch.cdist(recovered[mask], true[mask], compute_mode="donot_use_mm_for_euclid_dist")
    between = distances.square() / recovered.shape[1]
    rows, columns = linear_sum_assignment(between.numpy())
    worst = torch.cat([errors, between[rows, columns]]).max().clamp(min=1e-12)
    return float(-10 * torch.log10(worst))


def summary(rows: pd.DataFrame) -> str:
    """Build a table: one line per model, weights and ratio."""
    lines = [
        "| model | weights | mask ratio | n | content certified | wrong | in order | PSNR | mjp_prior | s | longest |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for group, members in rows[rows["masked"] > 0].groupby(["model", "weights", "ratio"]):
        certificates = members[members["content_certified"] == 1]
        certified = share(len(certificates), len(members))
        cells = [
            *group,
            len(members),
            f"{certified.share:.2f} ({certified.low:.2f} to {certified.high:.2f})",
            (certificates["worst_patch"] < RIGHT).sum(),
            (certificates["psnr"] >= EXACT).sum(),
            *(f"{mean:.1f}" for mean in members[["psnr", "psnr_prior", "seconds"]].mean()),
            f"{members['seconds'].max():.1f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


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


@app.command()
def information(
    data: Data,
    output: Output,
    pictures: Annotated[int, typer.Option()] = 20,
    ratios: Ratios = "0.03,0.09,0.27,0.5,0.9",
    model: Model = "",
) -> None:
    """Compute what the folder lacks, and print a summary."""
    rows = measure_rows(output, bounds, options={}, model=model, data=data, count=pictures, ratios=ratios)
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
    truth = (patches - facts.outside) @ facts.basis.mT
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


def measure_rows(
    output: Path,
    measure: Callable[..., dict[str, Any]],
    *,
    options: Mapping[str, Any],
    model: str,
    data: str,
    count: int,
    ratios: str,
    after: int = 0,
    development: bool = False,
) -> pd.DataFrame:
    """Measure a row per picture and mask ratio, each appended when it is there, and keep all of them as a study.

    Rows that the folder has of the same code and options are not measured again, others are left out.

    Args:
        output: Folder of the study.
        measure: Gives the figures of one upload, an exchange and its network, with the options as keywords.
        options: Of ``measure``, with JSON-ready values.
        model: Comma-separated KEY=VALUE pairs of ``ModelConfig``; ``weights`` names a file.
        data: A picture source.
        count: Of the pictures.
        ratios: Comma-separated mask ratios.
        after: How many of the draw are passed over first.
        development: Whether to take the pictures that the attack was developed on.

    Returns:
        The rows.

    Raises:
        ConfigError: If model or ratios cannot be read.
    """
    torch.set_num_threads(1)
    wanted, given = _read_ratios(ratios), _read_options(model)
    weights = given.pop("weights", None)
    trained = {} if weights is None else {"weights": Checkpoint.of(weights)}
    config = ModelConfig.parse({"name": "deit_small", "unknown_embedding": True, **given, **trained})
    sizes = (f"{key}={value}" for key, value in sorted(given.items()) if key != "name")
    label = {
        "code": provenance.code_digest()[:DIGITS],
        "model": " ".join([config.name, *sizes]),
        "weights": "untrained" if weights is None else "/".join(Path(weights).parts[-2:]),
        **options,
    }
    source = open_source(data, size=config.image_size, classes=config.classes)
    chosen = select_unseen(source, after + count, development=development)
    entries = chosen.entries[after:]
    network = build_vit(config)
    path = output / ROWS
    done = set(_rows_of(path, label)[list(NAMED)].itertuples(index=False, name=None)) if path.exists() else set()
    output.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        for ratio in wanted:
            if (ratio, entry.name) not in done:
                scenario = Scenario.parse({"model": config, "defences": f"mjp:mask_ratio={ratio}"})
                exchange = scenario.exchange([chosen.load(entry)], model=network)
                row = {**label, "ratio": ratio, "picture": entry.name, **measure(exchange, network, **options)}
                pd.DataFrame([row]).to_csv(path, mode="a", header=not path.exists(), index=False)
    rows = _rows_of(path, label)
    rows = rows[rows["picture"].isin([entry.name for entry in entries]) & rows["ratio"].isin(wanted)]
    keep_table(output, rows, {"pictures": count, "after": after, "mask_ratios": wanted})
    return rows


def _rows_of(path: Path, label: Mapping[str, Any]) -> pd.DataFrame:
    """Those of a file whose columns say what ``label`` says."""
    texts = [name for name, value in label.items() if isinstance(value, str)]
    rows = pd.read_csv(path, dtype=dict.fromkeys([*texts, "picture"], str), float_precision="round_trip")
    alike = rows.reindex(columns=list(label)).eq(pd.Series(label, dtype=object)).all(axis=1)
    return rows[alike]


def _read_options(text: str) -> dict[str, str]:
    options = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--model: {pair!r} is not KEY=VALUE, such as name=deit_tiny")
        options[key] = value
    return options


def _read_ratios(text: str) -> list[float]:
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        ratios = [-1.0]
    if not all(0 <= ratio <= 1 for ratio in ratios):
        raise ConfigError(f"--ratios {text!r} are no mask ratios: give numbers from 0 to 1, such as 0.09,0.27")
    return ratios


if __name__ == "__main__":
    run(app)
