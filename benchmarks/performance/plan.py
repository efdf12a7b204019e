"""A federation on paper: hours, bytes and the bottleneck of the paper's training over 100 clients, from measured parts.

``python benchmarks/performance/run.py plan --results results/performance --json FILE``

DeiT-S with MJP on ImageNet-1K: 300 rounds of one local epoch each, on one machine with 8 GPUs of 16 cores each.
Measured are the pictures that one GPU trains, and those that the processes of its cores read and hand over, the
operations and bytes of the model, and a round of 100 clients with next to no training through Flower's engine, on two
cores. An older GPU's rate is timm's. Nothing of the plan as a whole was run.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.flop_counter import FlopCounterMode

from fedmjp.benchmarks.performance.harness import Measurement, benchmark
from fedmjp.config import ModelConfig
from fedmjp.defences.pipeline import read_pipeline
from fedmjp.models.build import build

PICTURES, VALIDATION = 1_281_167, 50_000
ROUNDS, CLIENTS, GPUS = 300, 100, 8
REPORTED = {"RTX 3090, by timm": 1_000.0}  # pictures that a GPU trains per second
HOUR = 3600.0


@benchmark
def plan(
    results: Annotated[Path, typer.Option(help="Folder of gpu*.json and server_memory.json.", metavar="FOLDER")],
) -> Measurement:
    """Print the plan."""
    gpu = json.loads((results / "gpu.json").read_text())
    trained = json.loads((results / "gpu_training.json").read_text())
    rates = {**REPORTED, gpu["hardware"]["gpus"][0]: trained["parts"]["training_mjp"]["pictures_per_second"]}
    read = GPUS * gpu["parts"]["training_loader"]["pictures_per_second"]
    federations = json.loads((results / "server_memory.json").read_text())["federations"]
    (engine,) = (each for each in federations if each["model"] == "deit_small" and each["clients"] == CLIENTS)
    model = build(read_pipeline(["mjp"]).change_model(ModelConfig.parse({"name": "deit_small"})))
    upload = sum(value.numel() * value.element_size() for value in model.parameters())
    reading = PICTURES / read
    serving = 60 / engine["rounds_per_minute"]
    parts = {
        "pictures_trained": PICTURES * ROUNDS,
        "training_gigaflop_per_picture": round(_operations(model) / 1e9, 1),
        "bytes_per_upload": upload,
        "terabytes_up": round(upload * CLIENTS * ROUNDS / 1e12, 2),
        "terabytes_down": round(upload * CLIENTS * ROUNDS / 1e12, 2),
        "seconds_of_a_round_reading": round(reading, 1),
        "seconds_of_a_round_in_flower_and_server": round(serving, 1),
        "pictures_read_per_second": round(read),
    }
    return Measurement({**parts, "by_gpu": {name: _hours(rate, reading, serving) for name, rate in rates.items()}})


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
        "pictures_trained_per_second": rate,
        "seconds_of_a_round_training": round(training, 1),
        "hours": round(ROUNDS * (together + serving) / HOUR, 1),
        "gpu_hours": round(GPUS * ROUNDS * (together + serving) / HOUR),
        "bottleneck": max(seconds, key=lambda part: seconds[part]),
    }
