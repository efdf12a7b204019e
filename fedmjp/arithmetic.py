"""How exactly networks are computed, and whether twice the same: never left to what a machine prefers.

A GPU may round the factors of float32 products to TF32, ten bits of mantissa, and cuDNN does so in every convolution
unless it is told not to. The patch embedding is a convolution.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fedmjp.errors import ConfigError

if TYPE_CHECKING:
    import torch

Arithmetic = Literal["float32", "tf32", "bfloat16"]
# Half a unit in the last place of a factor.
ROUNDING: dict[Arithmetic, float] = {"float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-9}
# With this much memory of its own for each stream, cuBLAS sums in the same order every time.
WORKSPACE, WORKSPACE_SIZE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
Device: TypeAlias = "torch.device | str"


def require_arithmetic(arithmetic: Arithmetic, device: Device) -> None:
    """Refuse an arithmetic that a device cannot compute in.

    Args:
        arithmetic: Of products.
        device: Where they are computed.

    Raises:
        ConfigError: If the device has no such arithmetic.
    """
    import torch

    if arithmetic == "tf32" and torch.device(device).type != "cuda":
        raise ConfigError(f"arithmetic tf32 is of CUDA, device {device} has none: take float32 or bfloat16")


@contextmanager
def computing(arithmetic: Arithmetic, device: Device, *, repeats: bool = False) -> Iterator[None]:
    """Compute convolutions and matrix products of float32 tensors in an arithmetic, on CUDA by repeatable algorithms.

    Former settings of torch hold again afterwards. With bfloat16 products stay float32, and ``rounded`` marks the parts
    with fewer digits.

    Args:
        arithmetic: Of products.
        device: Where they are computed.
        repeats: Whether everything must repeat to the last bit: torch raises RuntimeError where no algorithm does.
            Without, it takes another one there; fused attention then repeats in its forward pass alone.

    Raises:
        ConfigError: If the device cannot compute so.
    """
    import torch

    require_arithmetic(arithmetic, device)
    if torch.device(device).type != "cuda":
        yield
        return
    os.environ.setdefault(WORKSPACE, WORKSPACE_SIZE)
    with ExitStack() as restored:
        precision = "tf32" if arithmetic == "tf32" else "ieee"
        matmul, cudnn = _parts()
        for part in (matmul, cudnn.conv):
            restored.enter_context(_changed(part, fp32_precision=precision))
        restored.enter_context(_changed(cudnn, benchmark=False, deterministic=True))
        restored.enter_context(_changed(torch.utils.deterministic, fill_uninitialized_memory=False))
        former = torch.are_deterministic_algorithms_enabled()
        warned = torch.is_deterministic_algorithms_warn_only_enabled()
        restored.callback(torch.use_deterministic_algorithms, former, warn_only=warned)
        torch.use_deterministic_algorithms(mode=True, warn_only=not repeats)
        yield


def rounded(arithmetic: Arithmetic, device: Device) -> AbstractContextManager[None]:
    """Run a forward pass and its loss in an arithmetic, bfloat16 under torch's autocast; take gradients outside of it.

    Args:
        arithmetic: Of products.
        device: Where they are computed.
    """
    import torch

    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=arithmetic == "bfloat16")


def cuda_settings() -> dict[str, Any]:
    """Read back torch's settings for networks on CUDA in float32, for manifests."""
    import torch

    matmul, cudnn = _parts()
    with computing("float32", "cuda"):
        return {
            "matrix_products": matmul.fp32_precision,
            "convolutions": cudnn.conv.fp32_precision,
            "cudnn_benchmark": cudnn.benchmark,
            "cudnn_deterministic": cudnn.deterministic,
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "cublas_workspace": os.environ[WORKSPACE],
        }


def _parts() -> tuple[Any, Any]:
    """Return torch's settings of matrix products, and of cuDNN."""
    import torch

    return torch.backends.cuda.matmul, torch.backends.cudnn


@contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    former = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in former.items():
            setattr(owner, name, value)
