"""Closed forms from JPEG files to scores: seconds per 1,000 pictures, by stage, and PSNR by arithmetic."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from fedmjp.arithmetic import Arithmetic, require_arithmetic
from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import showing_pictures
from fedmjp.attacks.held_out import seen_before
from fedmjp.benchmarks.performance.gpu_rates import matrix_rate
from fedmjp.benchmarks.performance.gpu_work import Work
from fedmjp.config import ModelConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source
from fedmjp.errors import ConfigError
from fedmjp.exchange import prepare_private
from fedmjp.metrics import METRICS
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.provenance import hardware
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.stacked import entrance_gradients
from fedmjp.tensors import to_device

MODELS = {"patch_embedding": "deit_small", "april": "deit_small_april"}
STACK, SMALL_STACK = 200, 16  # pictures of a pass, on a GPU and elsewhere
CHUNK = 20  # pictures that a process hands over at a time
METRICS_OF_PICTURES = [name for name, metric in METRICS.items() if metric.of == "pictures"]


def measure(work: Work) -> dict[str, Any]:
    """Each attack in each arithmetic that the device has; stages of float32 alone, one after another."""
    pictures = _Pictures(work)
    peak = matrix_rate(work, "float32") or 0.0
    figures: dict[str, Any] = {
        "pictures": work.n,
        "files": len(pictures.names),
        "processes_that_decode": pictures.processes,
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


class _Pictures(Dataset[Any]):
    """Files, in turn again and again."""

    def __init__(self, work: Work) -> None:
        model = ModelConfig(name="deit_small")
        self._source = open_source(work.pictures, size=model.image_size, classes=model.classes)
        self.names = [name for name in self._source.names() if not seen_before(name)][: work.n]
        self.processes = int(hardware()["cores"]) - 1 if work.on_gpu else 0
        self.metrics = [name for name in METRICS_OF_PICTURES if METRICS[name].missing() is None]

    def __getitem__(self, place: int) -> LabelledPicture:
        return self._source.load(self.names[place % len(self.names)])

    def private(self, count: int, scenario: Scenario) -> Iterable[PrivateBatch]:
        """So many private pictures, in chunks that processes decode ahead; the processes stay from time to time."""
        return DataLoader(
            self,
            batch_size=CHUNK,
            sampler=range(count),
            collate_fn=partial(prepare_private, scenario, number=0),
            num_workers=self.processes,
            persistent_workers=self.processes > 0,
        )


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
        private = self.pictures.private(self.work.n, self._scenario)
        self._all(private)  # warm-up, which starts the processes
        psnr, seconds = self.work.timed(partial(self._all, private))
        per_thousand = 1000 * seconds / self.work.n
        figures = {
            "seconds_per_1000": round(per_thousand, 3),
            "psnr_median": round(float(psnr.median()), 2),
            "psnr_lowest": round(float(psnr.min()), 2),
        }
        return figures if peak is None else figures | self._stages(private, peak, per_thousand)

    def _all(self, private: Iterable[PrivateBatch]) -> Tensor:
        """PSNR of each picture; other metrics are computed, too."""
        psnr = [self._scored(stack, self._solved(self._uploads(stack))) for stack in self._stacks(private)]
        return torch.cat(psnr)

    def _stacks(self, private: Iterable[PrivateBatch]) -> Iterator[list[PrivateBatch]]:
        """Pictures, each a private batch of its own."""
        size = STACK if self.work.on_gpu else SMALL_STACK
        single = (chunk.part(place, place + 1) for chunk in private for place in range(len(chunk.pictures)))
        while stack := list(itertools.islice(single, size)):
            yield stack

    def _stages(self, pictures: Iterable[PrivateBatch], peak: float, per_thousand: float) -> dict[str, Any]:
        """Seconds per 1,000 of each stage alone, and the share of the peak that all of it comes to.

        All pictures are decoded for it, the rest is of the first stack.
        """
        timed = self.work.timed
        stacks, decoding = timed(lambda: list(self._stacks(pictures)))
        private, size = stacks[0], len(stacks[0])
        with FlopCounterMode(display=False) as counter:
            self._uploads(private)
        uploads, differentiating = timed(partial(self._uploads, private))
        made, solving = timed(partial(self._solved, uploads))
        _, scoring = timed(partial(self._scored, private, made))
        gflop = counter.get_total_flops() / size / 1e9
        stages = {"gradients": differentiating / size, "solve": solving / size, "score": scoring / size}
        stages["decode"] = decoding / self.work.n
        return {
            "stages_seconds_per_1000": {name: round(1000 * taken, 3) for name, taken in stages.items()},
            "network_gflop_per_picture": round(gflop, 2),
            "share_of_float32_rate": round(gflop / per_thousand / peak, 3) if peak else None,
        }

    def _uploads(self, private: Sequence[PrivateBatch]) -> list[Upload]:
        tensors = self._attack.tensors(self._model)
        made = entrance_gradients(self._model, private, tensors, arithmetic=self.arithmetic)
        return [Upload(gradients, "gradient", 1, 1, node, "") for node, gradients in enumerate(made)]

    def _solved(self, uploads: Sequence[Upload]) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        made = self._attack.run(uploads, self._model, self._scenario.threat, generator=generator)
        return torch.cat([reconstruction.images for reconstruction in made])

    def _scored(self, private: Sequence[PrivateBatch], made: Tensor) -> Tensor:
        device = torch.device(self.work.device)
        truth, made = to_device(torch.cat([batch.clean for batch in private]), device), to_device(made, device)
        values = {name: METRICS[name].function(made, truth) for name in self.pictures.metrics}
        return values["psnr"].cpu()
