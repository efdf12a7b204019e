"""What ``mjp_intersection`` makes of batches, epoch by epoch, of a client that deals its pictures anew each time.

``python -m benchmarks.studies.batches --pictures FOLDER``

A client has four batches of pictures. Every epoch it deals them into batches and uploads each batch's
gradient. After some epochs the server attacks the first two batches of the last one with all uploads of the
client: which of them show a picture is for the attack to find out. ``masks`` is "batch" for one mask per batch, as the
official code has it, or "picture"; ``company`` is "fixed" where every epoch has the same batches. Pictures
that the prior was measured on are left out.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import torch
import typer
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacks.mjp.facts import required_tensors
from attacks.mjp.intersection import MjpIntersection
from attacks.natural_patches import measured_on
from benchmarks.folder.study import keep_rows
from fedmjp import provenance
from fedmjp.config import ModelConfig
from fedmjp.data.batches import private_batch
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source, select
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.running import run_function
from fedmjp.seeds import torch_generator
from fedmjp.settings import Picture
from fedmjp.stacked import entrance_gradients
from fedmjp.threat import ThreatModel

FOLDER = Path("results/batches")
BATCHES = 4  # of a client, per epoch
ATTACKED = 2  # of the last epoch
EPOCHS = (1, 2, 4, 8, 12)
SEED = 0
EXACT = 40.0  # dB
MASK_RATIO = 0.27


@dataclass(frozen=True)
class Case:
    """A client's way of training: model, size of batches, whose masks, and who is shown with whom."""

    model: str
    image_size: int
    batch: int
    masks: Literal["batch", "picture", "none"]
    company: Literal["changing", "fixed"] = "changing"
    clients: int = 2

    @property
    def network(self) -> VitClassifier:
        """Untrained."""
        masked = self.masks != "none"
        return build_vit(ModelConfig(name=self.model, unknown_embedding=masked, image_size=self.image_size))


CASES = (
    *(Case("deit_small", 128, 2, masks) for masks in ("batch", "picture", "none")),
    Case("deit_small", 128, 2, "batch", "fixed"),
    Case("deit_small", 128, 2, "picture", "fixed"),
    *(Case("deit_small", 128, 4, masks) for masks in ("batch", "picture", "none")),
    *(Case("deit_small", 64, 8, masks) for masks in ("batch", "picture", "none")),
    *(Case("timm:deit_base_patch16_224", 224, 2, masks, clients=1) for masks in ("batch", "picture")),
)


def main(pictures: Annotated[str, typer.Option(help="FOLDER/CLASS/picture.")]) -> None:
    """Run every case and write the table."""
    torch.set_num_threads(1)
    rows = [row for case in CASES for row in _case(case, pictures)]
    frame = pd.DataFrame(rows)
    keys = ["model", "image_size", "batch", "masks", "company", "epochs"]
    table = frame.groupby(keys, sort=False).agg(
        pictures=("psnr", "size"),
        median=("psnr", "median"),
        exact=("psnr", lambda found: (found >= EXACT).mean()),
        seconds=("seconds", "mean"),
    )
    about = {
        "command": "python -m benchmarks.studies.batches --pictures FOLDER",
        "mask_ratio": MASK_RATIO,
        "seed": SEED,
        "psnr": f"of the clean picture, dB, under the best assignment of a batch's pictures; exact from {EXACT:g}",
        "seconds": "per batch that is attacked, one core",
    }
    keep_rows(FOLDER, frame, {**about, **provenance.environment()})
    typer.echo(table.round(2).to_string())


def _case(case: Case, source: str) -> Iterator[dict[str, Any]]:
    network = case.network
    whole = open_source(source, size=case.image_size, classes=1000)
    count = BATCHES * case.batch
    chosen = select(whole, case.clients * count, seed=SEED, leave_out=measured_on)
    for client in range(case.clients):
        own = [chosen.load(entry) for entry in chosen.entries[client * count : (client + 1) * count]]
        shown = list(_shown(case, own, network))
        uploads = [_upload(network, batch) for batch in shown]
        for epochs in EPOCHS:
            kept = list(zip(shown, uploads, strict=True))[: epochs * BATCHES]
            for row in _attacked(kept, network):
                yield {**_named(case), "client": client, "epochs": epochs, **row}


def _named(case: Case) -> dict[str, Any]:
    return {
        "model": case.model,
        "image_size": case.image_size,
        "batch": case.batch,
        "masks": case.masks,
        "company": case.company,
    }


def _shown(case: Case, pictures: Sequence[LabelledPicture], network: VitClassifier) -> Iterator[PrivateBatch]:
    """What the client computes its uploads from, in their order."""
    dealing = torch_generator(SEED, "company", *(picture.name for picture in pictures))
    order = list(range(len(pictures)))
    for epoch in range(max(EPOCHS)):
        if case.company == "changing":
            order = torch.randperm(len(pictures), generator=dealing).tolist()
        for first in range(0, len(order), case.batch):
            members = [pictures[place] for place in order[first : first + case.batch]]
            yield _puzzled(case, members, network, epoch)


def _puzzled(case: Case, members: Sequence[LabelledPicture], network: VitClassifier, epoch: int) -> PrivateBatch:
    return private_batch(
        members,
        grid=network.grid,
        mask_ratio=0.0 if case.masks == "none" else MASK_RATIO,
        gradient_of=Picture.CLEAN if case.masks == "none" else Picture.SHUFFLED,
        seed=SEED,
        number=epoch,
        one_mask=case.masks == "batch",
    )


def _upload(network: VitClassifier, batch: PrivateBatch) -> Upload:
    gradients = entrance_gradients(network, [batch], required_tensors(network))[0]
    return Upload(gradients, "gradient", len(batch.pictures), 1, 0, "")


def _attacked(kept: Sequence[tuple[PrivateBatch, Upload]], network: VitClassifier) -> Iterator[dict[str, Any]]:
    """Rows of the pictures of the last epoch's first batches."""
    first = len(kept) - BATCHES
    threat = ThreatModel(batch_size=kept[0][1].num_examples)
    for place in range(first, first + ATTACKED):
        others = tuple(upload for index, (_, upload) in enumerate(kept) if index != place)
        batch, upload = kept[place]
        began = time.thread_time()
        made = MjpIntersection().reconstruct(
            [replace(upload, others=others)], network, threat, generator=torch_generator(SEED, "attack")
        )[0]
        seconds = time.thread_time() - began
        for name, psnr in zip(batch.pictures, _best(made.images, batch.clean), strict=True):
            yield {"picture": name, "psnr": psnr, "uploads": made.diagnostics["uploads_linked"], "seconds": seconds}


def _best(found: Tensor, clean: Tensor) -> list[float]:
    """PSNR of each clean picture under the assignment of largest sum."""
    psnr = metric("psnr").function
    scores = torch.stack([psnr(found, each.expand_as(found)) for each in clean])
    rows, columns = linear_sum_assignment(scores.numpy(), maximize=True)
    return [float(scores[row, column]) for row, column in zip(rows, columns, strict=True)]


if __name__ == "__main__":
    run_function(main)
