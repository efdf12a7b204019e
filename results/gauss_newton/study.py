"""How often ``gauss_newton`` finds the pictures behind one upload, whether its certificates are right, and its cost.

``python results/gauss_newton/study.py --pictures FOLDER --output results/gauss_newton``

``--cases mjp=0.27,batch=2`` are uploads of one picture under MJP of that mask ratio, with ``mjp_prior`` and
``mjp_span`` on the same uploads, and uploads of two undefended pictures. ``--processes`` share out the uploads, each
on one core, or all on one GPU. Left out are pictures that the prior was measured on or an attack was developed on (the
first 50 of the source, and those of ``fedmjp.attacks.held_out``), and uploads whose mask came out empty. A certificate
is
wrong if a certified picture, its masked patches under the best assignment, is below 40 dB.
"""

import resource
import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import pandas as pd
import torch
import typer
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.held_out import seen_before
from fedmjp.benchmarks.leaderboard.statistics import share
from fedmjp.benchmarks.scripts import Pictures, keep_table
from fedmjp.config import Checkpoint
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source, select
from fedmjp.errors import ConfigError
from fedmjp.exchange import Exchange, prepare_private
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.processes import workers
from fedmjp.records import Reconstruction
from fedmjp.running import run_function
from fedmjp.scenario import Scenario
from fedmjp.seeds import torch_generator
from fedmjp.zoo import PREFIX, zoo_model

SEED = 0
EXACT = 40.0  # dB
TRIED = 20  # pictures, the first of the order, that told when a search should end
DEVELOPED = 50  # pictures of ImageNet's, the first by name, that the attack was developed on, or might have been
BESIDE = ("mjp_prior", "mjp_span")  # on the same uploads of one picture
CASE = ["model", "case", "image_size", "patch_size"]


@dataclass(frozen=True)
class Case:
    """What clients upload, and how it is searched."""

    title: str  # of the model, as tables have it
    model: dict[str, Any]
    mask_ratio: float  # 0 without MJP
    batch: int
    device: Literal["cpu", "cuda"]
    options: dict[str, Any]  # of gauss_newton

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"MJP {self.mask_ratio:g}" if self.mask_ratio else f"batch of {self.batch}"

    @property
    def scenario(self) -> Scenario:
        """Of one upload."""
        return Scenario.parse(
            {
                "model": self.model,
                "defences": f"mjp:mask_ratio={self.mask_ratio}" if self.mask_ratio else (),
                "batch_size": self.batch,
                "pictures_per_client": self.batch,
                "device": self.device,
                "seed": SEED,
            }
        )


def main(
    pictures: Pictures,
    output: Annotated[Path, typer.Option(help="Folder that the rows go to.", metavar="DIR")],
    uploads: Annotated[int, typer.Option(help="Uploads per case.")] = 20,
    cases: Annotated[str, typer.Option(help="mjp=RATIO or batch=PICTURES, comma-separated.")] = "mjp=0.27,mjp=0.5",
    model: Annotated[str, typer.Option(help="Architecture or zoo:NAME.")] = "deit_tiny",
    image_size: Annotated[int, typer.Option(help="Pixels per side; the zoo's models have their own.")] = 64,
    patch_size: Annotated[int, typer.Option(help="Pixels per side of a patch; the same.")] = 16,
    starts: Annotated[int, typer.Option(help="Searches of an upload at most.")] = 3,
    most_unknowns: Annotated[int, typer.Option(help="Of an upload; others fail.")] = 3200,
    processes: Annotated[int, typer.Option(help="Uploads that are attacked at a time.")] = 1,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where attacks run.")] = "cpu",
    development: Annotated[bool, typer.Option(help="The pictures that the attack was developed on.")] = False,
) -> None:
    """Attack, write the rows after every upload, and print a line per case."""
    about = {
        "seed": SEED,
        "psnr": f"dB, setting c; of a batch, of its pictures in the best order; exact from {EXACT:g}",
        "psnr_set": "the same with masked patches under the best assignment",
        "seconds": "of one core" if device == "cpu" else "of the clock, on the GPU",
        "gigabytes": "the most memory that the process had until then, without the GPU's",
    }
    sizes: dict[str, Any] = {"name": model, "image_size": image_size, "patch_size": patch_size}
    if model.startswith(PREFIX):
        sizes = {**zoo_model(model).model, "weights": Checkpoint.of(model)}
    options = {"starts": starts, "most_unknowns": most_unknowns}
    rows: list[dict[str, Any]] = []
    with workers(processes) as pool:
        work = [
            pool.submit(_attacked, case, batch, number)
            for case in [_case(text, model, sizes, device, options) for text in cases.split(",")]
            for number, batch in enumerate(islice(_batches(case, pictures, development=development), uploads))
        ]
        for done in as_completed(work):
            for row in done.result():
                rows.append(row)
                typer.echo(f"{row['case']} {row['picture']}: {row['psnr']:.1f} dB, {row['seconds']:.0f} s")
            keep_table(output, pd.DataFrame(rows).sort_values([*CASE, "upload"], kind="stable"), about)
    typer.echo(summary(pd.DataFrame(rows)))


