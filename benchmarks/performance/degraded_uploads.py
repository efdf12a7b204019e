"""What is left of the patch-embedding leak when uploads are not clean float32.

``python -m benchmarks.performance.degraded_uploads --pictures FOLDER --n 20 --json FILE``

Each gradient is degraded before it is attacked, with a scale of its own for the patch embedding's
gradient, the position embedding's rows of patches, and its row of the class token. Nothing of it is
told to the attacks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from attacks import ATTACKS
from attacks.natural_patches import measured_on
from benchmarks.folder.output import write_json
from benchmarks.leaderboard.statistics import intervals, statistics
from fedmjp import provenance
from fedmjp.config import ModelConfig
from fedmjp.data.batches import private_batch
from fedmjp.data.selection import open_source, select
from fedmjp.errors import AttackNotApplicableError
from fedmjp.metrics import metric
from fedmjp.models import names
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.running import run_function
from fedmjp.seeds import torch_generator
from fedmjp.settings import Picture
from fedmjp.stacked import entrance_gradients
from fedmjp.threat import ThreatModel

MODEL = ModelConfig(name="deit_small")
ATTACKS_COMPARED = ("patch_embedding", "patch_embedding_wiener", "grey")
SEED = 0
Degrade = Callable[[Tensor, torch.Generator], Tensor]


def _noise(level: float) -> Degrade:
    def add(tensor: Tensor, generator: torch.Generator) -> Tensor:
        scale = level * tensor.square().mean().sqrt()
        noisy: Tensor = tensor + scale * torch.randn(tensor.shape, generator=generator)
        return noisy

    return add


def _steps(bits: int) -> Degrade:
    def quantise(tensor: Tensor, _generator: torch.Generator) -> Tensor:
        step = tensor.abs().max() / (2 ** (bits - 1) - 1)
        rounded: Tensor = (tensor / step).round() * step
        return rounded

    return quantise


def _largest(share: float) -> Degrade:
    def prune(tensor: Tensor, _generator: torch.Generator) -> Tensor:
        kept = max(1, int(share * tensor.numel()))
        least: Tensor = tensor.abs().flatten().topk(kept).values[-1]
        return tensor * (tensor.abs() >= least)

    return prune


DEGRADATIONS: dict[str, Degrade] = {
    "float32": lambda tensor, _: tensor,
    **{f"noise {level:g} of the root mean square": _noise(level) for level in (1e-4, 1e-3, 1e-2, 1e-1)},
    "float16": lambda tensor, _: tensor.half(),
    "bfloat16": lambda tensor, _: tensor.bfloat16(),
    "8-bit steps": _steps(8),
    "largest 10 %": _largest(0.1),
    "largest 1 %": _largest(0.01),
    "sign": lambda tensor, _: tensor.sign() * tensor.abs().mean(),
}


def main(
    pictures: Annotated[Path, typer.Option(help="FOLDER/CLASS/picture.")],
    json: Annotated[Path, typer.Option(help="Where the figures go.")],
    n: Annotated[int, typer.Option(help="Number of pictures.")] = 20,
) -> None:
    """Degrade, attack, score."""
    model = build_vit(MODEL)
    batches = _private(pictures, n)
    read = (names.POSITION_EMBEDDING, names.PATCH_WEIGHT)
    clean = [each for batch in batches for each in entrance_gradients(model, [batch], read)]
    private = torch.cat([batch.clean for batch in batches])
    results = {
        name: {attack: _psnr(attack, _degraded(clean, name), model, private) for attack in ATTACKS_COMPARED}
        for name in DEGRADATIONS
    }
    command = f"python -m benchmarks.performance.degraded_uploads --pictures FOLDER --n {n} --json {json}"
    about = {"command": command, "model": MODEL.model_dump(), "pictures": n, "seed": SEED, "metric": "psnr, dB"}
    write_json(json, {**about, "results": results, **provenance.environment()})
    for name, found in results.items():
        shown = (f"{attack} {value if isinstance(value, str) else value['mean']}" for attack, value in found.items())
        typer.echo(f"{name}: {', '.join(shown)}")


def _private(folder: Path, n: int) -> list[PrivateBatch]:
    source = open_source(str(folder), size=MODEL.image_size, classes=MODEL.classes)
    selection = select(source, n, seed=SEED, leave_out=measured_on)
    return [
        private_batch([selection.load(entry)], grid=MODEL.grid, mask_ratio=0, gradient_of=Picture.CLEAN, seed=SEED)
        for entry in selection.entries
    ]


def _degraded(clean: list[dict[str, Tensor]], name: str) -> list[Upload]:
    degrade, uploads = DEGRADATIONS[name], []
    for node, tensors in enumerate(clean):
        generator = torch_generator(SEED, "degradation", name, node)
        rows = tensors[names.POSITION_EMBEDDING]
        changed = {
            names.POSITION_EMBEDDING: torch.cat([degrade(rows[:, :1], generator), degrade(rows[:, 1:], generator)], 1),
            names.PATCH_WEIGHT: degrade(tensors[names.PATCH_WEIGHT], generator),
        }
        uploads.append(Upload(changed, "gradient", 1, 1, node, ""))
    return uploads


def _psnr(attack: str, uploads: list[Upload], model: VitClassifier, private: Tensor) -> dict[str, float | None] | str:
    generator = torch.Generator().manual_seed(SEED)
    try:
        made = ATTACKS.get(attack)().reconstruct(uploads, model, ThreatModel(), generator=generator)
    except AttackNotApplicableError as error:
        return str(error)
    values = metric("psnr").function(torch.cat([each.images for each in made]), private)
    found = np.asarray(values, dtype=float)
    figures = statistics(found, intervals([found])[0], worst=float(found.max()), higher_leaks=True)
    return {name: None if value is None else round(value, 2) for name, value in figures.model_dump().items()}


if __name__ == "__main__":
    run_function(main)
