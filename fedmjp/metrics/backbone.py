"""The weights of LPIPS's backbone: where they belong, and whether they are there; told without torch."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

# torchvision's AlexNet on ImageNet; the eight digits in the name are the start of the file's SHA-256.
BACKBONE_FILE = "alexnet-owt-7be5be79.pth"
FETCH = "python -c \"import torchvision; torchvision.models.alexnet(weights='IMAGENET1K_V1')\""


def backbone_path() -> Path:
    """Return where torchvision looks for the AlexNet weights (the environment variable TORCH_HOME moves it)."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("TORCH_HOME", f"{caches}/torch")).expanduser()  # as of ``torch.hub.get_dir``
    return home / "hub" / "checkpoints" / BACKBONE_FILE


@lru_cache
def _matches_name(path: Path, modified_ns: int) -> bool:  # noqa: ARG001 (a changed file is checked again)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8] == path.stem.rsplit("-", 1)[1]


def missing_backbone() -> str | None:
    """Say why LPIPS cannot be computed here; None if it can. `fedmjp doctor` gives folder and remedy."""
    path = backbone_path()
    if not path.is_file():
        return f"its AlexNet weights {BACKBONE_FILE} are not on this machine"
    if not _matches_name(path, path.stat().st_mtime_ns):
        return f"its {BACKBONE_FILE} is damaged or another file: the SHA-256 does not start with the digits in the name"
    return None
