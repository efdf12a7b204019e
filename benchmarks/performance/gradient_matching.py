"""``gradient_matching`` against breaching's ``invertinggradients``: how well, and how fast per iteration.

``python benchmarks/performance/run.py gradient_matching --n 10 --iterations 200 --json FILE [--pictures FOLDER]``

Both get the same model, the same gradients of single pictures and the same number of iterations, in one
process. The two take turns, so that whatever else the machine does meets both. Times are given twice:
wall-clock, and of the processor, which other jobs on the machine disturb less.

Our search has eight candidates at a time. What it multiplies is counted, and held against the rate of a large matrix
product on as many threads, by the processor's time: what is left to gain on this machine is the rest.
"""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode

from fedmjp.attacks.base import Attack
from fedmjp.attacks.breaching_adapter import InvertingGradients
from fedmjp.attacks.gradient_matching import GradientMatching
from fedmjp.attacks.grey import LEVEL
from fedmjp.attacks.held_out import seen_before
from fedmjp.benchmarks.performance.harness import Measurement, benchmark
from fedmjp.benchmarks.scripts import Pictures
from fedmjp.config import ModelConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source
from fedmjp.errors import DataError
from fedmjp.metrics import METRICS
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.scenario import Scenario
from fedmjp.seeds import numpy_generator, torch_generator

MODEL = ModelConfig(name="deit_tiny", image_size=64, patch_size=8)
SCENARIO = Scenario(model=MODEL, labels_known=True)
PARALLEL = 8
MATRIX = 2048
COUNTED = 10  # iterations whose products are counted


@benchmark
def gradient_matching(
    n: Annotated[int, typer.Option(min=2, help="Pictures.")] = 10,
    iterations: Annotated[int, typer.Option(min=1, help="Of either attack, per picture.")] = 200,
    pictures: Pictures = "bundled",
    seed: Annotated[int, typer.Option(help="Chooses the pictures and draws the starts.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Of torch, for either attack.")] = torch.get_num_threads(),
) -> Measurement:
    """Attack the same pictures with both and compare them picture by picture."""
    torch.set_num_threads(threads)
    model = build_vit(MODEL)
    chosen = choose(pictures, n, seed)
    attacks: dict[str, Attack] = {
        "breaching": InvertingGradients({"iterations": iterations}),
        "ours": ours(iterations),
    }
    for warm_up in (InvertingGradients({"iterations": 1}), ours(1)):
        measure(warm_up, model, chosen[:1], seed)  # imports and first allocations
    psnr: dict[str, list[float]] = {name: [] for name in attacks}
    seconds = dict.fromkeys(attacks, np.zeros(2))
    rates = []
    for first in range(0, n, PARALLEL):
        for name, attack in attacks.items():
            decibels, taken = measure(attack, model, chosen[first : first + PARALLEL], seed)
            psnr[name] += decibels
            seconds[name] = seconds[name] + taken
        rates.append(matrix_rate())
        typer.echo(f"{len(psnr['ours'])} of {n} pictures")
    figures = compare(psnr, {name: taken / n / iterations for name, taken in seconds.items()})
    figures |= limit(operations(model, chosen[:PARALLEL], seed), float(np.median(rates)), figures["ours_processor_ms"])
    figures["grey_psnr"] = round(float(np.mean([score(torch.full_like(p.image, LEVEL), p.image) for p in chosen])), 2)
    about = {
        "model": MODEL.model_dump(mode="json"),
        "pictures": [picture.name for picture in chosen],
        "iterations": iterations,
        "seed": seed,
        "options": attacks["ours"].options.model_dump(mode="json"),
        "threads": threads,
    }
    return Measurement(figures, about)


def ours(iterations: int) -> GradientMatching:
    """Our search, as it is by default but for the candidates at a time."""
    return GradientMatching({"iterations": iterations, "parallel": PARALLEL})


