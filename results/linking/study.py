"""How often the attacker of ``mjp_intersection`` joins uploads of two pictures, or misses two of one.

``python results/linking/study.py --pictures FOLDER --small FOLDER --output results/linking``

Per mask ratio, every picture is uploaded ``UPLOADS`` times under masks drawn independently; all pairs of
uploads of one picture are compared, and as many pairs of two pictures. The bundled pictures are two crops
each of four photographs: the pairs of two crops are a case of their own. So are copies that differ in a single
direction, each uploaded once more under a mask of its own.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor

from fedmjp.attacks.mjp.facts import LinearFacts, linear_facts
from fedmjp.attacks.mjp.linking import BEYOND, Statement, Verdict, compare, groups
from fedmjp.benchmarks.scripts import Pictures, keep_table, load_unseen
from fedmjp.config import ModelConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.models.build import build_vit
from fedmjp.patches import to_patches
from fedmjp.running import run_function
from fedmjp.scenario import Scenario

RATIOS = (0.03, 0.09, 0.27, 0.5, 0.9)
UPLOADS = 6
PICTURES = 10
TRAINED = ("zoo:coarse-mjp-0", "zoo:central30-mjp-0")  # with MJP: 16 tokens, and 64, as many as dimensions
SEED = 77
STEP = 1 / 255  # of a channel of 8 bits


def _exposed(image: Tensor, steps: int) -> Tensor:
    return (image + steps * STEP).clamp(0, 1)


def _redder(image: Tensor, steps: int) -> Tensor:
    return torch.cat([_exposed(image[:1], steps), image[1:]])


def _stamped(image: Tensor, side: int) -> Tensor:
    """White where the middle of the picture begins, a square of one patch."""
    first = image.shape[-1] // 2
    copy = image.clone()
    copy[:, first : first + side, first : first + side] = 1
    return copy


# By name, a copy of an image whose patches have so many pixels per side.
COPIES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "exposure +1/255": lambda image, _: _exposed(image, 1),
    "exposure +4/255": lambda image, _: _exposed(image, 4),
    "red +4/255": lambda image, _: _redder(image, 4),
    "one white patch": _stamped,
}


@dataclass(frozen=True)
class Client:
    """Pictures that one client uploads, several times each; two of one photograph follow each other if ``crops``."""

    name: str
    model: ModelConfig
    pictures: Sequence[LabelledPicture]
    crops: bool = False


def main(
    pictures: Pictures,
    small: Annotated[str, typer.Option(help="Of 32 classes, for the trained models.", metavar="FOLDER")],
    output: Annotated[Path, typer.Option(help="Folder that the rows go to.", metavar="DIR")],
) -> None:
    """Compare all pairs and write the table."""
    torch.set_num_threads(1)
    rows = [row for client in _clients(pictures, small) for ratio in RATIOS for row in _measure(client, ratio)]
    table = pd.DataFrame(rows)
    about = {
        "mask_ratios": RATIOS,
        "uploads_per_picture": UPLOADS,
        "pictures": PICTURES,
        "seed": SEED,
    }
    keep_table(output, table, about)
    typer.echo(table.to_string(index=False))


def _clients(pictures: str, small: str) -> Iterator[Client]:
    deit = ModelConfig(name="deit_small")
    yield Client("DeiT-S, untrained", deit, _chosen(pictures, PICTURES, deit))
    yield Client("DeiT-S, untrained, two crops", deit, _chosen("bundled", 8, deit), crops=True)
    for name in TRAINED:
        model = Scenario.parse({"model": name, "defences": "mjp"}).model
        yield Client(name, model, _chosen(small, PICTURES, model))


def _chosen(data: str, count: int, model: ModelConfig) -> list[LabelledPicture]:
    return sorted(load_unseen(data, count, model, SEED), key=lambda picture: picture.name)


def _measure(client: Client, mask_ratio: float) -> Iterator[dict[str, Any]]:
    """Rows of the table: pairs of one picture, of two, of a picture and a copy, and all uploads grouped."""
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
    once = scenario.model_copy(update={"uploads_per_picture": 1})
    same = [pair for uploads in facts for pair in combinations(uploads, 2)]
    step = STEP / float(model.std.mean())
    yield {**cell, "pairs": "of one picture", **_compared(same, step)}
    yield {**cell, "pairs": "of two pictures", **_compared(_different(facts, len(same), crops=client.crops), step)}
    for name, change in COPIES.items():
        pairs = []
        for picture, uploads in zip(client.pictures, facts, strict=True):
            copy = replace(picture, image=change(picture.image, model.patch_size))
            of_copy = linear_facts(once.exchange([copy], model=model, number=UPLOADS).upload, model)
            differ = to_patches((copy.image - picture.image)[None], model.patch_size)[0].any(dim=1)
            pairs += [(one, of_copy) for one in uploads if (differ & ~(one.mask & of_copy.mask)).any()]
        yield {**cell, "pairs": f"of a copy: {name}", **_compared(pairs, step)}
    yield {**cell, "pairs": "grouped", **_grouped(facts)}


def _different(facts: list[list[LinearFacts]], count: int, *, crops: bool) -> list[tuple[LinearFacts, LinearFacts]]:
    pictures = list(zip(facts[::2], facts[1::2], strict=True)) if crops else list(combinations(facts, 2))
    pairs = [pair for one, other in pictures for pair in product(one, other)]
    return pairs[:: max(1, len(pairs) // count)]


def _compared(pairs: Sequence[tuple[LinearFacts, LinearFacts]], step: float) -> dict[str, Any]:
    """How many are joined or not; ``step`` is an exposure of 1/255 in the network's input space."""
    comparisons = [compare(Statement.of([one]), Statement.of([other])) for one, other in pairs]
    decided = [comparison for comparison in comparisons if comparison.verdict is not Verdict.UNDECIDED]
    verdicts = Counter(comparison.verdict for comparison in comparisons)
    unnoticed = [comparison.unnoticed / step for comparison in comparisons if comparison.verdict is Verdict.SAME]
    ratios = [comparison.difference / BEYOND for comparison in decided]
    return {
        "count": len(comparisons),
        **{verdict.value: verdicts[verdict] for verdict in Verdict},
        # Below 1: joined. How close any pair came to the wrong side.
        "least_difference_to_bound": min(ratios, default=None),
        "largest_difference_to_bound": max(ratios, default=None),
        # Of those joined, in steps of 1/255: by what exposure a copy may differ unnoticed.
        "least_unnoticed_exposure": min(unnoticed, default=None),
        "largest_unnoticed_exposure": max(unnoticed, default=None),
    }


def _grouped(facts: list[list[LinearFacts]]) -> dict[str, Any]:
    owner = [picture for picture, uploads in enumerate(facts) for _ in uploads]
    clusters = groups([upload for uploads in facts for upload in uploads])
    mixed = sum(len({owner[member] for member in members}) > 1 for members in clusters)
    return {"count": len(owner), "groups": len(clusters), "mixed_groups": mixed}


if __name__ == "__main__":
    run_function(main)
