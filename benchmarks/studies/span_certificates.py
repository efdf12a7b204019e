"""How often ``mjp_span`` certifies the patches of a picture, whether that is right, and how long it takes.

``python -m fedmjp.benchmarks.studies.span_certificates --data FOLDER --output DIR --pictures 20 --ratios 0.09,0.27``

One row per picture and mask ratio. A certificate is
wrong if any patch of the picture, the masked ones under the best assignment, is below 30 dB. It says nothing of their
order: *in order* counts the certified pictures that are exact in true order. Where the draw of a mask masks nothing,
there is nothing to certify, and the row counts nowhere in the summary.

Pictures are drawn from those that attacks have not seen before (``fedmjp.attacks.held_out``); ``--development`` asks
for those
alone that the attack was developed on.

Many certificates in little time: ``--model name=deit_tiny,image_size=64,patch_size=8 --ratios 0.06,0.09,0.12``.
"""

from typing import Annotated, Any

import pandas as pd
import torch
import typer
from scipy.optimize import linear_sum_assignment

from fedmjp.attacks.mjp.prior import MjpPrior
from fedmjp.attacks.mjp.span.attack import MjpSpan
from fedmjp.benchmarks.leaderboard.entries import EXACT
from fedmjp.benchmarks.leaderboard.statistics import share
from fedmjp.benchmarks.studies.span import Data, Model, Output, Ratios, keep_rows_of
from fedmjp.exchange import Exchange
from fedmjp.metrics import metric
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.records import Reconstruction
from fedmjp.running import run_function
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


def main(
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
    rows = keep_rows_of(
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
    """What the attack says of one upload, and the truth: ``worst_patch`` and PSNR in dB, of ``mjp_prior`` as well."""
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
    """A table: one line per model, weights and ratio."""
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


if __name__ == "__main__":
    run_function(main)
