"""Benchmarks of a GPU: tests, matrix rates, closed forms, training and gradient matching, in one call.

Their device and size of work, with times on it, are a ``Work``.

How fast the device multiplies matrices and moves bytes, and solves the small systems of closed forms.

The tests that run on CUDA where there is one.

Gradient matching of DeiT-S at 224 pixels: milliseconds per iteration and picture, many pictures at once.

Closed forms from JPEG files to scores: seconds per 1,000 pictures, by stage, and PSNR by arithmetic.

Training steps of DeiT-S at 224 pixels in pictures per second, with and without MJP, beside a bare loop.

What a GPU makes of it: tests, matrix rates, closed forms, training and gradient matching, in one call.

``python benchmarks/performance/run.py gpu --pictures FOLDER --json FILE --minutes 8``

Each part is written as soon as it is done, and one that fails leaves its error and does not stop the others. On a CPU,
``--n 4`` shows that it runs; its figures say nothing there.
"""

import gc
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar
from xml.etree import ElementTree as ET

import torch
import torch.nn.functional as F
import typer
from timm import create_model
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

import fedmjp
from fedmjp.arithmetic import Arithmetic, computing, require_arithmetic
from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import showing_pictures
from fedmjp.attacks.gradient_matching import GradientMatching
from fedmjp.attacks.held_out import seen_before
from fedmjp.benchmarks.performance.harness import Measurement, benchmark
from fedmjp.benchmarks.scripts import Pictures
from fedmjp.config import ModelConfig
from fedmjp.data.datasets import open_dataset
from fedmjp.data.loading import Batch, training_epochs
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source
from fedmjp.defences.pipeline import read_pipeline
from fedmjp.errors import ConfigError, UnknownNameError
from fedmjp.exchange import prepare_private
from fedmjp.learning import Learning, Puzzle, Recipe
from fedmjp.metrics import METRICS, metric
from fedmjp.models.build import build, build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.provenance import hardware
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.stacked import entrance_gradients
from fedmjp.tensors import to_device
from fedmjp.training.loop import Schedule, Trainer

Result = TypeVar("Result")


@dataclass(frozen=True)
class Work:
    """What is asked for.

    Attributes:
        device: cuda, or cpu to see whether it runs.
        pictures: Their source.
        n: Of the closed forms.
        deadline: By ``time.monotonic``.
    """

    device: str
    pictures: str
    n: int
    deadline: float

    @property
    def on_gpu(self) -> bool:
        """Whether sizes are those of a GPU."""
        return self.device == "cuda"

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Result]) -> tuple[Result, float]:
        """Return what the work gives, and the seconds until the device has done it."""
        self.wait()
        began = time.perf_counter()
        made = work()
        self.wait()
        return made, time.perf_counter() - began

    def free(self) -> None:
        """Give memory back that nothing uses."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


RATE_REPEATS = 10
SIDE, SMALL_SIDE = 8192, 512  # of matrices, on a GPU and elsewhere
MOVED = 2**30  # float32 values
TOKENS, DIM = 196, 384  # of the system of one upload, DeiT-S at 224 pixels


def measure_rates(work: Work) -> dict[str, Any]:
    """TFLOP/s of a large product of random matrices by arithmetic, GB/s of a copy, ms of a stack of small systems."""
    rates = {f"{name}_tflop_per_second": _matrix_rate(work, name) for name in ("float32", "tf32", "bfloat16")}
    values = torch.rand(MOVED if work.on_gpu else SMALL_SIDE**2, device=work.device)
    copied = 2 * values.numel() * values.element_size() / _median(work, values.clone)
    return {**rates, "copy_gb_per_second": round(copied / 1e9, 1), "ms_per_system": _systems(work)}


def _matrix_rate(work: Work, arithmetic: Arithmetic) -> float | None:
    """TFLOP/s of a product of random matrices; None where the device has no such arithmetic."""
    try:
        require_arithmetic(arithmetic, work.device)
    except ConfigError:
        return None
    side = SIDE if work.on_gpu else SMALL_SIDE
    dtype = torch.bfloat16 if arithmetic == "bfloat16" else torch.float32
    left, right = (torch.randn(side, side, device=work.device, dtype=dtype) for _ in range(2))
    with computing(arithmetic, work.device):
        return round(2 * side**3 / _median(work, partial(torch.matmul, left, right)) / 1e12, 2)


def _systems(work: Work) -> dict[str, float]:
    """Milliseconds per upload of the float64 factorisations that closed forms are made of, in stacks."""
    stack = 64 if work.on_gpu else 2
    tall = torch.randn(stack, DIM, TOKENS, device=work.device, dtype=torch.float64)
    square = tall.mT @ tall
    tried: dict[str, Callable[[], object]] = {
        "cholesky": partial(torch.linalg.cholesky_ex, square),
        "householder": partial(torch.linalg.qr, tall),
        "eigenvectors": partial(torch.linalg.eigh, square),
        "singular_vectors": partial(torch.linalg.svd, square),
    }
    return {name: round(1e3 * _median(work, solve, 2) / stack, 4) for name, solve in tried.items()}


def _median(work: Work, task: Callable[[], object], repeats: int = RATE_REPEATS) -> float:
    work.timed(task)
    return statistics.median(work.timed(task)[1] for _ in range(repeats))


ROOT = Path(fedmjp.__file__).resolve().parents[1]
PROCESSES = 6
LONGEST = 200  # seconds
TOLD = 400  # letters of a failure


def measure_tests(work: Work) -> dict[str, Any]:
    """Count the passed, failed and skipped, and the first lines of each failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-n", str(PROCESSES), "--dist", "load", "-m", "cuda"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", "tests/test_cuda.py"]
        # One thread each, as tests have it everywhere.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, check=False, timeout=min(LONGEST, work.left()), capture_output=True
            )
        except subprocess.TimeoutExpired as cut:
            lines = (cut.stdout or b"").decode(errors="replace").splitlines()
            failed = [line for line in lines if " FAILED " in line]
            passed = sum(" PASSED " in line for line in lines)
            return {"cut_after_seconds": cut.timeout, "passed": passed, "failed": len(failed), "failures": failed}
        if not report.exists():
            return {"error": (ended.stdout + ended.stderr).decode(errors="replace")[-2000:]}
        return _counted(ET.parse(report).getroot())  # noqa: S314 (pytest wrote it just now)


