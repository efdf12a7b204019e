"""What ``mjp_intersection`` makes of batches, epoch by epoch, of a client that deals its pictures anew each time.

``python results/batches/study.py --pictures FOLDER``

A client has four batches of pictures. Every epoch it deals them into batches and uploads each batch's
gradient. After some epochs the server attacks the first two batches of the last one with all uploads of the
client: which of them show a picture is for the attack to find out. ``masks`` is "batch" for one mask per batch, as the
official code has it, or "picture"; ``company`` is "fixed" where every epoch has the same batches. Pictures
that attacks have seen before are left out.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import typer
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedmjp.attacks.mjp.facts import required_tensors
from fedmjp.attacks.mjp.intersection import MjpIntersection
from fedmjp.benchmarks.scripts import Pictures, keep_table, load_unseen
from fedmjp.data.pictures import LabelledPicture
from fedmjp.exchange import Exchange, make_upload, prepare_private
from fedmjp.jigsaw import rearrange
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.running import run_function
from fedmjp.scenario import Scenario
from fedmjp.seeds import torch_generator
from fedmjp.stacked import entrance_gradients

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
    def scenario(self) -> Scenario:
        """Of one upload."""
        return Scenario.parse(
            {
                "model": {"name": self.model, "image_size": self.image_size},
                "defences": () if self.masks == "none" else f"mjp:mask_ratio={MASK_RATIO}",
                "batch_size": self.batch,
                "pictures_per_client": self.batch,
                "seed": SEED,
            }
        )


CASES = (
    *(Case("deit_small", 128, 2, masks) for masks in ("batch", "picture", "none")),
    Case("deit_small", 128, 2, "batch", "fixed"),
    Case("deit_small", 128, 2, "picture", "fixed"),
    *(Case("deit_small", 128, 4, masks) for masks in ("batch", "picture", "none")),
    *(Case("deit_small", 64, 8, masks) for masks in ("batch", "picture", "none")),
    *(Case("timm:deit_base_patch16_224", 224, 2, masks, clients=1) for masks in ("batch", "picture")),
)


def main(pictures: Pictures) -> None:
    """Run every case and write the table."""
    torch.set_num_threads(1)
    frame = pd.DataFrame(row for case in CASES for row in _rows(case, pictures))
    keys = ["model", "image_size", "batch", "masks", "company", "epochs"]
    table = frame.groupby(keys, sort=False).agg(
        pictures=("psnr", "size"),
        median=("psnr", "median"),
        exact=("psnr", lambda decibels: (decibels >= EXACT).mean()),
        seconds=("seconds", "mean"),
    )
    about = {
        "mask_ratio": MASK_RATIO,
        "seed": SEED,
        "psnr": f"of the clean picture, dB, under the best assignment of a batch's pictures; exact from {EXACT:g}",
        "seconds": "per batch that is attacked, one core",
    }
    keep_table(FOLDER, frame, about)
    typer.echo(table.round(2).to_string())


def _rows(case: Case, source: str) -> Iterator[dict[str, Any]]:
    scenario, count = case.scenario, BATCHES * case.batch
    network = build_vit(scenario.network)
    chosen = load_unseen(source, case.clients * count, scenario.model, SEED)
    cell = {name: getattr(case, name) for name in ("model", "image_size", "batch", "masks", "company")}
    for client in range(case.clients):
        client_pictures = chosen[client * count : (client + 1) * count]
        made = [_exchange(case, company, network, epoch) for epoch, company in _companies(case, client_pictures)]
        for epochs in EPOCHS:
            for row in _attacked(made[: epochs * BATCHES], network, scenario):
                yield {**cell, "client": client, "epochs": epochs, **row}


def _companies(case: Case, pictures: Sequence[LabelledPicture]) -> Iterator[tuple[int, list[LabelledPicture]]]:
    """Return what the client computes its uploads from, in their order, each with its epoch."""
    dealing = torch_generator(SEED, "company", *(picture.name for picture in pictures))
    order = list(range(len(pictures)))
    for epoch in range(max(EPOCHS)):
        if case.company == "changing":
            order = torch.randperm(len(pictures), generator=dealing).tolist()
        for first in range(0, len(order), case.batch):
            yield epoch, [pictures[place] for place in order[first : first + case.batch]]


def _exchange(case: Case, company: Sequence[LabelledPicture], network: VitClassifier, epoch: int) -> Exchange:
    """As ``Scenario.exchange`` makes it, with one mask for all pictures if asked for, and no more than is attacked."""
    private = prepare_private(case.scenario, company, epoch)
    if case.masks == "batch":
        mask, source = (tensor[:1].expand_as(tensor) for tensor in (private.mask, private.source))
        private = replace(private, mask=mask, source=source, shuffled=rearrange(private.clean, source))
    (sent,) = entrance_gradients(network, [private], required_tensors(network))
    return Exchange(private, make_upload(case.scenario, sent, private, server_round=epoch + 1, node=0, weights=""))


def _attacked(made: Sequence[Exchange], network: VitClassifier, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Rows of the pictures of the last epoch's first batches."""
    for place in range(len(made) - BATCHES, len(made) - BATCHES + ATTACKED):
        others = tuple(exchange.upload for index, exchange in enumerate(made) if index != place)
        began = time.thread_time()
        (reconstruction,) = MjpIntersection().run(
            [replace(made[place].upload, others=others)],
            network,
            scenario.threat,
            generator=torch_generator(SEED, "attack"),
        )
        seconds = time.thread_time() - began
        for name, psnr in _best(reconstruction.images, made[place].private):
            yield {
                "picture": name,
                "psnr": psnr,
                "uploads": reconstruction.diagnostics["uploads_linked"],
                "seconds": seconds,
            }


def _best(images: Tensor, private: PrivateBatch) -> Iterator[tuple[str, float]]:
    """PSNR of each clean picture under the assignment of largest sum."""
    psnr = metric("psnr").function
    scores = torch.stack([psnr(images, picture.expand_as(images)) for picture in private.clean])
    rows, columns = linear_sum_assignment(scores.numpy(), maximize=True)
    for row, column in zip(rows, columns, strict=True):
        yield private.pictures[row], float(scores[row, column])


if __name__ == "__main__":
    run_function(main)
