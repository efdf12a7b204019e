"""`fedmjp segment`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.keys import SEGMENTED
from fedmjp.cli.options import MODEL, PICTURES, Device, Fresh, Seed, Settings, examples
from fedmjp.cli.options import output as output_option
from fedmjp.cli.runs import choose, given, require_apart, write_manifest

if TYPE_CHECKING:
    from fedmjp.segmentation.evaluation import SegmentationFigures

segment = typer.Typer(no_args_is_help=True, help="Train and evaluate UperNet on ADE20K (MJP's Table 9).")
# mIoU and mAcc of MJP's Table 9, in percent.
PAPER = {"Swin-T": (43.87, 55.22), "Swin-T + MJP": (44.03, 55.50)}
Data = Annotated[
    Path,
    typer.Option(
        help="ADE20K's folder, ADEChallengeData2016: images/ and annotations/, each with training/ and validation/.",
        metavar="DIR",
        rich_help_panel=PICTURES,
    ),
]


@segment.callback()
def _commands() -> None:
    """Train and evaluate UperNet on ADE20K (MJP's Table 9)."""


@segment.command(
    epilog=examples(
        "fedmjp segment train --data DIR --weights results/train/weights.safetensors",
        "fedmjp segment train --data DIR --weights FILE recipe.iterations=40000 recipe.workers=8",
        keys=SEGMENTED,
    )
)
def train(
    data: Data,
    settings: Settings = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Of a Swin-T that was trained to classify, with MJP or without: ours, timm's or the official ones.",
            metavar="FILE",
            rich_help_panel=MODEL,
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    output: Annotated[Path, output_option("Folder for weights, history and state.")] = Path("results/segment"),
    fresh: Fresh = False,
) -> None:
    """Train UperNet on a Swin transformer; goes on where it was stopped."""
    from fedmjp.benchmarks.folder.output import claim_folder
    from fedmjp.cli.overrides import with_checkpoint
    from fedmjp.cli.progress import LiveBars
    from fedmjp.extras import require
    from fedmjp.overrides import apply_settings

    require("segmentation", "`fedmjp segment`")
    from fedmjp.segmentation.config import SegmentationConfig
    from fedmjp.segmentation.scenes import open_scenes
    from fedmjp.segmentation.training import KIND, SegmentationFolder
    from fedmjp.segmentation.training import train as run
    from fedmjp.training.run_folder import published

    named = {
        "data": str(data),
        "seed": seed,
        "device": choose(device),
        "model": given({"weights": weights and str(weights)}),
    }
    values = apply_settings(named, settings or [])
    config = SegmentationConfig.parse({**values, "model": with_checkpoint(values["model"])})
    scenes = open_scenes(Path(config.data), "training")
    require_apart(output, config.data)
    claim_folder(output)
    folder = SegmentationFolder(output)
    folder.begin(config, fresh=fresh)
    console = wide_console()
    if config.model.weights is None:
        tell(
            console,
            "The backbone's weights are drawn: figures like the paper's need ones trained on ImageNet (--weights).",
        )
    write_manifest(folder.manifest, KIND, config=published(config), pictures=len(scenes))
    with LiveBars(console, transient=True) as bars:
        task = bars.add_task("Iterations", total=config.recipe.iterations)
        run(
            config,
            scenes,
            folder,
            on_step=lambda done: bars.update(task, completed=done),
            on_checkpoint=lambda row: tell(console, f"Iteration {row['iteration']}: loss {row['loss']:.3f}"),
        )
    tell(console, f"Written to {output}: weights.safetensors, history.csv, manifest.json.")


@segment.command(epilog=examples("fedmjp segment evaluate results/segment --data DIR"))
def evaluate(
    folder: Annotated[Path, typer.Argument(help="Folder of such a training.", metavar="RUN")],
    data: Data,
    limit: Annotated[
        int | None, typer.Option(help="Only so many pictures, the first.", min=1, rich_help_panel=PICTURES)
    ] = None,
    device: Device = "auto",
    output: Annotated[Path, output_option("Folder for the figures.")] = Path("results/segmentation"),
) -> None:
    """Measure mIoU and mAcc on the validation split, beside the paper's."""
    from fedmjp.benchmarks.folder.output import claim_folder
    from fedmjp.cli.progress import LiveBars
    from fedmjp.extras import require

    require("segmentation", "`fedmjp segment`")
    from fedmjp.segmentation.evaluation import evaluate as measured
    from fedmjp.segmentation.scenes import open_scenes
    from fedmjp.segmentation.training import SegmentationFolder, trained_network

    run = SegmentationFolder(folder)
    size = run.config().recipe.crop
    scenes = open_scenes(data, "validation")
    require_apart(output, str(data))
    network = trained_network(run).to(choose(device))
    claim_folder(output)
    console = wide_console()
    pictures = min(limit or len(scenes), len(scenes))
    with LiveBars(console, transient=True) as bars:
        task = bars.add_task("Pictures", total=pictures)
        figures = measured(network, scenes, range(pictures), size, lambda: bars.advance(task))
    _write(output, figures, scenes.class_names())
    about = {"data": data.name, "pictures": pictures, "of": len(scenes), "run": folder.name}
    write_manifest(output / "manifest.json", "segmentation evaluation", **about)
    lines = {folder.name: (100 * figures.mean_overlap, 100 * figures.mean_accuracy), **PAPER}
    for name, (overlap, accuracy) in lines.items():
        where = " (the paper's)" if name in PAPER else f" ({pictures} of {len(scenes)} pictures)"
        tell(console, f"{name}{where}: mIoU {overlap:.2f}, mAcc {accuracy:.2f}")
    tell(console, f"Written to {output}: segmentation.json, classes.csv, manifest.json.")


def _write(output: Path, figures: "SegmentationFigures", names: list[str]) -> None:
    import pandas as pd

    from fedmjp.benchmarks.folder.output import write_json, write_text

    means = {"mIoU": figures.mean_overlap, "mAcc": figures.mean_accuracy, "pixel_accuracy": figures.accuracy}
    write_json(output / "segmentation.json", means)
    columns = {"class": names, "pixels": figures.pixels, "IoU": figures.overlaps, "accuracy": figures.accuracies}
    write_text(output / "classes.csv", pd.DataFrame(columns).to_csv(index=False))
