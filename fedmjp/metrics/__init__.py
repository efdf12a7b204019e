"""Scores of what an attack discloses against a private picture: pure functions, one value per picture.

Every metric of pictures takes ``reconstruction`` and ``target``, both (batch, 3, height, width) in [0, 1] and
in the same order (RecordError if their shapes differ), computes in float64, and returns (batch,)
float64. None returns NaN or infinity for images in [0, 1]. Those of labels and features are in
``fedmjp.metrics.disclosed``, with arguments of their own. Means, intervals and worst cases are
the leaderboard's business.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedmjp.errors import UnknownNameError

if TYPE_CHECKING:
    from torch import Tensor

WHOLE = "0 or 1"
# torchvision's AlexNet on ImageNet; the eight digits in the name are the start of the file's SHA-256.
BACKBONE_FILE = "alexnet-owt-7be5be79.pth"
FETCH = "python -c \"import torchvision; torchvision.models.alexnet(weights='IMAGENET1K_V1')\""
RECOGNISABLE = 20.0  # dB: the error's root mean square is a tenth of the range
EXACT = 40.0  # dB of PSNR from which a picture counts as recovered exactly: the error's root mean square is 0.01
COLOUR = "colour"  # among the scores: PSNR of the clean picture's mean colour, whatever was attacked


@dataclass(frozen=True)
class Metric:
    """A named variant of a metric, loaded when it is computed: what there is can be read without."""

    home: str  # "module:function" of this package
    higher_leaks: bool  # whether a higher value means that more of the private picture is revealed
    bounds: str
    lowest: float  # the same as numbers
    highest: float
    definition: str  # the exact variant and its source
    missing: Callable[[], str | None] = lambda: None  # says why it cannot be computed on this machine; None if it can
    of: Literal["pictures", "features", "labels"] = "pictures"  # what has to be revealed for it

    @property
    def function(self) -> "Callable[..., Tensor]":
        """Load the function: pictures are scored by (reconstruction, target), others by arguments of their own."""
        module, _, name = self.home.partition(":")
        function: Callable[..., Tensor] = getattr(import_module(f"{__name__}.{module}"), name)
        return function

    @property
    def whole(self) -> bool:
        """Tell whether it is 0 or 1 of a trial, and nothing between."""
        return self.bounds == WHOLE


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


METRICS = {
    "mse": Metric("pictures:mse", False, "0 (exact) to 1", 0, 1, "mean squared error over pixels and channels"),
    "psnr": Metric("pictures:psnr", True, "0 to 200 dB", 0, 200, "-10 log10(MSE), peak 1, per image; capped at 200 dB"),
    "ssim": Metric(
        "pictures:ssim", True, "-1 to 1 (exact)", -1, 1,
        "scikit-image: Gaussian 11x11, sigma 1.5, population covariance, range 1",
    ),
    "ssim_mjp": Metric(
        "pictures:ssim_mjp", True, "-1 to 1 (exact)", -1, 1, "MJP's eval/basic.py: the same window, zero padding"
    ),
    "fft2d": Metric(
        "pictures:fft2d",
        False,
        "from 0",
        0,
        inf,
        "MJP's eval/cal_fft2d.py: |1 - sum(uv) / sqrt(sum(u^2) sum(v^2))| over complex FFT2",
    ),
    "lpips_alex": Metric(
        "perceptual:lpips_alex",
        False,
        "from 0 (exact)",
        0,
        inf,
        "lpips 0.1 with its AlexNet head on ImageNet weights",
        missing_backbone,
    ),
    "label_accuracy": Metric(
        "disclosed:label_accuracy", True, WHOLE, 0, 1,
        "1 where the picture's label is told; each label told counts once", of="labels",
    ),
    "feature_error": Metric(
        "disclosed:feature_error", False, "from 0 (exact)", 0, inf,
        "distance of the feature told from the picture's, over that from the batch's mean (of one picture: the "
        "gallery's), which itself scores 1; features are matched one to one by least squares", of="features",
    ),
    "rank1": Metric(
        "disclosed:rank1", True, WHOLE, 0, 1,
        "1 where, of all pictures attacked, no other is as near to the feature told; by chance 1 of them",
        of="features",
    ),
    "rank5": Metric(
        "disclosed:rank5", True, WHOLE, 0, 1,
        "the same where four others are as near at most; by chance 5 of them", of="features",
    ),
    "rank1_crop": Metric(
        "disclosed:rank1", True, WHOLE, 0, 1,
        "as rank1, among another crop of each picture: three quarters of its side, at a place drawn for the picture",
        of="features",
    ),
    "rank5_crop": Metric(
        "disclosed:rank5", True, WHOLE, 0, 1, "as rank5, among another crop of each picture",
        of="features",
    ),
    "membership": Metric(
        "disclosed:membership", True, WHOLE, 0, 1,
        "1 where the picture is nearer to a feature told than the threshold that 0.001 of the pictures outside of the "
        "upload pass; with fewer than 1,000 of these, nearer than all of them", of="features",
    ),
}  # fmt: skip
DISCLOSED = tuple(name for name, known in METRICS.items() if known.of != "pictures")


def metric(name: str) -> Metric:
    """Look a metric up.

    Args:
        name: One of ``METRICS``.

    Raises:
        UnknownNameError: If there is none, with the nearest names.
    """
    if name not in METRICS:
        raise UnknownNameError("metric", name, METRICS)
    return METRICS[name]
