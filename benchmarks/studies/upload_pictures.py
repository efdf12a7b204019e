"""A figure for talks: bundled pictures as attacks that know MJP see them after one, two, three and four uploads.

``python -m benchmarks.studies.upload_pictures --output FILE``: DeiT-S with MJP at mask ratio 0.27, one picture of each
bundled photograph. The columns: the picture, what the network saw of it in the first upload, what an attack
that does not know MJP makes of that, and ``mjp_intersection`` after 1, 2, 3 and 4 uploads. PSNR against the
clean picture (setting c) stands below.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from attacks import ATTACKS
from fedmjp.config import ModelConfig
from fedmjp.data.batches import private_batch
from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload
from fedmjp.running import run_function
from fedmjp.settings import Picture
from fedmjp.threat import ThreatModel
from fedmjp.updates import gradient

PICTURES = ("astronaut", "cat", "coffee", "rocket")  # one of each photograph
COUNTS = (1, 2, 3, 4)
RATIO = 0.27
INCHES = 1.45
DOTS_PER_INCH = 110
CEILING = 60.0  # dB: exact to the eye


@dataclass(frozen=True)
class Shown:
    """One image of the figure: (3, height, width), and what stands above and below it."""

    image: Tensor
    heading: str
    caption: str


def main(
    output: Annotated[Path, typer.Option(help="PNG file.")] = Path("results/mjp_adaptive/uploads.png"),
    seed: Annotated[int, typer.Option(help="Of weights and masks.")] = 0,
) -> None:
    """Draw the figure."""
    model = build_vit(ModelConfig.parse({"name": "deit_small", "unknown_embedding": True, "seed": seed}))
    source = open_source("bundled", size=model.image_size, classes=1000)
    rows = [_row(source.load(name), model, seed) for name in PICTURES]
    output.parent.mkdir(parents=True, exist_ok=True)
    _figure(rows).savefig(output, dpi=DOTS_PER_INCH, metadata={"Software": None})
    for name, row in zip(PICTURES, rows, strict=True):
        typer.echo(f"{name}: " + ", ".join(f"{each.heading} {each.caption}".replace("\n", " ") for each in row[2:]))


def _row(picture: LabelledPicture, model: VitClassifier, seed: int) -> list[Shown]:
    batches = [
        private_batch(
            [picture], grid=model.grid, mask_ratio=RATIO, gradient_of=Picture.SHUFFLED, seed=seed, number=number
        )
        for number in range(max(COUNTS))
    ]
    uploads = [_upload(batch, model) for batch in batches]
    naive = _attacked("patch_embedding", uploads[:1], model, seed)
    return [
        Shown(picture.image, "the picture", ""),
        Shown(batches[0].shuffled[0], "what the network\nsaw first", ""),
        _shown(naive, picture, "1 upload,\nMJP not known"),
        *(
            _shown(
                _attacked("mjp_intersection", uploads[:count], model, seed),
                picture,
                f"{count} upload{'s' if count > 1 else ''},\nMJP known",
            )
            for count in COUNTS
        ),
    ]


def _upload(batch: PrivateBatch, model: VitClassifier) -> Upload:
    return Upload(gradient(model, batch), "gradient", 1, 1, 0, "initial")


def _attacked(name: str, uploads: Sequence[Upload], model: VitClassifier, seed: int) -> Tensor:
    """(3, height, width): the attack on the first upload, with the others beside it."""
    first = replace(uploads[0], others=tuple(uploads[1:]))
    threat = ThreatModel(uploads_per_picture=len(uploads))
    generator = torch.Generator().manual_seed(seed)
    return ATTACKS.get(name)().reconstruct([first], model, threat, generator=generator)[0].images[0]


def _shown(image: Tensor, picture: LabelledPicture, heading: str) -> Shown:
    psnr = float(metric("psnr").function(image[None], picture.image[None]))
    return Shown(image, heading, f"{CEILING:g}+ dB" if psnr > CEILING else f"{psnr:.1f} dB")


def _figure(rows: Sequence[Sequence[Shown]]) -> Figure:
    columns = len(rows[0])
    figure = Figure(figsize=(INCHES * columns, INCHES * 1.13 * len(rows) + 0.45))
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for place, (row, row_axes) in enumerate(zip(rows, axes, strict=True)):
        for shown, cell in zip(row, row_axes, strict=True):
            _draw(cell, shown, with_heading=place == 0)
    top = 1 - 0.45 / figure.get_figheight()
    figure.subplots_adjust(left=0.005, right=0.995, top=top, bottom=0.03, wspace=0.04, hspace=0.13)
    return figure


def _draw(axes: Axes, shown: Shown, *, with_heading: bool) -> None:
    axes.set_axis_off()
    axes.imshow(shown.image.permute(1, 2, 0).clamp(0, 1).numpy())
    if with_heading:
        axes.set_title(shown.heading, fontsize=9)
    axes.text(0.5, -0.02, shown.caption, ha="center", va="top", transform=axes.transAxes, fontsize=8.5)


if __name__ == "__main__":
    run_function(main)
