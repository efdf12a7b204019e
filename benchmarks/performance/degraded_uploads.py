"""What is left of the patch-embedding leak when uploads are not clean float32.

``python benchmarks/performance/run.py degraded_uploads --pictures FOLDER --n 20 --json FILE``

Each gradient is degraded before it is attacked, with a scale of its own for the patch embedding's
gradient, the position embedding's rows of patches, and its row of the class token. Nothing of it is
told to the attacks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from fedmjp.attacks import ATTACKS
from fedmjp.attacks.base import showing_pictures
from fedmjp.benchmarks.leaderboard.statistics import UploadSample, intervals, statistics
from fedmjp.benchmarks.performance.harness import Measurement, benchmark
from fedmjp.benchmarks.scripts import Pictures, load_unseen
from fedmjp.config import ModelConfig
from fedmjp.errors import AttackNotApplicableError
from fedmjp.metrics import metric
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.seeds import torch_generator

MODEL = ModelConfig(name="deit_small")
SCENARIO = Scenario(model=MODEL)
ATTACKS_COMPARED = ("patch_embedding", "patch_embedding_wiener", "grey")
SEED = 0
Degrade = Callable[[Tensor, torch.Generator], Tensor]


def _noisy(level: float, tensor: Tensor, generator: torch.Generator) -> Tensor:
    noisy: Tensor = tensor + level * tensor.square().mean().sqrt() * torch.randn(tensor.shape, generator=generator)
    return noisy


def _in_steps(bits: int, tensor: Tensor, _: torch.Generator) -> Tensor:
    step = tensor.abs().max() / (2 ** (bits - 1) - 1)
    rounded: Tensor = (tensor / step).round() * step
    return rounded


def _largest(share: float, tensor: Tensor, _: torch.Generator) -> Tensor:
    kept = max(1, int(share * tensor.numel()))
    least: Tensor = tensor.abs().flatten().topk(kept).values[-1]
    return tensor * (tensor.abs() >= least)


DEGRADATIONS: dict[str, Degrade] = {
    "float32": lambda tensor, _: tensor,
    **{f"noise {level:g} of the root mean square": partial(_noisy, level) for level in (1e-4, 1e-3, 1e-2, 1e-1)},
    "float16": lambda tensor, _: tensor.half(),
    "bfloat16": lambda tensor, _: tensor.bfloat16(),
    "8-bit steps": partial(_in_steps, 8),
    "largest 10 %": partial(_largest, 0.1),
    "largest 1 %": partial(_largest, 0.01),
    "sign": lambda tensor, _: tensor.sign() * tensor.abs().mean(),
}


@benchmark
def degraded_uploads(
    pictures: Pictures, n: Annotated[int, typer.Option(help="Number of pictures.")] = 20
) -> Measurement:
    """Degrade, attack, score."""
    model = build_vit(MODEL)
    made = [SCENARIO.exchange([picture], model=model) for picture in load_unseen(pictures, n, MODEL, SEED)]
    private = torch.cat([exchange.private.clean for exchange in made])
    uploads = [exchange.upload for exchange in made]
    results = {
        name: {attack: _psnr(attack, _degraded(uploads, name), model, private) for attack in ATTACKS_COMPARED}
        for name in DEGRADATIONS
    }
    return Measurement(
        {"results": results}, {"model": MODEL.model_dump(), "pictures": n, "seed": SEED, "metric": "psnr, dB"}
    )


def _degraded(clean: Sequence[Upload], name: str) -> list[Upload]:
    degrade, uploads = DEGRADATIONS[name], []
    for node, upload in enumerate(clean):
        generator = torch_generator(SEED, "degradation", name, node)
        rows = upload.tensors[names.POSITION_EMBEDDING]
        changed = {
            names.POSITION_EMBEDDING: torch.cat([degrade(rows[:, :1], generator), degrade(rows[:, 1:], generator)], 1),
            names.PATCH_WEIGHT: degrade(upload.tensors[names.PATCH_WEIGHT], generator),
        }
        uploads.append(replace(upload, tensors=changed))
    return uploads


def _psnr(attack: str, uploads: list[Upload], model: VitClassifier, private: Tensor) -> dict[str, float | None] | str:
    generator = torch.Generator().manual_seed(SEED)
    try:
        made = showing_pictures(ATTACKS.get(attack)()).run(uploads, model, SCENARIO.threat, generator=generator)
    except AttackNotApplicableError as error:
        return str(error)
    values = metric("psnr").function(torch.cat([reconstruction.images for reconstruction in made]), private)
    decibels = np.asarray(values, dtype=float)
    figures = statistics(
        decibels, intervals([UploadSample.alone(decibels)])[0], worst=float(decibels.max()), higher_leaks=True
    )
    return {name: None if value is None else round(value, 2) for name, value in figures.model_dump().items()}
