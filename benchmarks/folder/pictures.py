"""Pictures on disk: originals and reconstructions as PNG, for figures and for people."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
from PIL import Image
from torch import Tensor

from benchmarks.plan.experiment import Cell, PlannedTrial
from fedmjp.defences.pipeline import NONE
from fedmjp.errors import OutputError
from fedmjp.settings import Picture

PARTIAL = ".partial"


def save_png(image: Tensor, path: Path) -> None:
    """Write a (3, height, width) image in [0, 1] as 8-bit PNG, whole or not at all.

    Raises:
        OutputError: If it cannot be written.
    """
    partial = path.with_name(f".{uuid4().hex}{PARTIAL}")  # several processes write the same original
    pixels = (image * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            Image.fromarray(pixels).save(partial, format="PNG")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}; finished trials are kept, make room and run again"
        ) from None


def load_png(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read a PNG as (height, width, 3) uint8."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def picture_folder(cell: Cell) -> str:
    """Name of the folder of a cell's reconstructions; settings b and c share uploads, so they share it.

    Options of attacks and defences hold anything, hence the digest.
    """
    configured = [cell.attack, *(config.text for config in cell.defences)]
    digest = hashlib.sha256(json.dumps(configured).encode()).hexdigest()[:8]
    names = "+".join(config.name for config in cell.defences) or NONE
    return f"{cell.model}-{names}-{cell.attack.split()[0]}-{digest}-{cell.setting.gradient_of}"


@dataclass(frozen=True)
class PictureFolder:
    """Where each picture of a trial lies."""

    root: Path

    def private(self, trial: PlannedTrial, version: Picture) -> Path:
        """The private picture, clean or shuffled."""
        return self.root / f"{trial.stem}-{version}.png"

    def reconstruction(self, trial: PlannedTrial) -> Path:
        """What the attack made of it; settings b and c share one upload, so they share this."""
        return self.root / picture_folder(trial.cell) / f"{trial.stem}.png"

    def of(self, trial: PlannedTrial) -> tuple[Path, ...]:
        """All files of a trial."""
        return (*(self.private(trial, version) for version in Picture), self.reconstruction(trial))
