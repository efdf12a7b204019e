"""How often the attacker of ``mjp_intersection`` joins uploads of two pictures, or misses two of one.

``python -m benchmarks.studies.linking --pictures FOLDER --small FOLDER --weights FILE``

Per mask ratio, every picture is uploaded ``UPLOADS`` times under masks drawn independently; all pairs of
uploads of one picture are compared, and as many pairs of two pictures. The bundled pictures are two crops
each of four photographs: the pairs of two crops are a case of their own.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from attacks.mjp.facts import LinearFacts, linear_facts, required_tensors
from attacks.mjp.linking import Statement, Verdict, compare, groups
from attacks.natural_patches import measured_on
from benchmarks.folder.study import keep_rows
from fedmjp import provenance
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.data.batches import private_batch
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source, select
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.running import run_function
from fedmjp.settings import Picture
from fedmjp.stacked import entrance_gradients

FOLDER = Path("results/linking")
RATIOS = (0.03, 0.09, 0.27, 0.5, 0.9)
UPLOADS = 6
PICTURES = 10
SEED = 77


@dataclass(frozen=True)
class Client:
    """Pictures that one client uploads, several times each.

    Attributes:
        name: Of the case.
        model: What it was sent.
        pictures: Its own; two of one photograph follow each other if ``crops``.
        crops: Whether they are two crops each.
    """

    name: str
    model: VitClassifier
    pictures: Sequence[LabelledPicture]
    crops: bool = False

    def facts(self, mask_ratio: float) -> list[list[LinearFacts]]:
        """Of every picture's uploads."""
        return [[self._facts(picture, mask_ratio, number) for number in range(UPLOADS)] for picture in self.pictures]

    def _facts(self, picture: LabelledPicture, mask_ratio: float, number: int) -> LinearFacts:
        grid, version = self.model.grid, Picture.SHUFFLED
        batch = private_batch(
            [picture], grid=grid, mask_ratio=mask_ratio, gradient_of=version, seed=SEED, number=number
        )
        gradients = entrance_gradients(self.model, [batch], required_tensors(self.model))[0]
        return linear_facts(Upload(gradients, "gradient", 1, 1, 0, ""), self.model)


def main(
    pictures: Annotated[str, typer.Option(help="FOLDER/CLASS/picture, for DeiT-S.")],
    small: Annotated[str, typer.Option(help="Pictures of 32 x 32, for the trained model.")],
    weights: Annotated[Path, typer.Option(help="Of deit_micro, patches of 8, 32 classes, trained with MJP.")],
) -> None:
    """Compare all pairs and write the table."""
    torch.set_num_threads(1)
    rows = [row for client in _clients(pictures, small, weights) for ratio in RATIOS for row in _measure(client, ratio)]
    table = pd.DataFrame(rows)
    about = {
        "command": "python -m benchmarks.studies.linking --pictures FOLDER --small FOLDER --weights FILE",
        "mask_ratios": RATIOS,
        "uploads_per_picture": UPLOADS,
        "pictures": PICTURES,
        "seed": SEED,
        "weights": weights.as_posix(),
    }
    keep_rows(FOLDER, table, {**about, **provenance.environment()})
    typer.echo(table.to_string(index=False))


def _clients(pictures: str, small: str, weights: Path) -> Iterator[Client]:
    deit = build_vit(ModelConfig.parse({"name": "deit_small", "unknown_embedding": True}))
    trained = {"weights": Checkpoint.of(weights), "localisation": "nonlinear"}
    sizes = {"image_size": 32, "patch_size": 8, "classes": 32}
    micro = build_vit(ModelConfig.parse({"name": "deit_micro", "unknown_embedding": True, **sizes, **trained}))
    yield Client("DeiT-S, untrained", deit, _chosen(pictures, 224, PICTURES))
    yield Client("DeiT-S, untrained, two crops", deit, _chosen("bundled", 224, 8), crops=True)
    yield Client("deit_micro, trained", micro, _chosen(small, 32, PICTURES))


def _chosen(data: str, size: int, count: int) -> list[LabelledPicture]:
    source = open_source(data, size=size, classes=1000)
    selection = select(source, count, seed=SEED, leave_out=measured_on)
    return sorted((selection.load(entry) for entry in selection.entries), key=lambda picture: picture.name)


def _measure(client: Client, mask_ratio: float) -> Iterator[dict[str, Any]]:
    """Rows of the table: pairs of one picture, pairs of two, and all uploads grouped."""
    facts = client.facts(mask_ratio)
    cell = {"client": client.name, "mask_ratio": mask_ratio}
    same = [pair for uploads in facts for pair in combinations(uploads, 2)]
    yield {**cell, "pairs": "of one picture", **_compared(same)}
    yield {**cell, "pairs": "of two pictures", **_compared(_different(facts, len(same), crops=client.crops))}
    yield {**cell, "pairs": "grouped", **_grouped(facts)}


def _different(facts: list[list[LinearFacts]], count: int, *, crops: bool) -> list[tuple[LinearFacts, LinearFacts]]:
    pictures = list(zip(facts[::2], facts[1::2], strict=True)) if crops else list(combinations(facts, 2))
    pairs = [pair for one, other in pictures for pair in product(one, other)]
    return pairs[:: max(1, len(pairs) // count)]


def _compared(pairs: Sequence[tuple[LinearFacts, LinearFacts]]) -> dict[str, Any]:
    found = [compare(Statement.of([one]), Statement.of([other])) for one, other in pairs]
    decided = [each for each in found if each.verdict is not Verdict.UNDECIDED]
    verdicts = Counter(each.verdict for each in found)
    ratios = [each.difference / each.energy**0.5 for each in decided]
    return {
        "count": len(found),
        **{verdict.value: verdicts[verdict] for verdict in Verdict},
        # Below 1: joined. How close any pair came to the wrong side.
        "least_difference_to_bound": min(ratios, default=None),
        "largest_difference_to_bound": max(ratios, default=None),
    }


def _grouped(facts: list[list[LinearFacts]]) -> dict[str, Any]:
    owner = [picture for picture, uploads in enumerate(facts) for _ in uploads]
    found = groups([each for uploads in facts for each in uploads])
    mixed = sum(len({owner[member] for member in members}) > 1 for members in found)
    return {"count": len(owner), "groups": len(found), "mixed_groups": mixed}


if __name__ == "__main__":
    run_function(main)
