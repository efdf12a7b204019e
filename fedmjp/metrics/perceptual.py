"""LPIPS, from the lpips package. Its AlexNet backbone is fetched by hand, never replaced."""

import hashlib
import warnings
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from fedmjp.errors import WeightsMissingError
from fedmjp.metrics.pictures import as_pair

# torchvision's AlexNet on ImageNet; the eight digits in the name are the start of the file's SHA-256.
BACKBONE_FILE = "alexnet-owt-7be5be79.pth"
FETCH = "python -c \"import torchvision; torchvision.models.alexnet(weights='IMAGENET1K_V1')\""


def backbone_path() -> Path:
    """Where torchvision looks for the AlexNet weights (the environment variable TORCH_HOME moves it)."""
    return Path(torch.hub.get_dir()) / "checkpoints" / BACKBONE_FILE


@lru_cache
def _matches_name(path: Path, modified_ns: int) -> bool:  # noqa: ARG001 (a changed file is checked again)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8] == path.stem.rsplit("-", 1)[1]


def missing_backbone() -> str | None:
    """Why LPIPS cannot be computed here; None if it can. `fedmjp doctor` gives folder and remedy."""
    path = backbone_path()
    if not path.is_file():
        return f"its AlexNet weights {BACKBONE_FILE} are not on this machine"
    if not _matches_name(path, path.stat().st_mtime_ns):
        return f"its {BACKBONE_FILE} is damaged or another file: the SHA-256 does not start with the digits in the name"
    return None


@lru_cache
def _network(device: torch.device) -> nn.Module:
    import lpips  # noqa: PLC0415 (slow import, needed only here)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lpips calls torchvision by a deprecated argument
        network: nn.Module = lpips.LPIPS(net="alex", version="0.1", verbose=False).to(device)
    return network


def perceptual_distance(network: nn.Module, reconstruction: Tensor, target: Tensor) -> Tensor:
    """Apply an LPIPS network, which wants images in [-1, 1], to images in [0, 1]; (batch,) float64."""
    reconstruction, target = as_pair(reconstruction, target)
    with torch.no_grad():
        distance: Tensor = network(reconstruction.float() * 2 - 1, target.float() * 2 - 1)
    return distance.flatten().double()


def lpips_alex(reconstruction: Tensor, target: Tensor) -> Tensor:
    """Learned perceptual distance with the AlexNet backbone, version 0.1.

    Returns:
        (batch,) float64 from 0 (identical).

    Raises:
        WeightsMissingError: If the AlexNet weights are not on this machine. Random weights would
            give a number, but not LPIPS.

    References:
        Zhang et al., "The unreasonable effectiveness of deep features", CVPR 2018; package lpips.
    """
    reason = missing_backbone()
    if reason:
        raise WeightsMissingError(f"lpips_alex cannot be computed: {reason}")
    return perceptual_distance(_network(reconstruction.device), reconstruction, target)
