"""How often shuffled patches can be put back in order, and what that is worth.

``python -m benchmarks.studies.order --pictures FOLDER --n 50 --output results/order``

The hole is known, as an MJP upload tells it. The patches are exact, or what ``oracle_patch_embedding``
makes of uploads that were degraded: a bound, as no server sees every token's gradient. Uploads that it refuses,
their mask being in doubt, have no row and are counted in the manifest. Pictures that the prior was measured on are
left out, and unless asked for those that attacks on MJP were developed on.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer
from torch import Tensor

from attacks.patch_embedding import OraclePatchEmbedding
from attacks.reassembly import reassemble
from benchmarks.folder.study import keep_rows
from benchmarks.studies.span_certificates import selection as drawn
from fedmjp import provenance
from fedmjp.config import ModelConfig
from fedmjp.data.batches import private_batch
from fedmjp.data.selection import Selection, open_source
from fedmjp.defences.base import Client
from fedmjp.errors import AttackFailedError
from fedmjp.jigsaw import rearrange
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.randomness import SeededRandomness
from fedmjp.records import Upload
from fedmjp.running import run_function
from fedmjp.seeds import torch_generator
from fedmjp.settings import Picture
from fedmjp.stacked import entrance_gradients
from fedmjp.threat import ThreatModel

SEED = 0  # of weights, puzzles and search
MASK_RATIOS = (0.09, 0.27, 0.5, 0.9)
EXACT = "exact"
DEGRADED = {
    "oracle, float16": ThreatModel.parse({"defences": "round:precision=float16"}),
    "oracle, noise 0.0001": ThreatModel.parse({"defences": "gaussian:noise=0.0001"}),
    "oracle, noise 0.001": ThreatModel.parse({"defences": "gaussian:noise=0.001"}),
}
# An exact picture has 200 dB, which a mean would be made of; rounding to 8 bits alone leaves 59 dB.
CAP = 60.0


@dataclass(frozen=True)
class Row:
    """One picture with one puzzle. ``right`` is the share of masked places that show their own patch again."""

    patches: str
    mask_ratio: float
    picture: str
    masked: int
    right: float
    perfect: bool
    psnr_before: float
    psnr_after: float
    ssim_before: float
    ssim_after: float
    seconds: float


def main(
    pictures: Annotated[Path, typer.Option(help="FOLDER/CLASS/picture.")],
    output: Annotated[Path, typer.Option(help="Folder that the figures go to.")],
    n: Annotated[int, typer.Option(help="Number of pictures.")] = 50,
    model: Annotated[str, typer.Option(help="Untrained, for the reconstructions.")] = "deit_small",
    image_size: Annotated[int, typer.Option(help="Pixels per side.")] = 224,
    patch_size: Annotated[int, typer.Option(help="Pixels per side of a patch.")] = 16,
    development: Annotated[bool, typer.Option(help="The pictures that attacks were developed on.")] = False,
) -> None:
    """Shuffle, reconstruct, reassemble, score in setting c."""
    config = ModelConfig(name=model, unknown_embedding=True, image_size=image_size, patch_size=patch_size, seed=SEED)
    source = open_source(str(pictures), size=image_size, classes=config.classes)
    selection = drawn(source, n, development=development)
    network = build_vit(config)
    rows = [row for ratio in MASK_RATIOS for row in _rows(selection, network, ratio)]
    frame = pd.DataFrame(asdict(row) for row in rows)
    kept = frame.groupby(["patches", "mask_ratio"])["picture"].count()
    refused = {
        f"{kind} at {ratio:g}": int(kept[EXACT, ratio] - kept.get((kind, ratio), 0))
        for kind in DEGRADED
        for ratio in MASK_RATIOS
        if (EXACT, ratio) in kept
    }
    about = {
        "command": "python -m benchmarks.studies.order --pictures FOLDER --output DIR"
        f" --n {n} --model {model} --image-size {image_size} --patch-size {patch_size}"
        f"{' --development' if development else ''}",
        "model": config.model_dump(mode="json"),
        "seed": SEED,
        "pictures": [entry.name for entry in selection.entries],
        "psnr": f"setting c, dB, each capped at {CAP:g}; seconds are of reassembly alone",
        "refused": refused,
        "degraded": {name: threat.model_dump(mode="json") for name, threat in DEGRADED.items()},
    }
    keep_rows(output, frame, {**about, **provenance.environment()})
    means = frame.drop(columns="picture").groupby(["patches", "mask_ratio"], sort=False).mean()
    typer.echo(means.round(3).to_string())
    typer.echo("Refused: " + ", ".join(f"{count} of {cell}" for cell, count in refused.items() if count))


def _rows(selection: Selection, model: VitClassifier, mask_ratio: float) -> list[Row]:
    rows = []
    for entry in selection.entries:
        batch = private_batch(
            [selection.load(entry)], grid=model.grid, mask_ratio=mask_ratio, gradient_of=Picture.SHUFFLED, seed=SEED
        )
        if not batch.mask.any():  # the generator of masks gives empty ones too, at small ratios
            continue
        generator = torch_generator(SEED, "reassembly", mask_ratio, entry.name)
        shown = {EXACT: batch.shuffled, **_reconstructions(batch, model, generator)}
        rows += [_row(kind, images, batch, mask_ratio, generator) for kind, images in shown.items()]
    return rows


def _reconstructions(batch: PrivateBatch, model: VitClassifier, generator: torch.Generator) -> dict[str, Tensor]:
    """What an attacker that sees every token's gradient has of the shuffled picture, by kind of upload not refused."""
    attack = OraclePatchEmbedding()
    clean = entrance_gradients(model, [batch], attack.tensors(model))[0]
    found = {}
    for kind, threat in DEGRADED.items():
        randomness = SeededRandomness(generator.initial_seed())
        sent = threat.pipeline.protect(clean, Client("gradient"), randomness=randomness)
        upload = Upload(sent, "gradient", 1, 1, 0, "")
        with suppress(AttackFailedError):
            found[kind] = attack.reconstruct([upload], model, threat, generator=generator)[0].images
    return found


def _row(kind: str, images: Tensor, batch: PrivateBatch, mask_ratio: float, generator: torch.Generator) -> Row:
    patches = batch.mask.shape[1]
    grid = round(patches**0.5)
    size = images.shape[-1] // grid
    mask, clean = batch.mask[0], to_patches(batch.clean, size)[0]
    began = time.perf_counter()
    source = reassemble(to_patches(images, size)[0], mask, grid, size, generator=generator)
    seconds = time.perf_counter() - began
    # Equal patches are equally right.
    right = (clean[batch.source[0][source]] == clean).all(dim=1)[mask].double().mean().item()
    scores = _scores([images, rearrange(images, source[None])], batch.clean)
    return Row(kind, mask_ratio, batch.pictures[0], int(mask.sum()), right, right == 1, *scores, seconds)


def _scores(images: Sequence[Tensor], clean: Tensor) -> tuple[float, float, float, float]:
    """PSNR before and after, SSIM before and after."""
    psnr = [min(CAP, metric("psnr").function(each, clean).item()) for each in images]
    ssim = [metric("ssim").function(each, clean).item() for each in images]
    return psnr[0], psnr[1], ssim[0], ssim[1]


if __name__ == "__main__":
    run_function(main)