def operations(model: VitClassifier, pictures: Sequence[LabelledPicture], seed: int) -> float:
    """GFLOP per iteration and picture in matrix products; a multiplication and an addition are two."""
    totals = []
    for iterations in (1, 1 + COUNTED):
        with FlopCounterMode(display=False) as counter:
            measure(ours(iterations), model, pictures, seed)
        totals.append(counter.get_total_flops())
    return float(totals[1] - totals[0]) / COUNTED / len(pictures) / 1e9


def matrix_rate() -> float:
    """GFLOP per second of the processor in a large product, as often repeated as takes a second or so."""
    factor, repeats = torch.rand(MATRIX, MATRIX), 5
    torch.matmul(factor, factor)
    started = time.process_time()
    for _ in range(repeats):
        torch.matmul(factor, factor)
    return 2e-9 * MATRIX**3 * repeats / (time.process_time() - started)


def limit(work: float, rate: float, milliseconds: float) -> dict[str, float]:
    """Count what our search multiplies in an iteration of a picture, and compare it with the machine's rate."""
    return {
        "ours_gflop_per_iteration_and_picture": round(work, 2),
        "matrix_product_gflop_per_second_by_processor": round(rate, 1),
        "share_of_the_matrix_rate_by_processor": round(1e3 * work / rate / milliseconds, 2),
    }


def choose(data: str, count: int, seed: int) -> list[LabelledPicture]:
    """Pictures in an order drawn from the seed, without those that the natural-patch prior was measured on.

    Raises:
        DataError: If there are too few.
    """
    source = open_source(data, size=MODEL.image_size, classes=MODEL.classes)
    known = [name for name in source.names() if not seen_before(name)]
    if len(known) < count:
        raise DataError(f"{count} pictures were asked for, but only {len(known)} can be attacked; name --pictures")
    order = torch.randperm(len(known), generator=torch_generator(seed, "gradient matching"))
    return [source.load(known[index]) for index in order[:count].tolist()]


def measure(
    attack: Attack, model: VitClassifier, pictures: Sequence[LabelledPicture], seed: int
) -> tuple[list[float], npt.NDArray[np.float64]]:
    """PSNR of each picture's reconstruction, and the seconds that the attack took: wall-clock, processor."""
    uploads = [SCENARIO.exchange([picture], model=model).upload for picture in pictures]
    started = np.array([time.perf_counter(), time.process_time()])
    made = attack.run(uploads, model, SCENARIO.threat, generator=torch_generator(seed, "attack"))
    seconds = np.array([time.perf_counter(), time.process_time()]) - started
    pairs = zip(made, pictures, strict=True)
    return [score(reconstruction.images[0], picture.image) for reconstruction, picture in pairs], seconds


def score(made: torch.Tensor, truth: torch.Tensor) -> float:
    """PSNR of one picture, in dB."""
    return float(METRICS["psnr"].function(made[None], truth[None]))


def compare(psnr: dict[str, list[float]], seconds: dict[str, npt.NDArray[np.float64]]) -> dict[str, Any]:
    """Means, the paired difference with a 95 % bootstrap interval over pictures, and the ratios of times.

    ``seconds`` are per iteration and picture: wall-clock, processor.
    """
    difference = np.subtract(psnr["ours"], psnr["breaching"])
    interval = stats.bootstrap((difference,), np.mean, rng=numpy_generator(0, "bootstrap")).confidence_interval
    return {
        **{f"{name}_psnr": round(float(np.mean(values)), 2) for name, values in psnr.items()},
        "psnr_difference": round(float(difference.mean()), 2),
        "psnr_difference_low": round(float(interval.low), 2),
        "psnr_difference_high": round(float(interval.high), 2),
        **{f"{name}_ms_per_iteration_and_picture": round(1e3 * wall, 1) for name, (wall, _) in seconds.items()},
        "times_as_fast": round(seconds["breaching"][0] / seconds["ours"][0], 2),
        **{f"{name}_processor_ms": round(1e3 * busy, 1) for name, (_, busy) in seconds.items()},
        "times_as_fast_by_processor": round(seconds["breaching"][1] / seconds["ours"][1], 2),
        "psnr_per_picture": {name: [round(value, 2) for value in values] for name, values in psnr.items()},
    }