def _counted(root: ET.Element) -> dict[str, Any]:
    cases = list(root.iter("testcase"))
    wrong = {}
    for case in cases:
        found = [child for child in case if child.tag in ("failure", "error")]
        if found:
            wrong[case.get("name", "")] = f"{found[0].get('message', '')}"[:TOLD]
    skipped = sum(child.tag == "skipped" for case in cases for child in case)
    return {"passed": len(cases) - len(wrong) - skipped, "failed": len(wrong), "skipped": skipped, "failures": wrong}


MATCHED, MATCHED_SMALL = ModelConfig(name="deit_small"), ModelConfig(name="deit_tiny", image_size=64, patch_size=8)
AT_ONCE = (1, 8, 32)
FEW, MANY = 5, 25  # iterations: their difference leaves out what is done once
ALL = {"tensors": "all"}


def measure_matching(work: Work) -> dict[str, Any]:
    """By arithmetic of the search and pictures at once, with the tensors of the default and with all."""
    arithmetics = ("float32", "tf32") if work.on_gpu else ("float32",)
    figures: dict[str, Any] = {"model": (MATCHED if work.on_gpu else MATCHED_SMALL).name}
    for arithmetic in arithmetics:
        for count in AT_ONCE if work.on_gpu else (1,):
            figures[f"{arithmetic} {count} at once"] = _matched(work, count, {"arithmetic": arithmetic})
    if work.on_gpu:
        figures["float32 8 at once, all tensors"] = _matched(work, 8, ALL)
    return figures


def _matched(work: Work, count: int, options: dict[str, Any]) -> dict[str, float]:
    scenario = Scenario.parse(
        {"model": MATCHED if work.on_gpu else MATCHED_SMALL, "labels_known": True, "device": work.device}
    )
    model = build_vit(scenario.network).to(work.device)
    generator = torch.Generator().manual_seed(0)
    size = model.image_size
    truths = [torch.rand(3, size, size, generator=generator) for _ in range(count)]
    pictures = [LabelledPicture(f"noise {place}", truth, place) for place, truth in enumerate(truths)]
    uploads = [scenario.exchange([picture], model=model).upload for picture in pictures]
    seconds = {}
    few, many = (FEW, MANY) if work.on_gpu else (1, 2)
    for iterations in (few, few, many):  # the first warms up
        attack = GradientMatching({"iterations": iterations, "parallel": count, **options})
        run = partial(attack.run, uploads, model, scenario.threat, generator=generator)
        made, seconds[iterations] = work.timed(run)
    psnr = metric("psnr").function(torch.cat([one.images for one in made]), torch.stack(truths))
    taken = (seconds[many] - seconds[few]) / (many - few)
    return {
        "ms_per_iteration_and_picture": round(1e3 * taken / count, 3),
        "psnr_mean": round(float(psnr.mean()), 2),
    }


