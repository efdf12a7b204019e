"""How fast the device multiplies matrices and moves bytes, and solves the small systems of closed forms."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fedmjp.arithmetic import Arithmetic, computing, require_arithmetic
from fedmjp.benchmarks.performance.gpu_work import Work
from fedmjp.errors import ConfigError

REPEATS = 10
SIDE, SMALL_SIDE = 8192, 512  # of matrices, on a GPU and elsewhere
MOVED = 2**30  # float32 values
TOKENS, DIM = 196, 384  # of the system of one upload, DeiT-S at 224 pixels


def measure(work: Work) -> dict[str, Any]:
    """TFLOP/s of a large product of random matrices by arithmetic, GB/s of a copy, ms of a stack of small systems."""
    rates = {f"{name}_tflop_per_second": matrix_rate(work, name) for name in ("float32", "tf32", "bfloat16")}
    values = torch.rand(MOVED if work.on_gpu else SMALL_SIDE**2, device=work.device)
    copied = 2 * values.numel() * values.element_size() / _median(work, values.clone)
    return {**rates, "copy_gb_per_second": round(copied / 1e9, 1), "ms_per_system": _systems(work)}


def matrix_rate(work: Work, arithmetic: Arithmetic) -> float | None:
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


def _median(work: Work, task: Callable[[], object], repeats: int = REPEATS) -> float:
    work.timed(task)
    return statistics.median(work.timed(task)[1] for _ in range(repeats))
