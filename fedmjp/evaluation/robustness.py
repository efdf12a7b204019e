"""Predictions of corrupted pictures by trained models, and the mean corruption error (mCE) of ImageNet-C."""

import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedmjp.data.loading import Batch, prepared_batches
from fedmjp.data.pictures import to_image
from fedmjp.errors import DataError
from fedmjp.evaluation.consistency import Booleans, Floats, Sample
from fedmjp.evaluation.corruptions import corrupt, save_as_jpeg
from fedmjp.evaluation.runs import TrainedModel
from fedmjp.evaluation.severities import SEVERITIES
from fedmjp.files import replacing
from fedmjp.models.classifier import Classifier
from fedmjp.models.inference import evaluated, predictions
from fedmjp.seeds import numpy_generator

BATCH_SIZE = 25  # pictures; a network sees five severities of each at once
# Mean error of AlexNet over the five severities on ImageNet-C (Hendrycks and Dietterich, 2019), which normalises.
ALEXNET: Mapping[str, float] = {
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640, "defocus_blur": 0.819880,
    "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360, "snow": 0.866816, "frost": 0.826572,
    "fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056,
    "pixelate": 0.717840, "jpeg_compression": 0.606500,
}  # fmt: skip
# By corruption, (runs, pictures, severities): whether the prediction is right.
Hits = dict[str, Booleans]


@dataclass(frozen=True)
class Corruptor:
    """A function that prepares a photograph and corrupts it at every severity, each saved as JPEG as officially.

    Randomness depends on the seed, the corruption, the severity and the picture's key alone: every model meets the
    same pictures. A photograph is prepared as for Top-1 (bicubic, cropped); the official generators resize bilinearly,
    that of Tiny-ImageNet-C without keeping proportions.
    """

    corruption: str
    seed: int
    size: int
    crop_share: float

    def __call__(self, photograph: Image.Image, key: str) -> Tensor:
        """Corrupt a photograph at every severity, (severities, 3, size, size) float32 in [0, 1]."""
        prepared = to_image(photograph, self.size, crop_share=self.crop_share)
        pixels = prepared.mul(255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
        versions = []
        for severity in SEVERITIES:
            generator = numpy_generator(self.seed, "corruption", self.corruption, severity, key)
            versions.append(save_as_jpeg(corrupt(pixels, self.corruption, severity, generator)))
        return torch.from_numpy(np.stack(versions)).permute(0, 3, 1, 2).float().div(255)


def predict_corrupted(
    corruption: str,
    runs: Sequence[tuple[TrainedModel, Classifier]],
    pictures: Sample,
    *,
    seed: int,
    workers: int,
    on_pictures: Callable[[int], None],
    on_skipped: Callable[[str], None],
) -> Booleans:
    """Predict corrupted pictures and return whether each is right, (runs, pictures, severities).

    Models of one size share the corrupted pictures.

    Args:
        corruption: One of ``fedmjp.evaluation.severities.NAMES``.
        runs: Each with its network, on the device that it is to run on.
        pictures: To corrupt.
        seed: Of the corruptions.
        workers: Processes that read and corrupt.
        on_pictures: Called after each batch with its number of pictures times models.
        on_skipped: Called once with the reason for each picture that cannot be read.

    Raises:
        DataError: If no picture can be read.
    """
    groups: dict[tuple[int, float], list[int]] = {}
    for place, (run, network) in enumerate(runs):
        groups.setdefault((network.image_size, run.crop_share), []).append(place)
    by_run: dict[int, Booleans] = {}
    for (size, crop_share), places in groups.items():
        prepare = Corruptor(corruption, seed, size, crop_share)
        options: dict[str, Any] = {"batch_size": BATCH_SIZE, "workers": workers, "on_skipped": on_skipped}
        batches = prepared_batches(pictures.dataset, pictures.indices, prepare, **options)
        group_hits = _predict_each([runs[place][1] for place in places], batches, on_pictures)
        by_run |= dict(zip(places, group_hits, strict=True))
    return np.stack([by_run[place] for place in range(len(runs))])


def _predict_each(
    networks: Sequence[Classifier], batches: Iterable[Batch], on_pictures: Callable[[int], None]
) -> list[Booleans]:
    parts: list[list[Booleans]] = [[] for _ in networks]
    for batch in batches:
        for network, part in zip(networks, parts, strict=True):
            with evaluated(network):
                predicted = predictions(network(batch.images.flatten(0, 1).to(network.mean.device))).cpu()
            part.append((predicted.view(len(batch.labels), -1) == batch.labels[:, None]).numpy())
        on_pictures(len(batch.labels) * len(networks))
    if not parts[0]:
        raise DataError("there is no picture to evaluate on")
    return [np.concatenate(part) for part in parts]


def read_hits(path: Path, identity: str) -> Hits:
    """Read the predictions of an earlier evaluation of the same models on the same pictures; empty if it was another.

    Args:
        path: Of the file.
        identity: SHA-256 of all that decides predictions.
    """
    try:
        with np.load(path) as arrays:
            if str(arrays["identity"]) != identity:
                return {}
            return {name: arrays[name] for name in arrays.files if name != "identity"}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}


def write_hits(path: Path, identity: str, hits: Hits) -> None:
    """Write which predictions are right, whole or not at all.

    Args:
        path: Of the file.
        identity: SHA-256 of all that decides predictions.
        hits: By corruption, (runs, pictures, severities).
    """
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, identity=np.array(identity), **hits)  # type: ignore[arg-type]  # names are texts


def compute_picture_errors(hits: Hits, place: int, *, normalised: bool) -> Floats:
    """Average a run's errors over corruptions and severities, (pictures,) in per cent; their mean is its mCE.

    Args:
        hits: Of at least one corruption.
        place: Of the run.
        normalised: Whether each corruption is divided by the mean error of AlexNet (the mCE of the literature) or not
            (the official code of MJP).
    """
    shares = [
        (1 - correct[place].mean(axis=1)) / (ALEXNET[corruption] if normalised else 1)
        for corruption, correct in hits.items()
    ]
    mean: Floats = 100 * np.mean(shares, axis=0)
    return mean