CLOSED_FORMS = {"patch_embedding": "deit_small", "april": "deit_small_april"}
STACK, SMALL_STACK = 200, 16  # pictures of a pass, on a GPU and elsewhere
CHUNK = 20  # pictures that a process hands over at a time
METRICS_OF_PICTURES = [name for name, metric in METRICS.items() if metric.of == "pictures"]


def measure_closed_forms(work: Work) -> dict[str, Any]:
    """Each attack in each arithmetic that the device has; stages of float32 alone, one after another."""
    pictures = _Pictures(work)
    peak = _matrix_rate(work, "float32") or 0.0
    figures: dict[str, Any] = {
        "pictures": work.n,
        "files": len(pictures.names),
        "processes_that_decode": pictures.processes,
        "metrics": pictures.metrics,
        "without": [reason for name in METRICS_OF_PICTURES if (reason := METRICS[name].missing())],
    }
    arithmetics: tuple[Arithmetic, ...] = ("float32", "tf32", "bfloat16")
    for attack, name in CLOSED_FORMS.items():
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


# Defences, changes of the model, the puzzle's schedule.
ARMS: dict[str, tuple[list[str], dict[str, Any], Puzzle]] = {
    "none": ([], {}, Puzzle()),
    "mjp": (["mjp"], {"localisation": "nonlinear"}, Puzzle()),
    "mjp_masks_per_batch": (["mjp"], {"localisation": "nonlinear"}, Puzzle(masks="batch")),
}
BATCH, SMALL_BATCH = 512, 2  # pictures, on a GPU and elsewhere
STEPS = 20
SHORTEST = 45.0  # seconds that an arm takes to compile and to be timed
REPEATED = 40  # times that the loader goes through its files


def measure_training(work: Work, arm: str) -> dict[str, Any]:
    """One of ``ARMS`` compiled, or none of them compiled, or what they are held against.

    The bare loop is timm's model under autocast, compiled, with AdamW; nothing makes it repeat.
    """
    if work.on_gpu and work.left() < SHORTEST:
        return {"left_out": "the time was nearly up"}
    made = {"uncompiled": partial(_ours, work, "none", compiled=False), "bare": partial(_bare, work)}
    made |= {"loader": partial(_loader, work)}
    figures = made[arm]() if arm in made else _ours(work, arm)
    return {"batch": _batch_size(work), **figures}


def _ours(work: Work, arm: str, *, compiled: bool = True) -> dict[str, Any]:
    trainer = _trainer(work, arm, _recipe(work, compiled=compiled and work.on_gpu))
    # As readers bring them.
    batches = [
        replace(batch, drawn=trainer.puzzles.ahead(0, step, batch.indices)) for step, batch in enumerate(_batches(work))
    ]
    trainer.epoch(0, batches)  # compiles
    steps = _steps(work)
    report = trainer.epoch(1, (batches[step % len(batches)] for step in range(steps)))
    return {
        "pictures_per_second": round(report.images_per_second, 1),
        "loss": round(report.loss, 4),
        "memory_gb": _memory(work),
    }


