"""Measures what patches of natural pictures look like, for ``fedmjp.attacks.natural_patches``.

``python results/natural_patches/study.py --pictures FOLDER``

Three of five pictures of the folder are used, in the order of their names; the other two are left
for being attacked.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor

from fedmjp import provenance
from fedmjp.attacks.held_out import DIGITS, MEASURED
from fedmjp.attacks.natural_patches import TABLE
from fedmjp.data.selection import open_source
from fedmjp.running import run_function

IMAGE_SIZES = (32, 64, 128, 224)
LARGEST_LAG = 15  # patches of up to 16 x 16 pixels
USED, OF = 3, 5
CLASSES = 100_000  # labels are not looked at


def main(pictures: Annotated[Path, typer.Option(help="FOLDER/CLASS/picture.")]) -> None:
    """Measure and write the table and its provenance."""
    table: dict[str, Tensor] = {}
    names: list[str] = []
    digests: dict[int, list[str]] = {}
    for size in IMAGE_SIZES:
        source = open_source(str(pictures), size=size, classes=CLASSES)
        names = [name for rank, name in enumerate(source.names()) if rank % OF < USED]
        loaded = [source.load(name) for name in names]
        digests[size] = sorted(picture.digest()[:DIGITS] for picture in loaded)
        images = torch.stack([picture.image for picture in loaded]).double()
        table[f"{size}.mean"] = images.mean(dim=(0, 2, 3)).float()
        table[f"{size}.autocovariance"] = autocovariance(images, LARGEST_LAG).float()
    save_file(table, TABLE)
    versions = provenance.versions()
    about = {
        "command": "python results/natural_patches/study.py --pictures FOLDER",
        "source": "ImageNet pictures, one of each of 500 classes",
        "rule": f"in the order of names, the first {USED} of every {OF}",
        "preparation": "shorter side resized to size / 0.875 (bicubic), centre crop, RGB in [0, 1]",
        "image_sizes": IMAGE_SIZES,
        "versions": {name: versions[name] for name in ("torch", "torchvision", "pillow")},
        "pictures": sorted(Path(name).name for name in names),
        "sha256": digests,
    }
    MEASURED.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    typer.echo(f"{len(names)} pictures, {TABLE.stat().st_size / 1000:.0f} kB")


def autocovariance(images: Tensor, largest_lag: int) -> Tensor:
    """Covariance of two pixels by their distance, averaged over places, pictures and mirror images.

    Args:
        images: (pictures, 3, size, size) float64.
        largest_lag: L, in pixels.

    Returns:
        (3, 3, 2 L + 1, 2 L + 1), see ``fedmjp.attacks.natural_patches.patch_covariance``.
    """
    size = images.shape[-1]
    centred = images - images.mean(dim=(0, 2, 3), keepdim=True)
    total = torch.zeros(3, 3, 2 * size, 2 * size, dtype=images.dtype)
    for chunk in torch.split(centred, 20):
        spectra = torch.fft.fft2(chunk, s=(2 * size, 2 * size))  # twice the size: no wrapping round
        total += torch.fft.ifft2(torch.einsum("nchw,ndhw->cdhw", spectra.conj(), spectra)).real
    lags = torch.arange(-largest_lag, largest_lag + 1)
    pairs = (size - lags.abs()).to(images.dtype)
    measured = total[:, :, lags][..., lags] / (pairs[:, None] * pairs * len(images))
    mirrored = (measured + measured.flip(-1)) / 2
    return (mirrored + mirrored.transpose(0, 1).flip(-1, -2)) / 2


if __name__ == "__main__":
    run_function(main)
