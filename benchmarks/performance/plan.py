"""A federation on paper: hours, bytes and the bottleneck of the paper's training over 100 clients, from measured parts.

``python -m benchmarks.performance.plan --results results/performance --json FILE``

DeiT-S with MJP on ImageNet-1K: 300 rounds of one local epoch each, on one machine with 8 GPUs and 128 cores. Measured
are the loader's processor time per picture, the operations and bytes of the model, and a round of 100 clients with
next to no training through Flower's engine, on two cores. How fast a GPU trains was not measured here: it is assumed,
once slow, once as fast as ever, and the plan says what follows. Nothing of it was run.
"""

import json as jsons
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.scripts import Json, keep_figures
from fedmjp.config import ModelConfig
from fedmjp.defences.pipeline import read_pipeline
from fedmjp.models.build import build
from fedmjp.running import run_function

PICTURES, VALIDATION = 1_281_167, 50_000
ROUNDS, CLIENTS, GPUS, CORES = 300, 100, 8, 128
# Pictures that a GPU trains per second: timm's figure for DeiT-S on an RTX 3090, and 30 % of an H100's bfloat16 peak.
ASSUMED = {"1,000 (RTX 3090)": 1_000.0, "10,000 (H100, bfloat16)": 10_000.0}
HOUR = 3600.0


def main(
    json: Json,
    results: Annotated[Path, typer.Option(help="Folder of loader.json and server_memory.json.", metavar="FOLDER")],
) -> None:
    """Print the plan."""
    loader = jsons.loads((results / "loader.json").read_text())
    federations = jsons.loads((results / "server_memory.json").read_text())["federations"]
    (engine,) = (each for each in federations if each["model"] == "deit_small" and each["clients"] == CLIENTS)
    model = build(read_pipeline(["mjp"]).change_model(ModelConfig.parse({"name": "deit_small"})))
    upload = sum(value.numel() * value.element_size() for value in model.parameters())
    reading = PICTURES * loader["paper"]["ours_processor_ms_per_picture"] / 1e3 / CORES
    serving = 60 / engine["rounds_per_minute"]
    parts = {
        "pictures_trained": PICTURES * ROUNDS,
        "training_gigaflop_per_picture": round(_operations(model) / 1e9, 1),
        "bytes_per_upload": upload,
        "terabytes_up": round(upload * CLIENTS * ROUNDS / 1e12, 2),
        "terabytes_down": round(upload * CLIENTS * ROUNDS / 1e12, 2),
        "seconds_of_a_round_reading": round(reading, 1),
        "seconds_of_a_round_in_flower_and_server": round(serving, 1),
        "loader_pictures_per_second": round(PICTURES / reading),
    }
    keep_figures(
        json, {**parts, "if_a_gpu_trains_per_second": {k: _hours(v, reading, serving) for k, v in ASSUMED.items()}}, {}
    )


def _operations(model: torch.nn.Module) -> int:
    """Of a training step, per picture; a multiplication and an addition are two."""
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.rand(1, 3, 224, 224)).sum().backward()
    return int(counter.get_total_flops())


def _hours(rate: float, reading: float, serving: float) -> dict[str, Any]:
    training = (PICTURES + VALIDATION / 3) / (rate * GPUS)  # a forward pass is a third of a step
    together = max(training, reading)  # which go on at the same time
    seconds = {"training": training, "reading": reading, "Flower and server": serving}
    return {
        "seconds_of_a_round_training": round(training, 1),
        "hours": round(ROUNDS * (together + serving) / HOUR, 1),
        "gpu_hours": round(GPUS * ROUNDS * (together + serving) / HOUR),
        "bottleneck": max(seconds, key=lambda part: seconds[part]),
    }


if __name__ == "__main__":
    run_function(main)
