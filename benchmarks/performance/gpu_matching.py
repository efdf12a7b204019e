"""Gradient matching of DeiT-S at 224 pixels: milliseconds per iteration and picture, many pictures at once."""

from functools import partial
from typing import Any

import torch

from fedmjp.attacks.gradient_matching import GradientMatching
from fedmjp.benchmarks.performance.gpu_work import Work
from fedmjp.config import ModelConfig
from fedmjp.data.pictures import LabelledPicture
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.scenario import Scenario

MODEL, SMALL = ModelConfig(name="deit_small"), ModelConfig(name="deit_tiny", image_size=64, patch_size=8)
AT_ONCE = (1, 8, 32)
FEW, MANY = 5, 25  # iterations: their difference leaves out what is done once
ALL = {"tensors": "all"}


def measure(work: Work) -> dict[str, Any]:
    """By arithmetic of the search and pictures at once, with the tensors of the default and with all."""
    arithmetics = ("float32", "tf32") if work.on_gpu else ("float32",)
    figures: dict[str, Any] = {"model": (MODEL if work.on_gpu else SMALL).name}
    for arithmetic in arithmetics:
        for count in AT_ONCE if work.on_gpu else (1,):
            figures[f"{arithmetic} {count} at once"] = _matched(work, count, {"arithmetic": arithmetic})
    if work.on_gpu:
        figures["float32 8 at once, all tensors"] = _matched(work, 8, ALL)
    return figures


def _matched(work: Work, count: int, options: dict[str, Any]) -> dict[str, float]:
    scenario = Scenario.parse({"model": MODEL if work.on_gpu else SMALL, "labels_known": True, "device": work.device})
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
