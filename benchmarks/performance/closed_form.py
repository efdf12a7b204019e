"""Seconds per picture of APRIL's closed form: breaching's way and ours, in one process on the same pictures.

``python benchmarks/performance/run.py closed_form --pictures FOLDER --n 40 --json FILE``

The peer computes the gradients of all parameters, one picture at a time, and solves with
``closed_form_april``. We compute the gradients that the attack reads, for a stack of pictures in one
pass, and solve with ``april``, the stronger variant; ``april_min_norm``, which gives what the peer
gives, stands beside it. They take turns, stack by stack and several times over, so that a busy
machine slows all; the seconds are medians over the turns, wall-clock and of the processor. With one thread
(``OMP_NUM_THREADS=1``) the latter say the same beside other programs; of several, they count waiting.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Annotated, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import typer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import showing_pictures
from fedmjp.benchmarks.performance.harness import Measurement, benchmark
from fedmjp.benchmarks.scripts import Pictures, load_unseen
from fedmjp.config import ModelConfig
from fedmjp.exchange import prepare_private
from fedmjp.metrics import metric
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.stacked import entrance_gradients
from fedmjp.threat import ThreatModel
from fedmjp.updates import gradient

MODEL = ModelConfig(name="deit_small_april")
OURS = ("april", "april_min_norm")
PEER = "breaching"
NETWORK, MATRICES = "network of april", "matrix product"
CLOCKS = ("", " by processor")
STACK = 16
REPEATS = 4
MATRIX = 2048
SEED = 0
T = TypeVar("T")
Times = npt.NDArray[np.float64]  # wall-clock, processor
Run = Callable[[Sequence[PrivateBatch]], list[Tensor]]


@benchmark
def closed_form(pictures: Pictures, n: Annotated[int, typer.Option(help="Number of pictures.")] = 40) -> Measurement:
    """Time both and write what came out."""
    model, scenario = build_vit(MODEL), Scenario(model=MODEL, seed=SEED)
    batches = [prepare_private(scenario, [picture], 0) for picture in load_unseen(pictures, n, MODEL, SEED)]
    runs: dict[str, Run] = {PEER: _peer(model)} | {attack: _ours(attack, model) for attack in OURS}
    turns: dict[str, list[Times]] = {name: [] for name in (*runs, NETWORK, MATRICES)}
    made: dict[str, list[Tensor]] = {name: [] for name in runs}
    network, factor = _network(model), torch.rand(MATRIX, MATRIX)
    for run in (*runs.values(), network):
        run(batches[:STACK])  # warm-up
    for start in [*range(0, n, STACK)] * REPEATS:
        stack = batches[start : start + STACK]
        for name, run in runs.items():
            images, times = _timed(partial(run, stack))
            made[name] += images
            turns[name].append(times / len(stack))
        turns[NETWORK].append(_timed(partial(network, stack))[1] / len(stack))
        turns[MATRICES].append(_timed(partial(torch.matmul, factor, factor))[1])
    figures = {name: _figures(run, turns[name], made[name], made[PEER], batches) for name, run in runs.items()}
    for name in OURS:
        for clock, kind in enumerate(CLOCKS):
            theirs, ours = (np.array(turns[each])[:, clock] for each in (PEER, name))
            figures[name] |= {
                f"times as fast as the peer{kind}": round(float(np.median(theirs) / np.median(ours)), 2),
                f"lowest of all turns{kind}": round(float((theirs / ours).min()), 2),
                f"highest of all turns{kind}": round(float((theirs / ours).max()), 2),
            }
    rates = 2 * MATRIX**3 / np.median(turns[MATRICES], axis=0) / 1e9
    work = 1e-9 * _operations(network, batches)
    figures[NETWORK] = {"gflop per picture": round(work, 2)}
    machine: dict[str, float] = {"threads": torch.get_num_threads()}
    for rate, seconds, kind in zip(rates, np.median(turns[NETWORK], axis=0), CLOCKS, strict=True):
        machine[f"matrix_product_gflop_per_second{kind}"] = round(float(rate), 1)
        figures[NETWORK] |= {
            f"seconds per picture{kind}": round(float(seconds), 4),
            f"share of the matrix rate{kind}": round(float(work / seconds / rate), 2),
        }
    about = {"model": MODEL.model_dump(), "pictures": n, "stack": STACK, "seed": SEED, **machine}
    return Measurement({"results": figures}, about)


def _timed(work: Callable[[], T]) -> tuple[T, Times]:
    """Return what the work gives, and its seconds by both clocks."""
    began = np.array([time.perf_counter(), time.process_time()])
    return work(), np.array([time.perf_counter(), time.process_time()]) - began


def _network(model: VitClassifier) -> Run:
    """Return what ``april`` needs of the network, without its solver."""
    wanted = showing_pictures(ATTACKS.get("april")()).tensors(model)

    def run(batches: Sequence[PrivateBatch]) -> list[Tensor]:
        return [gradients[wanted[0]] for gradients in entrance_gradients(model, batches, wanted)]

    return run


def _operations(run: Run, batches: Sequence[PrivateBatch]) -> float:
    """Per picture, of matrix products; LAPACK's solvers are not counted."""
    with FlopCounterMode(display=False) as counter:
        run(batches[:STACK])
    return float(counter.get_total_flops()) / len(batches[:STACK])


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
            for reconstruction in attack.run(uploads, model, ThreatModel(), generator=generator)
        ]

    return run


def _figures(
    run: Run, turns: Sequence[Times], made: list[Tensor], peers: list[Tensor], batches: Sequence[PrivateBatch]
) -> dict[str, float]:
    private = torch.cat([batch.clean for batch in batches])
    images, peer = torch.stack(made[: len(batches)]), torch.stack(peers[: len(batches)])
    seconds = zip(CLOCKS, np.median(turns, axis=0), strict=True)
    return {
        **{f"seconds per picture{kind}": round(float(taken), 4) for kind, taken in seconds},
        "gflop per picture": round(1e-9 * _operations(run, batches), 2),
        "psnr mean": round(float(metric("psnr").function(images, private).mean()), 2),
        "relative difference to the peer": float(f"{float((images - peer).norm() / peer.norm()):.1e}"),
    }