def _bare(work: Work) -> dict[str, Any]:
    model = create_model("deit_small_patch16_224").to(work.device).to(memory_format=torch.channels_last)
    compiled: Any = torch.compile(model) if work.on_gpu else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=work.on_gpu)
    batches = _batches(work)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(work.device, torch.bfloat16):
            loss = F.cross_entropy(compiled(batch.images), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    def several(steps: int) -> None:
        for number in range(steps):
            step(batches[number % len(batches)])

    several(3)
    steps = _steps(work)
    _, seconds = work.timed(partial(several, steps))
    return {"pictures_per_second": round(steps * _batch_size(work) / seconds, 1), "memory_gb": _memory(work)}


def _loader(work: Work) -> dict[str, Any]:
    """Pictures per second that the loader decodes and augments, by the recipe."""
    recipe = _recipe(work, workers=15 if work.on_gpu else 0)
    pictures = open_dataset(work.pictures, "train", classes=1000)
    indices = torch.arange(len(pictures)).repeat(REPEATED if work.on_gpu else 1).numpy()
    _, batches = next(training_epochs(pictures, indices, recipe, size=224, seed=0, epochs=(0,)))
    next(batches)  # starts the processes
    began, seen = time.perf_counter(), 0
    for batch in batches:
        seen += len(batch.labels)
        if seen >= _steps(work) * _batch_size(work):
            break
    seconds = time.perf_counter() - began
    return {"pictures_per_second": round(seen / seconds, 1), "processes": recipe.workers}


def _trainer(work: Work, arm: str, recipe: Recipe) -> Trainer:
    defences, changes, puzzle = ARMS[arm]
    pipeline = read_pipeline(defences)
    network = pipeline.change_model(ModelConfig.parse({"name": "deit_small", **changes}))
    model = build(network, drop_path=0.1).to(work.device)
    model = model.to(memory_format=torch.channels_last)
    learning = Learning(recipe=recipe, puzzle=puzzle)
    return Trainer(model, learning, pipeline, schedule=Schedule(2, _steps(work)), seed=0)


def _recipe(work: Work, *, workers: int = 0, compiled: bool = False) -> Recipe:
    return Recipe(
        batch_size=_batch_size(work),
        epochs=2,
        warmup_epochs=0,
        precision="bfloat16",
        compile=compiled,
        workers=workers,
    )


def _batches(work: Work) -> list[Batch]:
    """Noise, on the device."""
    generator, size = torch.Generator().manual_seed(0), _batch_size(work)
    made = []
    for _ in range(3):
        images = torch.rand(size, 3, 224, 224, generator=generator).to(work.device)
        labels = torch.randint(1000, (size,), generator=generator).to(work.device)
        made.append(Batch(images.contiguous(memory_format=torch.channels_last), labels, tuple(range(size))))
    return made


def _batch_size(work: Work) -> int:
    return BATCH if work.on_gpu else SMALL_BATCH


def _steps(work: Work) -> int:
    return STEPS if work.on_gpu else 1


def _memory(work: Work) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 1) if work.on_gpu else None


# By what a run that is cut should have.
PARTS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "rates": measure_rates,
    "closed_forms": measure_closed_forms,
    "training_uncompiled": partial(measure_training, arm="uncompiled"),
    "tests": measure_tests,
    "training_none": partial(measure_training, arm="none"),
    "matching": measure_matching,
    "training_mjp": partial(measure_training, arm="mjp"),
    "training_bare": partial(measure_training, arm="bare"),
    "training_mjp_masks_per_batch": partial(measure_training, arm="mjp_masks_per_batch"),
    "training_loader": partial(measure_training, arm="loader"),
}


@benchmark
def gpu(
    pictures: Pictures = "bundled",
    n: Annotated[int, typer.Option(min=1, help="Pictures of the closed forms; other sizes follow.")] = 1000,
    minutes: Annotated[float, typer.Option(help="No part is begun, or goes on, after so many.")] = 8.0,
    part: Annotated[list[str] | None, typer.Option(help="One of them alone; repeat it for several.")] = None,
    commit: Annotated[str, typer.Option(help="Of this tree, where it is no checkout.")] = "",
) -> Iterator[Measurement]:
    """Measure, part by part."""
    for name in part or ():
        if name not in PARTS:
            raise UnknownNameError("part", name, PARTS)
    work = Work(
        device="cuda" if torch.cuda.is_available() else "cpu",
        pictures=pictures,
        n=n,
        deadline=time.monotonic() + 60 * minutes,
    )
    about: dict[str, Any] = {"device": work.device, "n": n}
    if commit:
        about["revision"] = {"commit": commit, "modified": False}
    figures: dict[str, Any] = {}
    for name in part or PARTS:
        began = time.monotonic()
        try:
            figures[name] = PARTS[name](work) if work.left() > 0 else {"left_out": "the time was up"}
        except Exception as error:  # noqa: BLE001 (whatever it is, the other parts are measured)
            frames = traceback.extract_tb(error.__traceback__)[-6:]
            where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
            figures[name] = {"error": f"{type(error).__name__}: {error}", "where": where}
        figures[name]["took_seconds"] = round(time.monotonic() - began, 1)
        yield Measurement({"parts": figures}, about)
        work.free()