def _case(
    text: str, title: str, model: dict[str, Any], device: Literal["cpu", "cuda"], options: dict[str, Any]
) -> Case:
    """From mjp=RATIO or batch=PICTURES; ConfigError if it is neither."""
    match text.split("="):
        case ["mjp", ratio]:
            return Case(title, model, float(ratio), 1, device, options)
        case ["batch", size]:
            return Case(title, model, 0.0, int(size), device, options)
    raise ConfigError(f"--cases: {text!r} is neither mjp=RATIO nor batch=PICTURES")


def _batches(case: Case, pictures: str, *, development: bool) -> Iterator[list[LabelledPicture]]:
    """Return the pictures of each upload, in an order drawn from the seed; none whose mask comes out empty."""
    scenario = case.scenario
    source = open_source(pictures, size=scenario.model.image_size, classes=scenario.model.classes)
    names = source.names()
    developed = set(names[:DEVELOPED])
    left_out = {
        name for name in names if (name not in developed if development else name in developed or seen_before(name))
    }
    chosen = select(source, len(names) - len(left_out), seed=SEED, leave_out=left_out.__contains__)
    entries = chosen.entries if development else chosen.entries[TRIED:]
    for first in range(0, len(entries) - case.batch + 1, case.batch):
        loaded = [chosen.load(entry) for entry in entries[first : first + case.batch]]
        if not case.mask_ratio or prepare_private(scenario, loaded, 0).mask.any():
            yield loaded


def _attacked(case: Case, batch: list[LabelledPicture], number: int) -> list[dict[str, Any]]:
    """Build a row per picture of an upload."""
    torch.set_num_threads(1)
    clock = time.thread_time if case.device == "cpu" else time.perf_counter
    network = build_vit(case.scenario.network).to(case.device)
    exchange = case.scenario.exchange(batch, model=network)
    began = clock()
    made = _run("gauss_newton", case, exchange, network)
    seconds = clock() - began
    private, psnr = exchange.private, metric("psnr").function
    scores = torch.stack([psnr(made.images, clean.expand_as(made.images)) for clean in private.clean])
    beside = {f"psnr_{name}": _run(name, case, exchange, network) for name in BESIDE} if case.mask_ratio else {}
    sizes = case.scenario.model
    return [
        {
            **dict(zip(CASE, (case.title, case.name, sizes.image_size, sizes.patch_size), strict=True)),
            "upload": number,
            "picture": private.pictures[place],
            "label": int(private.labels[place]),
            "psnr": float(scores[place, match]),
            "psnr_set": _psnr_as_set(made.images[match], exchange, int(place), network),
            **{name: float(psnr(other.images, private.clean)) for name, other in beside.items()},
            **made.diagnostics,
            "seconds": seconds,
            "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        for place, match in zip(*linear_sum_assignment(scores.numpy(), maximize=True), strict=True)
    ]


def _run(name: str, case: Case, exchange: Exchange, network: VitClassifier) -> Reconstruction:
    generator = torch_generator(SEED, "attack")
    attack = ATTACKS.get(name)(case.options if name == "gauss_newton" else {})
    (made,) = attack.run([exchange.upload], network, case.scenario.threat, generator=generator)
    return cast("Reconstruction", made)


def _psnr_as_set(image: Tensor, exchange: Exchange, place: int, network: VitClassifier) -> float:
    """PSNR of a picture, its masked patches under the assignment of least squared error."""
    mask, clean = exchange.private.mask[place], exchange.private.clean[place]
    made, true = (to_patches(each[None].double(), network.patch_size)[0] for each in (image, clean))
    between = torch.cdist(made[mask], true[mask], compute_mode="donot_use_mm_for_euclid_dist").square()
    rows, columns = linear_sum_assignment(between.numpy())
    error = (made - true)[~mask].square().sum() + between[rows, columns].sum()
    return float(-10 * torch.log10((error / made.numel()).clamp(min=1e-20)))


def summary(rows: pd.DataFrame) -> str:
    """Build a table, one line per case: of an upload the worst of its pictures counts."""
    lines = [
        "| model | case | pixels | patch | n | exact (95 %) | up to order | certified | wrong | median dB | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, members in rows.groupby(CASE, sort=False):
        worst = {"psnr": "min", "psnr_set": "min", "content_certified": "min", "seconds": "max"}
        uploads = members.groupby("upload").agg(worst)
        exact = share(int((uploads["psnr"] >= EXACT).sum()), len(uploads))
        right = uploads["psnr_set"] >= EXACT
        cells = [
            *case,
            len(uploads),
            f"{exact.share:.2f} ({exact.low:.2f} to {exact.high:.2f})",
            right.sum(),
            int(uploads["content_certified"].sum()),
            ((uploads["content_certified"] == 1) & ~right).sum(),
            f"{uploads['psnr'].median():.1f}",
            f"{uploads['seconds'].median():.0f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for name in BESIDE:
        if (column := f"psnr_{name}") in rows:
            beside = rows[rows[column].notna()].groupby(CASE, sort=False)[column]
            lines += [
                f"{name}, {case[1]}: {psnr.ge(EXACT).sum()} exact, {psnr.median():.1f} dB" for case, psnr in beside
            ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_function(main)
