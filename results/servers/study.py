"""What servers that change weights see of large batches, of doubled classes, and patch by patch.

``python results/servers/study.py --pictures FOLDER``

For measuring one's own deployment: everything is computed here. Three questions to DeiT-S with initial weights:

- ``class``: class fishing of batches of 256, whose labels are read off an honest upload first; a row per upload.
- ``feature``: feature fishing of batches of 16 in which two pictures have one label; a row per upload, with the better
  of the two scores in ``psnr`` and the other in ``other``. One of them comes out, nobody knows which.
- ``tokens``: token imprint of batches of 1 to 64; a row per upload with the share of patches that were given in the
  right picture and place, those that were wrong, and ``bound``, exp(-tokens / bins). A patch is right if its mean
  squared error to what the embedding keeps of the original is below ``RIGHT``.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
import typer

from fedmjp.attacks.adversary import Adversary
from fedmjp.attacks.held_out import developed_on
from fedmjp.attacks.token_imprint import by_picture, read_tokens
from fedmjp.benchmarks.scripts import Pictures, keep_table, timed
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import Selection, open_source, select
from fedmjp.exchange import Exchange
from fedmjp.metrics.pictures import psnr
from fedmjp.models import names
from fedmjp.models.build import build_vit, with_weights
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.records import Reconstruction
from fedmjp.running import run_function
from fedmjp.scenario import Scenario
from fedmjp.threat import SCOPE

FOLDER = Path("results/servers")
SEED = 0
FISHED = 256  # pictures of a batch
DOUBLED, UPLOADS = 16, 4  # pictures of a batch with a doubled class, and how many batches
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # pictures of a batch whose tokens are printed
PRINTED = 16  # pictures of each of these sizes, at least
RIGHT = 1e-3  # of a range of 1


def main(pictures: Pictures) -> None:
    """Run everything and write the table."""
    source = open_source(pictures, size=224, classes=1000)
    count = max(FISHED, DOUBLED * UPLOADS, *BATCHES)
    chosen = select(source, count, seed=SEED, leave_out=developed_on)
    frame = pd.DataFrame(itertools.chain(_class(chosen), _feature(chosen), _tokens(chosen)))
    about = {"seed": SEED, "psnr": "of the clean picture, dB", "right": RIGHT, "scope": SCOPE}
    keep_table(FOLDER, frame, about)
    columns = ["pictures", "psnr", "other", "placed", "wrong", "bound", "seconds"]
    typer.echo(frame.groupby(["server", "batch"], sort=False)[columns].mean(numeric_only=True).round(3).to_string())


def _scenario(server: str, batch: int) -> Scenario:
    values = {"model": "deit_small", "server": server, "batch_size": batch, "pictures_per_client": batch}
    return Scenario.parse({**values, "seed": SEED})


def _loaded(chosen: Selection, first: int, batch: int) -> list[LabelledPicture]:
    return [chosen.load(entry) for entry in chosen.entries[first : first + batch]]


def _sent(scenario: Scenario, made: Exchange) -> VitClassifier:
    return with_weights(build_vit(scenario.network), made.changed[0])


def _class(chosen: Selection) -> Iterator[dict[str, Any]]:
    scenario, batch = _scenario("class_fishing", FISHED), _loaded(chosen, 0, FISHED)
    wanted = scenario.wanted([picture.label for picture in batch])
    (best, *_), seconds = _recovered(scenario, batch, wanted)
    yield {"server": "class_fishing", "batch": FISHED, "pictures": len(wanted), "psnr": best, "seconds": seconds}


def _feature(chosen: Selection) -> Iterator[dict[str, Any]]:
    scenario = _scenario("feature_fishing", DOUBLED)
    for upload in range(UPLOADS):
        first, *others = _loaded(chosen, upload * DOUBLED, DOUBLED)
        batch = [first, *others[:-1], replace(others[-1], label=first.label)]
        wanted = scenario.wanted([picture.label for picture in batch])
        (best, other), seconds = _recovered(scenario, batch, wanted)
        shown = {"psnr": best, "other": other, "seconds": seconds}
        yield {"server": "feature_fishing", "batch": DOUBLED, "pictures": len(wanted), **shown}


def _recovered(
    scenario: Scenario, batch: Sequence[LabelledPicture], wanted: Sequence[int]
) -> tuple[list[float], float]:
    """Return what the closed form scores on wanted pictures, best first, and its seconds."""
    made = scenario.exchange(batch)
    adversary = Adversary(_sent(scenario, made), scenario.threat, SEED)
    (made_of_it,), seconds = timed(
        lambda: adversary.reconstruct("patch_embedding", [made.upload], {}, on_progress=lambda *_: None)
    )
    images = cast(Reconstruction, made_of_it).images
    return sorted((float(psnr(images, batch[place].image[None])[0]) for place in wanted), reverse=True), seconds


def _tokens(chosen: Selection) -> Iterator[dict[str, Any]]:
    for size in BATCHES:
        scenario = _scenario("token_imprint", size)
        for first in range(0, max(PRINTED, size), size):
            batch = _loaded(chosen, first, size)
            made = scenario.exchange(batch)
            model = _sent(scenario, made)
            yield {"server": "token_imprint", "batch": size, "pictures": size, **_placed(made, model, batch)}


def _placed(made: Exchange, model: VitClassifier, batch: Sequence[LabelledPicture]) -> dict[str, float]:
    """How many of the patches of a batch are given in the right picture and place, and how many are wrong."""
    printed, seconds = timed(lambda: read_tokens(made.upload, model))
    images = torch.stack([picture.image for picture in batch])
    embedding = model.get_parameter(names.PATCH_WEIGHT).detach().flatten(1).double()
    patches = to_patches((images - model.mean) / model.std, model.patch_size).double()
    kept = patches @ embedding.T @ torch.linalg.pinv(embedding).T
    scale = model.std.flatten().double().repeat_interleave(model.patch_size**2)
    right = wrong = 0
    for members in by_picture(printed, len(batch)):
        errors = ((printed.patches[members] - kept[:, printed.places[members]]) * scale).square().mean(dim=2)
        picture = int(errors.median(dim=1).values.argmin())
        right += int((errors[picture] < RIGHT).sum())
        wrong += int((errors[picture] >= RIGHT).sum())
    tokens = len(batch) * model.grid**2
    bins = sum(len(block.mlp.fc1.bias) for block in model.backbone.blocks[:-1])
    bound = math.exp(-tokens / bins)
    return {"placed": right / tokens, "wrong": float(wrong), "bound": bound, "seconds": seconds}


if __name__ == "__main__":
    run_function(main)
