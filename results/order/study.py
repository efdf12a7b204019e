"""How often shuffled patches can be put back in order, and what that is worth.

``python results/order/study.py --pictures FOLDER --n 50 --output results/order``

The hole is known, as an MJP upload tells it. The patches are exact, or what ``oracle_patch_embedding``
makes of uploads that were degraded: a bound, as no server sees every token's gradient. Rows of uploads that it refuses,
their mask being in doubt, have the reason as ``refusal`` and no figures. Pictures that attacks have seen before are
left out, and unless asked for those that attacks on MJP were developed on.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor

from fedmjp.attacks.patch_embedding import OraclePatchEmbedding
from fedmjp.attacks.reassembly import reassemble
from fedmjp.benchmarks.scripts import Pictures, keep_table, select_unseen, timed
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source
from fedmjp.defences.base import Client
from fedmjp.errors import AttackFailedError
from fedmjp.exchange import prepare_private
from fedmjp.jigsaw import rearrange
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.private import PrivateBatch
from fedmjp.randomness import SeededRandomness
from fedmjp.records import Upload
from fedmjp.running import run_function
from fedmjp.scenario import Scenario
from fedmjp.seeds import torch_generator
from fedmjp.stacked import entrance_gradients
from fedmjp.threat import ThreatModel

SEED = 0  # of weights, puzzles and search
MASK_RATIOS = (0.09, 0.27, 0.5, 0.9)
DEGRADED = {
    "oracle, float16": ThreatModel.parse({"defences": "round:precision=float16"}),
    "oracle, noise 0.0001": ThreatModel.parse({"defences": "gaussian:noise=0.0001"}),
    "oracle, noise 0.001": ThreatModel.parse({"defences": "gaussian:noise=0.001"}),
}
# An exact picture has 200 dB, which a mean would be made of; rounding to 8 bits alone leaves 59 dB.
CAP = 60.0


def main(
    pictures: Pictures,
    output: Annotated[Path, typer.Option(help="Folder that the figures go to.", metavar="DIR")],
    n: Annotated[int, typer.Option(help="Number of pictures.")] = 50,
    model: Annotated[str, typer.Option(help="Untrained, for the reconstructions.")] = "deit_small",
    image_size: Annotated[int, typer.Option(help="Pixels per side.")] = 224,
    patch_size: Annotated[int, typer.Option(help="Pixels per side of a patch.")] = 16,
    development: Annotated[bool, typer.Option(help="The pictures that attacks were developed on.")] = False,
) -> None:
    """Shuffle, reconstruct, reassemble, score in setting c."""
    config = {"name": model, "image_size": image_size, "patch_size": patch_size}
    scenarios = {
        ratio: Scenario.parse({"model": config, "defences": f"mjp:mask_ratio={ratio}", "seed": SEED})
        for ratio in MASK_RATIOS
    }
    network = build_vit(scenarios[MASK_RATIOS[0]].network)
    source = open_source(pictures, size=image_size, classes=network.backbone.num_classes)
    selection = select_unseen(source, n, development=development)
    frame = pd.DataFrame(
        {"mask_ratio": ratio, **row}
        for ratio, scenario in scenarios.items()
        for entry in selection.entries
        for row in _rows(scenario, ratio, selection.load(entry), network)
    ).convert_dtypes()
    cells = frame.groupby(["patches", "mask_ratio"], sort=False)
    refused = cells["refusal"].count()
    counts = refused[refused > 0].reset_index().to_dict("records")
    about = {
        "model": scenarios[MASK_RATIOS[0]].network.model_dump(mode="json"),
        "seed": SEED,
        "pictures": [entry.name for entry in selection.entries],
        "psnr": f"setting c, dB, each capped at {CAP:g}; seconds are of reassembly alone",
        "refused": {f"{cell['patches']} at {cell['mask_ratio']:g}": cell["refusal"] for cell in counts},
        "degraded": {name: threat.model_dump(mode="json") for name, threat in DEGRADED.items()},
    }
    keep_table(output, frame, about)
    typer.echo(cells.mean(numeric_only=True).round(3).assign(refused=refused).to_string())


def _rows(
    scenario: Scenario, mask_ratio: float, picture: LabelledPicture, model: VitClassifier
) -> Iterator[dict[str, Any]]:
    batch = prepare_private(scenario, [picture], 0)
    masked = int(batch.mask.sum())
    if not masked:  # the generator of masks gives empty ones too, at small ratios
        return
    generator = torch_generator(SEED, "reassembly", mask_ratio, picture.name)
    attack = OraclePatchEmbedding()
    clean = entrance_gradients(model, [batch], attack.tensors(model))[0]
    cell = {"picture": picture.name, "masked": masked}
    yield {"patches": "exact", **cell, **_reassembled(batch.shuffled, batch, generator)}
    for kind, threat in DEGRADED.items():
        randomness = SeededRandomness(generator.initial_seed())
        sent = threat.pipeline.protect(clean, Client("gradient"), randomness=randomness)
        try:
            (made,) = attack.run([Upload(sent, "gradient", 1, 1, 0, "")], model, threat, generator=generator)
        except AttackFailedError as error:
            yield {"patches": kind, **cell, "refusal": str(error)}
        else:
            yield {"patches": kind, **cell, **_reassembled(made.images, batch, generator)}


def _reassembled(images: Tensor, batch: PrivateBatch, generator: torch.Generator) -> dict[str, Any]:
    """How much of it is right again (the share of masked places that show their own patch), and what that gains."""
    grid = round(batch.mask.shape[1] ** 0.5)
    size = images.shape[-1] // grid
    mask, clean = batch.mask[0], to_patches(batch.clean, size)[0]
    shown = to_patches(images, size)[0]
    source, seconds = timed(partial(reassemble, shown, mask, grid, size, generator=generator))
    # Equal patches are equally right.
    right = (clean[batch.source[0][source]] == clean).all(dim=1)[mask].double().mean().item()
    figures: dict[str, Any] = {"right": right, "perfect": right == 1}
    for when, shown_then in (("before", images), ("after", rearrange(images, source[None]))):
        figures[f"psnr_{when}"] = min(CAP, metric("psnr").function(shown_then, batch.clean).item())
        figures[f"ssim_{when}"] = metric("ssim").function(shown_then, batch.clean).item()
    return {**figures, "seconds": seconds, "refusal": None}


if __name__ == "__main__":
    run_function(main)
