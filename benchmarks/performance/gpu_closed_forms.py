"""Closed forms from JPEG files to scores: seconds per 1,000 pictures, by stage, and PSNR by arithmetic."""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attacks import ATTACKS
from attacks.base import showing_pictures
from attacks.held_out import seen_before
from benchmarks.performance.gpu_rates import matrix_rate
from benchmarks.performance.gpu_work import Work
from fedmjp.arithmetic import Arithmetic, require_arithmetic
from fedmjp.config import ModelConfig
from fedmjp.data.selection import open_source
from fedmjp.errors import ConfigError
from fedmjp.exchange import private_of
from fedmjp.metrics import METRICS
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.provenance import hardware
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.stacked import entrance_gradients

MODELS = {"patch_embedding": "deit_small", "april": "deit_small_april"}
STACK, SMALL_STACK = 200, 16  # pictures of a pass, on a GPU and elsewhere
METRICS_OF_PICTURES = [name for name, metric in METRICS.items() if metric.of == "pictures"]
Waiting = Sequence[Future[PrivateBatch]]


def measure(work: Work) -> dict[str, Any]:
    """Each attack in each arithmetic that the device has; stages of float32 alone, one after another."""
    pictures = _Pictures(work)
    peak = matrix_rate(work, "float32") or 0.0
    figures: dict[str, Any] = {
        "pictures": work.n,
        "files": len(pictures.names),
        "threads_that_decode": pictures.threads,
        "metrics": pictures.metrics,
        "without": [reason for name in METRICS_OF_PICTURES if (reason := METRICS[name].missing())],
    }
    arithmetics: tuple[Arithmetic, ...] = ("float32", "tf32", "bfloat16")
    for attack, name in MODELS.items():
        for arithmetic in arithmetics:
            try:
                require_arithmetic(arithmetic, work.device)
            except ConfigError:
                continue
            run = _Run(work, attack, name, arithmetic, pictures)
            figures[f"{attack} {arithmetic}"] = run.figures(peak if arithmetic == "float32" else None)
    return figures


class _Pictures:
    """Files, in turn again and again, that threads decode ahead of who takes them."""

    def __init__(self, work: Work) -> None:
        model = ModelConfig(name="deit_small")
        self._source = open_source(work.pictures, size=model.image_size, classes=model.classes)
        self.names = [name for name in self._source.names() if not seen_before(name)][: work.n]
        self.threads = int(hardware()["cores"])
        self.metrics = [name for name in METRICS_OF_PICTURES if METRICS[name].missing() is None]

    def private(self, count: int, stack: int, scenario: Scenario, pool: ThreadPoolExecutor) -> Iterator[Waiting]:
        """So many private pictures, in stacks, on their way."""

        def one(name: str) -> PrivateBatch:
            return private_of(scenario, [self._source.load(name)], 0)

        chosen = itertools.islice(itertools.cycle(self.names), count)
        on_their_way = [pool.submit(one, name) for name in chosen]
        for start in range(0, count, stack):
            yield on_their_way[start : start + stack]

    def pool(self) -> ThreadPoolExecutor:
        """Threads, of which torch starts no more."""
        return ThreadPoolExecutor(self.threads, initializer=partial(torch.set_num_threads, 1))


@dataclass
class _Run:
    """One attack, in one arithmetic."""

    work: Work
    attack: str
    model: str
    arithmetic: Arithmetic
    pictures: _Pictures

    def __post_init__(self) -> None:
        self._scenario = Scenario.parse(
            {"model": self.model, "arithmetic": self.arithmetic, "device": self.work.device}
        )
        self._model: VitClassifier = build_vit(self._scenario.network).to(self.work.device)
        self._attack = showing_pictures(ATTACKS.get(self.attack)())

    def figures(self, peak: float | None) -> dict[str, Any]:
        """Seconds of all of it together, per 1,000 pictures, and what it came to; stages where a peak is given."""
        self._all(min(self._stack, self.work.n))  # warm-up
        psnr, seconds = self.work.timed(partial(self._all, self.work.n))
        per_thousand = 1000 * seconds / self.work.n
        figures = {
            "seconds_per_1000": round(per_thousand, 3),
            "psnr_median": round(float(psnr.median()), 2),
            "psnr_lowest": round(float(psnr.min()), 2),
        }
        return figures if peak is None else figures | self._stages(peak, per_thousand)

    @property
    def _stack(self) -> int:
        return STACK if self.work.on_gpu else SMALL_STACK

    def _all(self, count: int) -> Tensor:
        """PSNR of each picture; other metrics are computed, too."""
        psnr = []
        with self.pictures.pool() as pool:
            for waiting in self.pictures.private(count, self._stack, self._scenario, pool):
                private = [batch.result() for batch in waiting]
                psnr.append(self._scored(private, self._solved(self._uploads(private))))
        return torch.cat(psnr)

    def _stages(self, peak: float, per_thousand: float) -> dict[str, Any]:
        """Seconds per 1,000 of each stage alone, of one stack, and the share of the peak that all of it comes to."""
        timed, size = self.work.timed, min(self._stack, self.work.n)

        def decoded() -> list[PrivateBatch]:
            with self.pictures.pool() as pool:
                (waiting,) = self.pictures.private(size, size, self._scenario, pool)
                return [batch.result() for batch in waiting]

        private, decoding = timed(decoded)
        with FlopCounterMode(display=False) as counter:
            self._uploads(private)
        uploads, differentiating = timed(partial(self._uploads, private))
        made, solving = timed(partial(self._solved, uploads))
        _, scoring = timed(partial(self._scored, private, made))
        gflop = counter.get_total_flops() / size / 1e9
        stages = {"decode": decoding, "gradients": differentiating, "solve": solving, "score": scoring}
        return {
            "stages_seconds_per_1000": {name: round(1000 * taken / size, 3) for name, taken in stages.items()},
            "network_gflop_per_picture": round(gflop, 2),
            "share_of_float32_rate": round(gflop / per_thousand / peak, 3) if peak else None,
        }

    def _uploads(self, private: Sequence[PrivateBatch]) -> list[Upload]:
        tensors = self._attack.tensors(self._model)
        made = entrance_gradients(self._model, private, tensors, arithmetic=self.arithmetic)
        return [Upload(gradients, "gradient", 1, 1, node, "") for node, gradients in enumerate(made)]

    def _solved(self, uploads: Sequence[Upload]) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        made = self._attack.reconstruct(uploads, self._model, self._scenario.threat, generator=generator)
        return torch.cat([reconstruction.images for reconstruction in made])

    def _scored(self, private: Sequence[PrivateBatch], made: Tensor) -> Tensor:
        truth = torch.cat([batch.clean for batch in private]).to(self.work.device)
        made = made.to(self.work.device)
        values = {name: METRICS[name].function(made, truth) for name in self.pictures.metrics}
        return values["psnr"].cpu()
