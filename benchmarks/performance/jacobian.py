"""Seconds of a Jacobian of ``network_degraded``, and of one slope of its cost: derivatives written out, and torch's.

``OMP_NUM_THREADS=1 python benchmarks/performance/run.py jacobian --json FILE``

Both differentiate the same function at the same point, in turns: a bundled photograph, of which noise of 1e-2 is on all
gradients. The Jacobian is along the directions in which pictures vary most, in float32; the slope of all entries'
squares is in float64. Ratios are of processor seconds within a turn, which other programs disturb less than wall-clock.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

import fedmjp
from fedmjp.attacks.first_block.places import TokenEmbedding
from fedmjp.attacks.gauss_newton.body import shown_directions
from fedmjp.attacks.gauss_newton.degraded import NetworkDegraded
from fedmjp.attacks.gauss_newton.factors import FactoredModel, Factors
from fedmjp.attacks.gauss_newton.levenberg import jacobian as torch_jacobian
from fedmjp.attacks.gauss_newton.picked import PickedResiduals, UploadedEntries, some
from fedmjp.attacks.gauss_newton.residuals import compared_layers
from fedmjp.attacks.gauss_newton.space import OpenSpace, Prior
from fedmjp.benchmarks.performance.harness import Measurement, benchmark
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.patches import to_patches
from fedmjp.scenario import Scenario
from fedmjp.seeds import torch_generator

MODELS = {"16 patches": "zoo:coarse-none-0", "64 patches": "zoo:wide-none-0"}
SIZE, LABEL = 32, 3  # of the photograph; the models know 32 classes
SLOPES = 10  # timed together
SEED = 0


@benchmark
def jacobian(
    directions: Annotated[int, typer.Option(min=1, help="Of the Jacobian.")] = 384,
    turns: Annotated[int, typer.Option(min=1, help="Of both.")] = 5,
) -> Measurement:
    """Time both and write what came out."""
    figures = {what: _figures(model, directions, turns) for what, model in MODELS.items()}
    return Measurement(
        figures, {"threads": torch.get_num_threads(), "ratios_are": "median, least and greatest of turns"}
    )


def _figures(name: str, count: int, turns: int) -> dict[str, float | list[float]]:
    scenario = Scenario.parse({"model": name, "defences": ["gaussian"], "seed": SEED})
    model = build_vit(scenario.network)
    pictures = [replace(picture, label=LABEL) for picture in fedmjp.bundled_pictures(1, size=SIZE)]
    exchange = scenario.exchange(pictures, model=model)
    layers, label, threat = compared_layers(model), exchange.private.labels, scenario.threat
    known = UploadedEntries.of([exchange.upload], NetworkDegraded().tensors(model), threat, model).known()
    space = OpenSpace.of_shown(shown_directions(TokenEmbedding.of(model)), Prior.of(model))
    patches = to_patches(((exchange.private.clean - model.mean) / model.std).double(), model.patch_size)
    few = some(known, space.root.shape[1], torch_generator(SEED, "entries"))
    coarse, point = space.coarse(space.unknowns(patches), count)
    every, drawn = (PickedResiduals(model, label, entries, threat) for entries in (known, few))
    factored = FactoredModel(model, layers, threat.label_smoothing)

    def by_torch(patches: Tensor) -> Factors:
        return factored(
            patches[None], label, 1, factored.network(patches.dtype).get_parameter(names.POSITION_EMBEDDING)
        )

    arms: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "jacobian": (
            partial(drawn.slopes, drawn.compared, coarse, point),
            partial(torch_jacobian, lambda unknowns: drawn.compared(by_torch(coarse.patches(unknowns)[0])), point),
        ),
        "slope": (
            partial(_slopes, lambda patches: every(patches), patches[0]),
            partial(_slopes, lambda patches: every.compared(by_torch(patches)), patches[0]),
        ),
    }
    figures: dict[str, float | list[float]] = {"entries": drawn.count, "directions": count}
    for what, (ours, torchs) in arms.items():
        made, peer = ours(), torchs()  # warm-up
        taken = np.array([[_seconds(ours), _seconds(torchs)] for _ in range(turns)])
        times = 1 if what == "jacobian" else SLOPES
        figures |= {
            f"{what}_ms": round(1e3 * float(np.median(taken[:, 0])) / times, 1),
            f"{what}_by_torch_ms": round(1e3 * float(np.median(taken[:, 1])) / times, 1),
            f"{what}_ratio": [round(float(value), 2) for value in np.quantile(taken[:, 1] / taken[:, 0], (0.5, 0, 1))],
            f"{what}_apart": float((made - peer).norm() / peer.norm()),
        }
    return figures


def _slopes(residuals: Callable[[Tensor], Tensor], patches: Tensor) -> Tensor:
    """Of the sum of squares, several times."""
    for _ in range(SLOPES):
        begin = patches.clone().requires_grad_()
        (slope,) = torch.autograd.grad(residuals(begin).square().sum(), begin)
    return slope


def _seconds(work: Callable[[], Tensor]) -> float:
    """Of the processor."""
    began = time.process_time()
    work()
    return time.process_time() - began
