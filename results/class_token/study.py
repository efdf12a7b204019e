"""How exactly ``class_token`` takes batches apart: by their size, on trained models, and of degraded uploads.

``python results/class_token/study.py --pictures FOLDER --small FOLDER --runs FOLDER``

Uploads are of the head alone, whose gradient is computed from the features of the pictures. A picture's error is the
distance of its feature from the one that is assigned to it, relative to that feature's distance from the mean of the
batch; of a single picture, to its size.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedmjp.attacks.class_token.attack import ClassToken
from fedmjp.attacks.held_out import developed_on
from fedmjp.benchmarks.scripts import Pictures, keep_table
from fedmjp.config import ModelConfig
from fedmjp.data.datasets import DatasetPictures, open_dataset
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source, select
from fedmjp.exchange import protect_trained
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.randomness import SeededRandomness
from fedmjp.records import Upload
from fedmjp.running import run_function
from fedmjp.seeds import torch_generator
from fedmjp.threat import ThreatModel
from fedmjp.training.run_folder import TrainingFolder

FOLDER = Path("results/class_token")
SEED = 5
EXACT = 1e-3
PASS = 16  # pictures
PICTURES = 480
# Pictures of a batch, and how many batches.
SIZES = {1: 32, 2: 32, 4: 16, 8: 16, 16: 8, 32: 8, 64: 4, 128: 2, 256: 2}
RUNS = ("central30-none-0", "central30-jigsaw-0", "central30-mjp-0")
TRAINED = ((4, True), (16, True), (8, False), (16, False))  # pictures, and whether their labels are all different
TRAINED_BATCHES = 10
DEGRADED = (
    "round:precision=float16", "round:precision=bfloat16", "gaussian:noise=0.001", "gaussian:noise=0.01",
    "prune:kept=0.1", "quantise:bits=8",
)  # fmt: skip
DEGRADED_SIZES = (8, 32)
DEGRADED_BATCHES = 4


@dataclass(frozen=True)
class Client:
    """Pictures by the features that a model reads, with their labels, and the model."""

    name: str
    model: VitClassifier
    features: Tensor  # (pictures, dim) float32
    labels: Tensor

    def drawn(self, count: int, number: int, *, distinct: bool) -> Tensor:
        """Places of the pictures of a batch."""
        generator = torch_generator(SEED, "batch", self.name, count, number, str(distinct))
        order = torch.randperm(len(self.labels), generator=generator)
        if not distinct:
            return order[:count]
        first: dict[int, int] = {}
        for place in order.tolist():
            first.setdefault(int(self.labels[place]), place)
        return torch.tensor(list(first.values())[:count])


def main(
    pictures: Pictures,
    small: Annotated[str, typer.Option(help="Tiny-ImageNet at 32 x 32, with a validation split.", metavar="FOLDER")],
    runs: Annotated[Path, typer.Option(help="Trained models, results/learning/runs.", metavar="RUNS")],
) -> None:
    """Run all cases and write the table."""
    frame = pd.DataFrame(row for rows in (_untrained(pictures), _trained(small, runs)) for row in rows)
    keys = ["model", "labels", "degraded", "batch"]
    table = frame.groupby(keys, sort=False).agg(
        pictures=("error", "size"),
        median=("error", "median"),
        worst=("error", "max"),
        exact=("error", lambda errors: (errors < EXACT).mean()),
        label=("label", "mean"),
        certified=("certified", "mean"),
        wrong=("wrong", "sum"),
        seconds=("seconds", "mean"),
        slowest=("seconds", "max"),
    )
    about = {
        "seed": SEED,
        "error": f"relative to the feature's distance from the batch's mean; exact below {EXACT:g}",
        "certified": "the whole batch; wrong: certified, and yet not exact or of another label",
        "seconds": "per batch once the gradient is there, of the process's CPU",
    }
    keep_table(FOLDER, frame, about)
    typer.echo(table.to_string(float_format="{:.3g}".format))


def _untrained(source: str) -> Iterator[dict[str, Any]]:
    config = ModelConfig(name="deit_small")
    opened = open_source(source, size=config.image_size, classes=config.classes)
    chosen = select(opened, PICTURES, seed=SEED, leave_out=developed_on)
    client = _client("deit_small", config, [chosen.load(entry) for entry in chosen.entries])
    for size, batches in SIZES.items():
        for number in range(batches):
            yield from _attacked(client, size, number, distinct=True)
    for size in DEGRADED_SIZES:
        for defence in DEGRADED:
            for number in range(DEGRADED_BATCHES):
                yield from _attacked(client, size, number, distinct=True, defence=defence)


def _trained(source: str, runs: Path) -> Iterator[dict[str, Any]]:
    for name in RUNS:
        config = TrainingFolder(runs / name).trained()
        dataset = open_dataset(source, "validation", classes=config.classes)
        opened = DatasetPictures(dataset, config.image_size, 1.0)
        client = _client(name, config, [opened.load(key) for key in opened.names()])
        for size, distinct in TRAINED:
            for number in range(TRAINED_BATCHES):
                yield from _attacked(client, size, number, distinct=distinct)


def _client(name: str, config: ModelConfig, pictures: Sequence[LabelledPicture]) -> Client:
    model = build_vit(config)
    with torch.no_grad():
        stacks = [
            model.features(torch.stack([picture.image for picture in pictures[first : first + PASS]]))
            for first in range(0, len(pictures), PASS)
        ]
    return Client(name, model, torch.cat(stacks), torch.tensor([picture.label for picture in pictures]))


def _attacked(client: Client, size: int, number: int, *, distinct: bool, defence: str = "") -> Iterator[dict[str, Any]]:
    """Build a row for each picture of a batch."""
    places = client.drawn(size, number, distinct=distinct)
    features, labels = client.features[places], client.labels[places]
    threat = ThreatModel.parse({"batch_size": size, "defences": defence or ()})
    sent = _sent(client, features, labels, threat, number)
    began = time.process_time()
    generator = torch_generator(SEED, "attack")
    (made,) = ClassToken().run([sent], client.model, threat, generator=generator)
    seconds = time.process_time() - began
    truth = features.double()
    distances = torch.cdist(cast("Tensor", made.features), truth)
    rows, columns = (torch.from_numpy(places) for places in linear_sum_assignment(distances.numpy()))
    spread = (truth - truth.mean(0) if size > 1 else truth).norm(dim=1)
    errors = distances[rows, columns] / spread[columns]
    same, certified = made.labels[rows] == labels[columns], bool(made.diagnostics["certified"])
    for error, right in zip(errors.tolist(), same.tolist(), strict=True):
        yield {
            "model": client.name,
            "labels": "distinct" if distinct else "as they fall",
            "degraded": defence or "none",
            "batch": size,
            "number": number,
            "error": error,
            "label": right,
            "certified": certified,
            "wrong": certified and (error >= EXACT or not right),
            "misfit": made.diagnostics["misfit"],
            "seconds": seconds,
        }


def _sent(client: Client, features: Tensor, labels: Tensor, threat: ThreatModel, number: int) -> Upload:
    """Return the head's part of an upload, as it leaves the client."""
    head = client.model.backbone.head
    weight, bias = head.weight.detach().requires_grad_(), head.bias.detach().requires_grad_()
    loss = F.cross_entropy(F.linear(features, weight, bias), labels)
    tensors = dict(zip((names.HEAD_WEIGHT, names.HEAD_BIAS), torch.autograd.grad(loss, (weight, bias)), strict=True))
    randomness = SeededRandomness(SEED, ("class_token", client.name, len(labels), number))
    protected = protect_trained(tensors, client.model, threat, examples=len(labels), arranged=(), randomness=randomness)
    return Upload(protected, "gradient", len(labels), 1, 0, "")


if __name__ == "__main__":
    run_function(main)
