"""Seconds per picture of APRIL's closed form: breaching's way and ours, in one process on the same pictures.

``python -m benchmarks.performance.closed_form --pictures FOLDER --n 40 --json FILE``

The peer computes the gradients of all parameters, one picture at a time, and solves with
``closed_form_april``. We compute the gradients that the attack reads, for a stack of pictures in one
pass, and solve with ``april``, the stronger variant; ``april_min_norm``, which gives what the peer
gives, stands beside it. They take turns, stack by stack and several times over, so that a busy
machine slows all; the seconds are medians over the turns.
"""

import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attacks import ATTACKS
from attacks.base import showing_pictures
from benchmarks.scripts import Json, Pictures, keep_figures, timed, unseen
from fedmjp.config import ModelConfig
from fedmjp.exchange import private_of
from fedmjp.metrics import metric
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.running import run_function
from fedmjp.scenario import Scenario
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


def main(pictures: Pictures, json: Json, n: Annotated[int, typer.Option(help="Number of pictures.")] = 40) -> None:
    """Time both and write what came out."""
    model, scenario = build_vit(MODEL), Scenario(model=MODEL, seed=SEED)
    batches = [private_of(scenario, [picture], 0) for picture in unseen(pictures, n, MODEL, SEED)]
    runs: dict[str, Run] = {PEER: _peer(model)} | {attack: _ours(attack, model) for attack in OURS}
    turns: dict[str, list[float]] = {name: [] for name in runs}
    made: dict[str, list[Tensor]] = {name: [] for name in runs}
    for run in runs.values():
        run(batches[:STACK])  # warm-up
    for start in [*range(0, n, STACK)] * REPEATS:
        stack = batches[start : start + STACK]
        for name, run in runs.items():
            images, seconds = timed(partial(run, stack))
            made[name] += images
            turns[name].append(seconds / len(stack))
    figures = {name: _figures(run, turns[name], made[name], made[PEER], batches) for name, run in runs.items()}
    for name in OURS:
        paired = [theirs / ours for theirs, ours in zip(turns[PEER], turns[name], strict=True)]
        figures[name] |= {
            "times as fast as the peer": round(statistics.median(turns[PEER]) / statistics.median(turns[name]), 2),
            "lowest of all turns": round(min(paired), 2),
            "highest of all turns": round(max(paired), 2),
        }
    machine = {"matrix_product_gflop_per_second": round(matrix_rate() / 1e9, 1), "threads": torch.get_num_threads()}
    about = {"model": MODEL.model_dump(), "pictures": n, "stack": STACK, "seed": SEED, **machine}
    keep_figures(json, {"results": figures}, about)


def _peer(model: VitClassifier) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from breaching.attacks.analytic_attack import AprilAttacker  # type: ignore[import-untyped]

    def run(batches: Sequence[PrivateBatch]) -> list[Tensor]:
        images = []
        for batch in batches:
            tensors = gradient(model, batch)
            # It wants the timm model in a container and gradients at fixed places of a list.
            listed = [None, tensors[names.POSITION_EMBEDDING], None, None, tensors[names.FIRST_QKV_WEIGHT]]
            patches = AprilAttacker.closed_form_april(SimpleNamespace(model=model.backbone), {"gradients": listed})
            images.append(model.denormalise(AprilAttacker.recover_patch(patches)).float())
        return images

    return run


def _ours(name: str, model: VitClassifier) -> Run:
    attack = showing_pictures(ATTACKS.get(name)())

    def run(batches: Sequence[PrivateBatch]) -> list[Tensor]:
        tensors = entrance_gradients(model, batches, attack.tensors(model))
        uploads = [Upload(gradients, "gradient", 1, 1, node, "") for node, gradients in enumerate(tensors)]
        generator = torch.Generator().manual_seed(SEED)
        return [
            reconstruction.images[0]
            for reconstruction in attack.reconstruct(uploads, model, ThreatModel(), generator=generator)
        ]

    return run


def _figures(
    run: Run, turns: Sequence[float], made: list[Tensor], peers: list[Tensor], batches: Sequence[PrivateBatch]
) -> dict[str, float]:
    private = torch.cat([batch.clean for batch in batches])
    images, peer = torch.stack(made[: len(batches)]), torch.stack(peers[: len(batches)])
    with FlopCounterMode(display=False) as counter:
        run(batches[:STACK])
    return {
        "seconds per picture": round(statistics.median(turns), 4),
        # Matrix products of the network and of setting up; LAPACK's solvers are not counted.
        "network gflop per picture": round(counter.get_total_flops() / len(batches[:STACK]) / 1e9, 2),
        "psnr mean": round(float(metric("psnr").function(images, private).mean()), 2),
        "relative difference to the peer": float(f"{float((images - peer).norm() / peer.norm()):.1e}"),
    }


def matrix_rate() -> float:
    """Floating-point operations per second of a large float32 matrix product, the best of five."""
    left, right = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    times = [timed(partial(torch.matmul, left, right))[1] for _ in range(6)]
    return 2 * MATRIX**3 / min(times[1:])


if __name__ == "__main__":
    run_function(main)
