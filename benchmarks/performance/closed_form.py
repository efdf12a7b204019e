"""Seconds per picture of APRIL's closed form: breaching's way and ours, in one process on the same pictures.

``python -m benchmarks.performance.closed_form --pictures FOLDER --n 40 --json FILE``

The peer computes the gradients of all parameters, one picture at a time, and solves with
``closed_form_april``. We compute the gradients that the attack reads, for a stack of pictures in one
pass, and solve with ``april``, the stronger variant; ``april_min_norm``, which gives what the peer
gives, stands beside it. They take turns, stack by stack and several times over, so that a busy
machine slows all; the seconds are medians over the turns.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attacks import ATTACKS
from attacks.natural_patches import measured_on
from benchmarks.folder.output import write_json
from fedmjp import provenance
from fedmjp.config import ModelConfig
from fedmjp.data.batches import private_batch
from fedmjp.data.selection import open_source, select
from fedmjp.metrics import metric
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.running import run_function
from fedmjp.settings import Picture
from fedmjp.stacked import entrance_gradients
from fedmjp.threat import ThreatModel
from fedmjp.updates import gradient

MODEL = ModelConfig(name="deit_small_april")
OURS = ("april", "april_min_norm")
PEER = "breaching"
STACK = 16
REPEATS = 4
MATRIX = 2048
SEED = 0
Run = Callable[[Sequence[PrivateBatch]], list[Tensor]]


def main(
    pictures: Annotated[Path, typer.Option(help="FOLDER/CLASS/picture.")],
    json: Annotated[Path, typer.Option(help="Where the figures go.")],
    n: Annotated[int, typer.Option(help="Number of pictures.")] = 40,
) -> None:
    """Time both and write what came out."""
    model = build_vit(MODEL)
    batches = _private(pictures, n)
    runs: dict[str, Run] = {PEER: _peer(model)} | {attack: _ours(attack, model) for attack in OURS}
    turns: dict[str, list[float]] = {name: [] for name in runs}
    made: dict[str, list[Tensor]] = {name: [] for name in runs}
    for run in runs.values():
        run(batches[:STACK])  # warm-up
    for start in [*range(0, n, STACK)] * REPEATS:
        stack = batches[start : start + STACK]
        for name, run in runs.items():
            began = time.perf_counter()
            made[name] += run(stack)
            turns[name].append((time.perf_counter() - began) / len(stack))
    seconds = {name: statistics.median(times) for name, times in turns.items()}
    figures = {name: _figures(name, runs, seconds[name], made, batches) for name in runs}
    for name in OURS:
        paired = [theirs / ours for theirs, ours in zip(turns[PEER], turns[name], strict=True)]
        figures[name]["times as fast as the peer"] = round(seconds[PEER] / seconds[name], 2)
        figures[name]["lowest of all turns"] = round(min(paired), 2)
        figures[name]["highest of all turns"] = round(max(paired), 2)
    command = f"python -m benchmarks.performance.closed_form --pictures FOLDER --n {n} --json {json}"
    machine = {"matrix_product_gflop_per_second": round(matrix_rate() / 1e9, 1), "threads": torch.get_num_threads()}
    about = {"command": command, "model": MODEL.model_dump(), "pictures": n, "stack": STACK, "seed": SEED, **machine}
    write_json(json, {**about, "results": figures, **provenance.environment()})
    for name, found in figures.items():
        typer.echo(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items()))


def _private(folder: Path, n: int) -> list[PrivateBatch]:
    source = open_source(str(folder), size=MODEL.image_size, classes=MODEL.classes)
    selection = select(source, n, seed=SEED, leave_out=measured_on)
    shared: dict[str, Any] = {"grid": MODEL.grid, "mask_ratio": 0.0, "gradient_of": Picture.CLEAN, "seed": SEED}
    return [private_batch([selection.load(entry)], **shared) for entry in selection.entries]


def _peer(model: VitClassifier) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from breaching.attacks.analytic_attack import AprilAttacker  # type: ignore[import-untyped]

    def run(batches: Sequence[PrivateBatch]) -> list[Tensor]:
        found = []
        for batch in batches:
            tensors = gradient(model, batch)
            # It wants the timm model in a container and gradients at fixed places of a list.
            listed = [None, tensors[names.POSITION_EMBEDDING], None, None, tensors[names.FIRST_QKV_WEIGHT]]
            patches = AprilAttacker.closed_form_april(SimpleNamespace(model=model.backbone), {"gradients": listed})
            found.append(model.denormalise(AprilAttacker.recover_patch(patches)).float())
        return found

    return run


def _ours(name: str, model: VitClassifier) -> Run:
    attack = ATTACKS.get(name)()

    def run(batches: Sequence[PrivateBatch]) -> list[Tensor]:
        tensors = entrance_gradients(model, batches, attack.tensors(model))
        uploads = [Upload(each, "gradient", 1, 1, node, "") for node, each in enumerate(tensors)]
        generator = torch.Generator().manual_seed(SEED)
        return [each.images[0] for each in attack.reconstruct(uploads, model, ThreatModel(), generator=generator)]

    return run


def _figures(
    name: str, runs: dict[str, Run], seconds: float, made: dict[str, list[Tensor]], batches: Sequence[PrivateBatch]
) -> dict[str, float]:
    private = torch.cat([batch.clean for batch in batches])
    images, peer = torch.stack(made[name][: len(batches)]), torch.stack(made[PEER][: len(batches)])
    with FlopCounterMode(display=False) as counter:
        runs[name](batches[:STACK])
    return {
        "seconds per picture": round(seconds, 4),
        # Matrix products of the network and of setting up; LAPACK's solvers are not counted.
        "network gflop per picture": round(counter.get_total_flops() / len(batches[:STACK]) / 1e9, 2),
        "psnr mean": round(float(metric("psnr").function(images, private).mean()), 2),
        "relative difference to the peer": float(f"{float((images - peer).norm() / peer.norm()):.1e}"),
    }


def matrix_rate() -> float:
    """Floating-point operations per second of a large float32 matrix product, the best of five."""
    left, right = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - began)
    return float(2 * MATRIX**3 / min(times[1:]))


if __name__ == "__main__":
    run_function(main)
