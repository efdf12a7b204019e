"""A figure for talks: bundled pictures as attacks that know MJP see them after one, two, three and four uploads.

``python results/mjp_adaptive/upload_pictures.py --output FILE``: DeiT-S with MJP at mask ratio 0.27, one picture
of each
bundled photograph. The columns: the picture, what the network saw of it in the first upload, what an attack
that does not know MJP makes of that, and ``mjp_intersection`` after 1, 2, 3 and 4 uploads. PSNR against the
clean picture (setting c) stands below.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.figure import Figure
from torch import Tensor

from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source
from fedmjp.drawings import save_photographs
from fedmjp.facade import attack
from fedmjp.metrics import metric
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.running import run_function
from fedmjp.scenario import Scenario

PICTURES = ("astronaut", "cat", "coffee", "rocket")  # one of each photograph
COUNTS = (1, 2, 3, 4)
DEFENCE = "mjp:mask_ratio=0.27"
INCHES = 1.45
DOTS_PER_INCH = 110
CEILING = 60.0  # dB: exact to the eye


Shown = tuple[Tensor, str, str]  # an image (3, height, width), and what stands above and below it


def main(
    output: Annotated[Path, typer.Option(help="JPEG file.")] = Path("results/mjp_adaptive/uploads.jpg"),
    seed: Annotated[int, typer.Option(help="Of weights and masks.")] = 0,
) -> None:
    """Draw the figure."""
    scenario = Scenario.parse(
        {"model": "deit_small", "defences": DEFENCE, "uploads_per_picture": max(COUNTS), "seed": seed}
    )
    source, model = open_source("bundled", size=224, classes=1000), build_vit(scenario.network)
    rows = [_row(source.load(name), scenario, model) for name in PICTURES]
    output.parent.mkdir(parents=True, exist_ok=True)
    save_photographs(_figure(rows), output, dots_per_inch=DOTS_PER_INCH)
    for name, row in zip(PICTURES, rows, strict=True):
        typer.echo(f"{name}: " + ", ".join(f"{above} {below}".replace("\n", " ") for _, above, below in row[2:]))


def _row(picture: LabelledPicture, scenario: Scenario, model: VitClassifier) -> list[Shown]:
    made = scenario.exchange([picture], model=model)

    def attacked(name: str, count: int, heading: str) -> Shown:
        """Return the attack on the first upload, with the others beside it."""
        upload = replace(made.upload, others=made.upload.others[: count - 1])
        reconstruction: Any = attack(name, upload, scenario, model=model, seed=scenario.seed)
        images = reconstruction.images
        psnr = float(metric("psnr").function(images, picture.image[None]))
        caption = f"{CEILING:g}+ dB" if psnr > CEILING else f"{psnr:.1f} dB"
        return images[0], f"{count} upload{'s' if count > 1 else ''},\n{heading}", caption

    return [
        (picture.image, "the picture", ""),
        (made.private.shuffled[0], "what the network\nsaw first", ""),
        attacked("patch_embedding", 1, "MJP not known"),
        *(attacked("mjp_intersection", count, "MJP known") for count in COUNTS),
    ]


def _figure(rows: Sequence[Sequence[Shown]]) -> Figure:
    columns = len(rows[0])
    figure = Figure(figsize=(INCHES * columns, INCHES * 1.13 * len(rows) + 0.45))
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for place, cell in np.ndenumerate(axes):
        image, heading, caption = rows[place[0]][place[1]]
        cell.set_axis_off()
        cell.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
        if place[0] == 0:
            cell.set_title(heading, fontsize=9)
        cell.text(0.5, -0.02, caption, ha="center", va="top", transform=cell.transAxes, fontsize=8.5)
    top = 1 - 0.45 / figure.get_figheight()
    figure.subplots_adjust(left=0.005, right=0.995, top=top, bottom=0.03, wspace=0.04, hspace=0.13)
    return figure


if __name__ == "__main__":
    run_function(main)
