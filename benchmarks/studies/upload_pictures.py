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

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fedmjp.data.pictures import LabelledPicture
from fedmjp.data.selection import open_source
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
    scenario = Scenario.parse(
        {"model": "deit_small", "defences": DEFENCE, "uploads_per_picture": max(COUNTS), "seed": seed}
    )
    source, model = open_source("bundled", size=224, classes=1000), build_vit(scenario.network)
    rows = [_row(source.load(name), scenario, model) for name in PICTURES]
    output.parent.mkdir(parents=True, exist_ok=True)
    _figure(rows).savefig(output, dpi=DOTS_PER_INCH, metadata={"Software": None})
    for name, row in zip(PICTURES, rows, strict=True):
        typer.echo(f"{name}: " + ", ".join(f"{each.heading} {each.caption}".replace("\n", " ") for each in row[2:]))


def _row(picture: LabelledPicture, scenario: Scenario, model: VitClassifier) -> list[Shown]:
    made = scenario.exchange([picture], model=model)

    def attacked(name: str, count: int, heading: str) -> Shown:
        """The attack on the first upload, with the others beside it."""
        upload = replace(made.upload, others=made.upload.others[: count - 1])
        image = attack(name, upload, scenario, model=model, seed=scenario.seed).images[0]
        return _shown(image, picture, f"{count} upload{'s' if count > 1 else ''},\n{heading}")

    return [
        Shown(picture.image, "the picture", ""),
        Shown(made.private.shuffled[0], "what the network\nsaw first", ""),
        attacked("patch_embedding", 1, "MJP not known"),
        *(attacked("mjp_intersection", count, "MJP known") for count in COUNTS),
    ]


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
