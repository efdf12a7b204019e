"""Which device a command uses."""

from typing import Literal

from fedmjp.errors import DeviceError


def choose(device: str) -> Literal["cpu", "cuda"]:
    """Resolve "auto" to CUDA where there is any, else the CPU; check an explicit choice.

    Raises:
        DeviceError: If there is no such device on this machine.
    """
    import torch

    available = torch.cuda.is_available()
    if device not in ("auto", "cpu", "cuda"):
        raise DeviceError(f"--device {device!r} is not one of auto, cpu, cuda")
    if device == "cuda" and not available:
        raise DeviceError("--device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    return "cuda" if available and device != "cpu" else "cpu"
