"""Does noise keep the epsilon that it claims? Two neighbours told apart, and one picture among 64 named, by the upload.

``python results/dp_audit/study.py --data FOLDER --output FOLDER``. Each mechanism (``local_dp``, ``dp_sgd``) is tried
with its noise in whole numbers, as it is, and in float32, as it was: ``u = fl(g + fl(s n))``. Of the floats only some
can be reached from a given g, and which ones tells g (Mironov, CCS 2012, for Laplace noise).

- ``epsilon``: an adversary names two neighbours, as far apart as the mechanism allows, and decides by one upload. A
  threshold is set on runs of its own. The bound is ln((found - delta) / false alarms), at worst within Clopper and
  Pearson's intervals, and shared among the tests that are tried: Jagielski et al., NeurIPS 2020.
- ``labels``: a malicious server sends weights whose whole gradient is one row per class, and reads the label of each
  upload. Beside it what epsilon allows: the most likely of so many equally far points under Gaussian noise.
- ``identity``: an honest server has a trained network's gradients of 64 candidates, and names the picture of an upload.

Tests: ``lattice`` counts the entries that the candidate cannot have reached, ``filter`` takes the upload's product with
what the candidate would send, which is the best that there is against Gaussian noise.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import typer
from scipy.integrate import quad
from scipy.stats import beta, norm
from torch import Tensor

from fedmjp.benchmarks.scripts import Pictures, keep_table, load_unseen
from fedmjp.defences.dp_sgd import DpSgd
from fedmjp.defences.local_dp import LocalDp
from fedmjp.defences.privacy import Calibrated
from fedmjp.models.build import build_vit
from fedmjp.randomness import Randomness, SeededRandomness
from fedmjp.running import run_function
from fedmjp.scenario import Scenario

MODEL = "zoo:coarse-none-0"
MECHANISMS: Mapping[str, type[Calibrated]] = {each.name: each for each in (LocalDp, DpSgd)}
EPSILONS = (0.1, 1.0, 8.0)
EPSILONS_OF_LABELS = (1.0, 3.0, 8.0, 50.0)
LABELLED = 1_000  # uploads
ENTRIES = 64  # of the neighbours' updates
RUNS, FIRST_RUNS = 10_000, 1_000
CANDIDATES, UPLOADS = 64, 24
LEVEL = 0.95
NEIGHBOURS = range(-2, 3)  # floats around (u - g) / s that are tried
NAME = "w"

Release = Callable[[Mapping[str, Tensor], Randomness], dict[str, Tensor]]


def releases(mechanism: Calibrated) -> dict[str, Release]:
    """List a mechanism's ways to add its noise, by their name.

    Args:
        mechanism: That clips one vector to a norm of 1.
    """

    def whole(vector: Mapping[str, Tensor], randomness: Randomness) -> dict[str, Tensor]:
        return mechanism.release([vector], randomness=randomness)

    def floating(vector: Mapping[str, Tensor], randomness: Randomness) -> dict[str, Tensor]:
        deviation = mechanism.deviation
        return {name: tensor + deviation * randomness.normal(name, tensor.shape) for name, tensor in vector.items()}

    return {"whole numbers": whole, "float32": floating}


def impossible(upload: Tensor, candidate: Tensor, deviation: float) -> int:
    """Count the entries of an upload that no float32 noise reaches from a candidate.

    Args:
        upload: (n,) float32.
        candidate: (n,) float32, of the same shape, as it is before the noise.
        deviation: Standard deviation of the noise.
    """
    uploaded, sent = upload.numpy(), candidate.numpy()
    scale = np.float32(deviation)
    nearest = ((uploaded.astype(np.float64) - sent) / float(scale)).astype(np.float32)
    reached = np.zeros(uploaded.shape, dtype=bool)
    for steps in NEIGHBOURS:
        noise = nearest
        for _ in range(abs(steps)):
            noise = np.nextafter(noise, np.float32(math.copysign(math.inf, steps)))
        reached |= (sent + scale * noise).astype(np.float32) == uploaded
    return int((~reached).sum())


def epsilon_bound(hits: int, alarms: int, runs: int, delta: float, tests: int) -> float:
    """Bound the epsilon of a mechanism from below, by how often two neighbours are told apart.

    Args:
        hits: Runs on the first neighbour that are called so.
        alarms: Runs on the second that are called the first.
        runs: On each.
        delta: Of the claimed guarantee.
        tests: That were tried, and share the level.
    """
    miss = (1 - LEVEL) / 2 / tests
    least = float(beta.ppf(miss, hits, runs - hits + 1)) if hits else 0.0
    most = float(beta.ppf(1 - miss, alarms + 1, runs - alarms)) if alarms < runs else 1.0
    return max(0.0, math.log(max(least - delta, 1e-300) / most))


def neighbours(mechanism: Calibrated) -> tuple[Tensor, Tensor]:
    """Name two vectors that are as far apart as neighbours can be: opposite ones, or one and none.

    Args:
        mechanism: That clips to a norm of 1.
    """
    one = torch.full((ENTRIES,), 1 / math.sqrt(ENTRIES))
    return one, -one if mechanism.sensitivity == 2 else torch.zeros(ENTRIES)


def told_apart(name: str, epsilon: float, runs: int = RUNS) -> list[dict[str, Any]]:
    """Measure how well a mechanism's neighbours are told apart, in a row for each noise and test.

    Args:
        name: Of the mechanism.
        epsilon: That it claims for one upload.
        runs: On each neighbour, after a tenth as many that set the threshold.
    """
    mechanism = MECHANISMS[name]({"epsilon": epsilon})
    first, second = neighbours(mechanism)
    tests: dict[str, Callable[[Tensor], float]] = {
        "lattice": lambda upload: float(
            impossible(upload, second, mechanism.deviation) - impossible(upload, first, mechanism.deviation)
        ),
        "filter": lambda upload: float(upload @ (first - second)),
    }
    rows = []
    for noise, release in releases(mechanism).items():
        source = SeededRandomness(0, ("dp_audit", name, epsilon, noise))
        scores = {test: np.empty((2, runs + runs // 10)) for test in tests}
        for side, vector in enumerate((first, second)):
            for run in range(runs + runs // 10):
                upload = release({NAME: vector}, source.of(side, run))[NAME]
                for test, score in tests.items():
                    scores[test][side, run] = score(upload)
        for test, (ours, other) in scores.items():
            rows.append(
                {"mechanism": name, "claimed": epsilon, "noise": noise, "test": test, "runs": runs}
                | _bounded(ours, other, runs, float(mechanism.options.delta), len(tests))
            )
    return rows


def _bounded(ours: Any, other: Any, runs: int, delta: float, tests: int) -> dict[str, Any]:
    """Set the threshold on the first runs, where the bound is largest, and count the others."""
    start = len(ours) - runs

    def counts(threshold: float, runs_of: slice) -> tuple[int, int]:
        return int((ours[runs_of] > threshold).sum()), int((other[runs_of] > threshold).sum())

    thresholds = np.quantile(np.concatenate([ours[:start], other[:start]]), np.linspace(0.01, 0.99, 99))
    best = max(thresholds, key=lambda value: epsilon_bound(*counts(value, slice(start)), start, delta, tests))
    hits, alarms = counts(best, slice(start, None))
    return {"hits": hits, "alarms": alarms, "bound": round(epsilon_bound(hits, alarms, runs, delta, tests), 3)}


def gradients(data: str, count: int) -> list[Tensor]:
    """Compute a trained network's gradients of pictures, each clipped to a norm of 1, as one vector (n,).

    Args:
        data: Folder of pictures.
        count: Of them.
    """
    scenario = Scenario.parse({"model": MODEL})
    vectors = []
    for picture in load_unseen(data, count, scenario.model, 0):
        tensors = scenario.exchange([picture]).upload.tensors
        vector = torch.cat([tensor.flatten() for tensor in tensors.values()])
        vectors.append(vector / max(1.0, float(vector.double().norm())))
    return vectors


def named(name: str, epsilon: float, candidates: Sequence[Tensor], uploads: int = UPLOADS) -> list[dict[str, Any]]:
    """Name the candidate behind each upload of a client, in a row for each noise and test.

    Args:
        name: Of the mechanism.
        epsilon: That it claims for one upload.
        candidates: Vectors of a norm up to 1.
        uploads: Of the first candidates.
    """
    mechanism = MECHANISMS[name]({"epsilon": epsilon})
    tests: dict[str, Callable[[Tensor, Tensor], float]] = {
        "lattice": lambda upload, candidate: -float(impossible(upload, candidate, mechanism.deviation)),
        "filter": lambda upload, candidate: float(upload @ candidate - candidate @ candidate / 2),
    }
    rows = []
    for noise, release in releases(mechanism).items():
        source = SeededRandomness(0, ("dp_audit", "identity", name, epsilon, noise))
        sent = [release({NAME: candidates[place]}, source.of(place))[NAME] for place in range(uploads)]
        for test, score in tests.items():
            values = np.array([[score(upload, candidate) for candidate in candidates] for upload in sent])
            own = values[np.arange(uploads), np.arange(uploads)]
            others = [np.delete(row, place) for place, row in enumerate(values)]
            first = sum(value > rest.max() for value, rest in zip(own, others, strict=True))  # a tie names nobody
            rows.append(
                {"mechanism": name, "claimed": epsilon, "noise": noise, "test": test, "runs": uploads}
                | {"candidates": len(candidates), "hits": int(first)}
            )
    return rows


def concentrated(data: str, count: int) -> tuple[list[Tensor], list[int]]:
    """Compute the clipped gradients (n,) of every class at weights that concentrate them, and labels of pictures.

    The last normalisation gives ones whatever the picture, and the head is zero: then the gradient is the head's alone,
    and tells nothing but the label.

    Args:
        data: Folder of pictures.
        count: Of them.
    """
    config = Scenario.parse({"model": MODEL}).model
    network = build_vit(config)
    vit = network.backbone
    with torch.no_grad():
        for tensor, number in (
            (vit.norm.weight, 0.0), (vit.norm.bias, 1.0), (vit.head.weight, 0.0), (vit.head.bias, 0.0)
        ):  # fmt: skip
            tensor.fill_(number)
    pictures = load_unseen(data, count, config, 0)

    def gradient(image: Tensor, label: int) -> Tensor:
        loss = F.cross_entropy(network(image[None]), torch.tensor([label]))
        vector = torch.cat([value.flatten() for value in torch.autograd.grad(loss, list(network.parameters()))])
        return vector / max(1.0, float(vector.norm()))

    classes = [gradient(torch.full_like(pictures[0].image, 0.5), label) for label in range(config.classes)]
    for picture in pictures[:8]:
        torch.testing.assert_close(gradient(picture.image, picture.label), classes[picture.label])
    return classes, [picture.label for picture in pictures]


def read_labels(name: str, epsilon: float, classes: Sequence[Tensor], labels: Sequence[int]) -> dict[str, Any]:
    """Read the label of each upload by a matched filter.

    Args:
        name: Of the mechanism.
        epsilon: That it claims for one upload.
        classes: What an upload of each label is before the noise.
        labels: Of the uploads.
    """
    mechanism = MECHANISMS[name]({"epsilon": epsilon})
    source = SeededRandomness(0, ("dp_audit", "labels", name, epsilon))
    # Entries that are the same under every label tell nothing; their noise is left out.
    told = torch.stack(list(classes)).ne(classes[0]).any(dim=0)
    rows = torch.stack([vector[told] for vector in classes])
    hits = 0
    for run, label in enumerate(labels):
        upload = mechanism.release([{NAME: classes[label]}], randomness=source.of(run))[NAME]
        hits += int((rows @ upload[told]).argmax()) == label
    distance = float((rows[0] - rows[1]).norm()) / mechanism.deviation
    allowed, _ = quad(lambda z: norm.pdf(z - distance / math.sqrt(2)) * norm.cdf(z) ** (len(rows) - 1), -10, 30)
    return {
        "mechanism": name, "claimed": epsilon, "noise": "whole numbers", "test": "filter", "runs": len(labels),
        "candidates": len(rows), "hits": hits, "allowed": round(allowed, 4),
    }  # fmt: skip


def main(
    data: Pictures,
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")],
) -> None:
    """Measure every mechanism at every epsilon, and keep the rows."""
    candidates, (classes, labels) = gradients(data, CANDIDATES), concentrated(data, LABELLED)
    rows = [
        {"question": "labels", **read_labels(name, epsilon, classes, labels)}
        for name in MECHANISMS
        for epsilon in EPSILONS_OF_LABELS
    ] + [
        {"question": question, **row}
        for name in MECHANISMS
        for epsilon in EPSILONS
        for question, found in (
            ("epsilon", told_apart(name, epsilon)),
            ("identity", named(name, epsilon, candidates)),
        )
        for row in found
    ]
    table = pd.DataFrame(rows)
    typer.echo(table.to_string(index=False))
    keep_table(output, table, {"study": "dp_audit", "model": MODEL, "entries": ENTRIES, "level": LEVEL, "seed": 0})


if __name__ == "__main__":
    run_function(main)
