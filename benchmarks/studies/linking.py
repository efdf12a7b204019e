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

from attacks.mjp.facts import LinearFacts, linear_facts
from attacks.mjp.linking import BEYOND, Statement, Verdict, compare, groups
from benchmarks.scripts import Pictures, keep_table, unseen
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.models.build import build_vit
from fedmjp.running import run_function
from fedmjp.scenario import Scenario

FOLDER = Path("results/linking")
RATIOS = (0.03, 0.09, 0.27, 0.5, 0.9)
UPLOADS = 6
PICTURES = 10
SEED = 77


@dataclass(frozen=True)
class Client:
    """Pictures that one client uploads, several times each; two of one photograph follow each other if ``crops``."""

    name: str
    model: ModelConfig
    pictures: Sequence[LabelledPicture]
    crops: bool = False


def main(
    pictures: Pictures,
    small: Annotated[str, typer.Option(help="Pictures of 32 x 32, for the trained model.", metavar="FOLDER")],
    weights: Annotated[
        Path, typer.Option(help="Of deit_micro, patches of 8, 32 classes, trained with MJP.", metavar="FILE")
    ],
) -> None:
    """Compare all pairs and write the table."""
    torch.set_num_threads(1)
    rows = [row for client in _clients(pictures, small, weights) for ratio in RATIOS for row in _measure(client, ratio)]
    table = pd.DataFrame(rows)
    about = {
        "mask_ratios": RATIOS,
        "uploads_per_picture": UPLOADS,
        "pictures": PICTURES,
        "seed": SEED,
        "weights": weights.as_posix(),
    }
    keep_table(FOLDER, table, about)
    typer.echo(table.to_string(index=False))


def _clients(pictures: str, small: str, weights: Path) -> Iterator[Client]:
    deit = ModelConfig(name="deit_small")
    sizes = {"image_size": 32, "patch_size": 8, "classes": 32}
    trained = {"weights": Checkpoint.of(weights), "localisation": "nonlinear"}
    micro = ModelConfig.parse({"name": "deit_micro", **sizes, **trained})
    yield Client("DeiT-S, untrained", deit, _chosen(pictures, PICTURES, deit))
    yield Client("DeiT-S, untrained, two crops", deit, _chosen("bundled", 8, deit), crops=True)
    yield Client("deit_micro, trained", micro, _chosen(small, PICTURES, micro))


def _chosen(data: str, count: int, model: ModelConfig) -> list[LabelledPicture]:
    return sorted(unseen(data, count, model, SEED), key=lambda picture: picture.name)


def _measure(client: Client, mask_ratio: float) -> Iterator[dict[str, Any]]:
    """Rows of the table: pairs of one picture, pairs of two, and all uploads grouped."""
    scenario = Scenario.parse(
        {
            "model": client.model,
            "defences": f"mjp:mask_ratio={mask_ratio}",
            "uploads_per_picture": UPLOADS,
            "seed": SEED,
        }
    )
    model = build_vit(scenario.network)
    facts = []
    for picture in client.pictures:
        first = scenario.exchange([picture], model=model).upload
        facts.append([linear_facts(upload, model) for upload in (first, *first.others)])
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
    comparisons = [compare(Statement.of([one]), Statement.of([other])) for one, other in pairs]
    decided = [comparison for comparison in comparisons if comparison.verdict is not Verdict.UNDECIDED]
    verdicts = Counter(comparison.verdict for comparison in comparisons)
    ratios = [comparison.difference / BEYOND for comparison in decided]
    return {
        "count": len(comparisons),
        **{verdict.value: verdicts[verdict] for verdict in Verdict},
        # Below 1: joined. How close any pair came to the wrong side.
        "least_difference_to_bound": min(ratios, default=None),
        "largest_difference_to_bound": max(ratios, default=None),
    }


def _grouped(facts: list[list[LinearFacts]]) -> dict[str, Any]:
    owner = [picture for picture, uploads in enumerate(facts) for _ in uploads]
    clusters = groups([upload for uploads in facts for upload in uploads])
    mixed = sum(len({owner[member] for member in members}) > 1 for members in clusters)
    return {"count": len(owner), "groups": len(clusters), "mixed_groups": mixed}


if __name__ == "__main__":
    run_function(main)
