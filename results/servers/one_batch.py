"""A figure of what a batch of 32 gives away: to an honest server, and to one that changes weights.

``python results/servers/one_batch.py --output FILE``: DeiT-S with drawn weights, 32 crops of the four bundled
photographs, each with a label of its own. Under each picture stands what ``class_token`` reads of it in one honest
upload: the label, and the rank at which its feature finds the picture among 256 crops. On the right: one of them, and
what ``patch_embedding`` makes of an upload of the same batch after a server sent the head of ``class_fishing``. For
measuring one's own deployment: everything is computed here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import skimage.data
import torch
import typer
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from torch import Tensor

from fedmjp.data.datasets import CROPS, Crop
from fedmjp.data.pictures import LabelledPicture, to_image
from fedmjp.drawings import save_photographs
from fedmjp.facade import attack
from fedmjp.metrics.pictures import psnr
from fedmjp.metrics.scoring import match
from fedmjp.models.build import build_vit, with_weights
from fedmjp.records import Features, Reconstruction
from fedmjp.running import run_function
from fedmjp.scenario import Scenario
from fedmjp.seeds import torch_generator

BATCH, GALLERY, CLASSES = 32, 256, 1000
COLUMNS = 8
SMALLEST, LARGEST = 120, 300  # pixels per side of a crop
SIZE = 224
WANTED = 5  # place in the batch of the picture that the server fishes for
INCHES = 0.98
DOTS_PER_INCH = 110
PASS = 32  # pictures


def main(
    output: Annotated[Path, typer.Option(help="JPEG file.")] = Path("results/servers/batch.jpg"),
    seed: Annotated[int, typer.Option(help="Of crops and weights.")] = 0,
) -> None:
    """Draw the figure, and print what it shows."""
    pictures = _crops(seed)
    batch = pictures[:BATCH]
    honest = Scenario.parse({"model": "deit_small", "batch_size": BATCH, "pictures_per_client": BATCH, "seed": seed})
    model = build_vit(honest.network)
    upload = honest.exchange(batch, model=model).upload
    stated = cast(Features, attack("class_token", upload, honest, model=model))
    with torch.no_grad():
        shown = torch.stack([picture.image for picture in pictures])
        gallery = torch.cat([model.features(part) for part in torch.split(shown, PASS)]).double()
    features = cast(Tensor, stated.features)
    order = match(features, gallery[:BATCH])
    distances = torch.cdist(features[order], gallery, compute_mode="donot_use_mm_for_euclid_dist")
    ranks = 1 + (distances < distances.diagonal()[:, None]).sum(1)
    labels = stated.labels[order].tolist()
    wanted = batch[WANTED]
    server = {"name": "class_fishing", "class": wanted.label}
    fishing = honest.model_validate({**honest.model_dump(), "server": server})
    made = fishing.exchange(batch, model=model)
    changed = with_weights(build_vit(fishing.network), made.changed[0])
    taken = cast(Reconstruction, attack("patch_embedding", made.upload, fishing, model=changed)).images[0]
    decibels = float(psnr(taken[None], wanted.image[None])[0])
    output.parent.mkdir(parents=True, exist_ok=True)
    captions = [f"label {label}, rank {rank}" for label, rank in zip(labels, ranks.tolist(), strict=True)]
    save_photographs(_figure(batch, captions, taken, decibels), output, dots_per_inch=DOTS_PER_INCH)
    right = sum(label == picture.label for label, picture in zip(labels, batch, strict=True))
    typer.echo(
        f"honest server: {right} of {BATCH} labels right, {int((ranks == 1).sum())} of {BATCH} pictures first among "
        f"{GALLERY}; certified: {stated.diagnostics['certified_pictures']:.0f}\n"
        f"class_fishing: {decibels:.1f} dB, picture {WANTED + 1} of {BATCH}"
    )


def _crops(seed: int) -> list[LabelledPicture]:
    """Random squares of the bundled photographs, each with a label of its own where it is in the batch."""
    generator = torch_generator(seed, "one batch")
    sizes = {crop.photograph: getattr(skimage.data, crop.photograph)().shape for crop in CROPS.values()}
    pictures = []
    for place in range(GALLERY):
        name = list(sizes)[place % len(sizes)]
        height, width, _ = sizes[name]
        side = _between(SMALLEST, min(LARGEST, width, height), generator)
        left, top = (_between(0, room - side, generator) for room in (width, height))
        image = to_image(Crop(name, left, top, side, 0).cut(), SIZE)
        pictures.append(LabelledPicture(f"{name}-{place}", image, place * CLASSES // GALLERY))
    return pictures


def _between(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def _figure(batch: Sequence[LabelledPicture], captions: Sequence[str], taken: Tensor, decibels: float) -> Figure:
    rows = BATCH // COLUMNS
    figure = Figure(figsize=(INCHES * (COLUMNS + 4.4), INCHES * 1.16 * rows + 0.35))
    grid = figure.add_gridspec(
        rows, COLUMNS + 4, left=0.005, right=0.995, top=0.91, bottom=0.045, wspace=0.06, hspace=0.2
    )
    for place, (picture, caption) in enumerate(zip(batch, captions, strict=True)):
        _draw(figure, grid[place // COLUMNS, place % COLUMNS], picture.image, caption, 6.5)
    middle = rows // 2
    _draw(figure, grid[:middle, COLUMNS:], batch[WANTED].image, f"the sixth picture, label {batch[WANTED].label}", 8.5)
    _draw(figure, grid[middle:, COLUMNS:], taken, f"out of the upload of all {BATCH}: {decibels:.0f} dB", 8.5)
    left = COLUMNS / (COLUMNS + 4) / 2
    figure.text(left, 0.95, "Honest server, one upload: label and rank among 256 crops", ha="center", fontsize=10)
    figure.text(0.5 + left, 0.95, "Server with a head of its own making", ha="center", fontsize=10)
    return figure


def _draw(figure: Figure, where: SubplotSpec, image: Tensor, caption: str, size: float) -> None:
    cell = figure.add_subplot(where)
    cell.set_axis_off()
    cell.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy())
    cell.text(0.5, -0.03, caption, ha="center", va="top", transform=cell.transAxes, fontsize=size)


if __name__ == "__main__":
    run_function(main)
