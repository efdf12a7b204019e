"""Pictures on disk: originals and reconstructions as PNG, for figures and for people."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from benchmarks.experiment import PlannedTrial
from fedmjp.settings import Picture


def save_png(image: Tensor, path: Path) -> None:
    """Write a (3, height, width) image in [0, 1] as 8-bit PNG, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    pixels = (image * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    Image.fromarray(pixels).save(partial, format="PNG")
    partial.replace(path)


def load_png(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read a PNG as (height, width, 3) uint8."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


@dataclass(frozen=True)
class PictureFolder:
    """Where each picture of a trial lies."""

    root: Path

    def private(self, trial: PlannedTrial, version: Picture) -> Path:
        """The private picture, clean or shuffled."""
        return self.root / f"{trial.stem}-{version}.png"

    def reconstruction(self, trial: PlannedTrial) -> Path:
        """What the attack made of it; settings b and c share one upload, so they share this."""
        cell = trial.cell
        attack = cell.attack.replace("/", "_")
        return self.root / f"{cell.model}-{cell.defence}-{attack}-{cell.setting.gradient_of}" / f"{trial.stem}.png"
