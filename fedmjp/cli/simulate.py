"""`fedmjp simulate`."""

from pathlib import Path
from typing import Annotated

import typer


def simulate(  # noqa: PLR0913 (one parameter per option)
    model: Annotated[list[str], typer.Option(help="Model; may be repeated. See `fedmjp list models`.")] = ["deit_small"],  # noqa: B006
    defence: Annotated[list[str], typer.Option(help="none or mjp; may be repeated.")] = ["mjp"],  # noqa: B006
    mask_ratio: Annotated[float, typer.Option(help="Wanted share of shuffled patches, 0 to 1.")] = 0.27,
    data: Annotated[str, typer.Option(help="'bundled' or a folder of CLASS/picture files.")] = "bundled",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 2,
    pictures: Annotated[int, typer.Option(help="Pictures per client; one round each.")] = 1,
    gradient_of: Annotated[list[str], typer.Option(help="clean or shuffled; may be repeated.")] = ["shuffled"],  # noqa: B006
    image_size: Annotated[int, typer.Option(help="Pixels per side.")] = 224,
    patch_size: Annotated[int, typer.Option(help="Pixels per side of a patch.")] = 16,
    classes: Annotated[int, typer.Option(help="Classes of the model.")] = 1000,
    server_learning_rate: Annotated[float, typer.Option(help="0 keeps the weights.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of weights, selection and jigsaws.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[Path, typer.Option(help="Folder for the records.")] = Path("results/simulate"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove former records first.")] = False,
) -> None:
    """Run a federation on this machine and record every upload as it crosses the wire."""
    from rich.console import Console  # noqa: PLC0415

    from benchmarks.federation.simulation import RunFolder  # noqa: PLC0415
    from benchmarks.federation.simulation import simulate as run  # noqa: PLC0415
    from benchmarks.output import prepare_folder, write_json  # noqa: PLC0415
    from fedmjp import provenance  # noqa: PLC0415
    from fedmjp.cli.device import choose  # noqa: PLC0415
    from fedmjp.cli.progress import TerminalProgress  # noqa: PLC0415
    from fedmjp.config import FederationConfig  # noqa: PLC0415
    from fedmjp.data.selection import select_for  # noqa: PLC0415
    from fedmjp.errors import OutputError  # noqa: PLC0415
    from fedmjp.models.build import architecture  # noqa: PLC0415

    console = Console()
    for name in model:
        architecture(name)
    config = FederationConfig.parse(
        {
            "models": model,
            "defences": defence,
            "mask_ratio": mask_ratio,
            "data": data if data == "bundled" else str(Path(data).resolve()),
            "clients": clients,
            "pictures_per_client": pictures,
            "inputs": gradient_of,
            "image_size": image_size,
            "patch_size": patch_size,
            "classes": classes,
            "server_learning_rate": server_learning_rate,
            "seed": seed,
            "device": choose(device),
        }
    )
    selection = select_for(config)
    for reason in selection.skipped:
        console.print(f"[yellow]Skipped:[/] {reason}", highlight=False, soft_wrap=True)
    if selection.skipped:
        console.print(f"{len(selection.skipped)} damaged pictures were skipped.")
    folder = RunFolder(output)
    prepare_folder(output)
    if fresh:
        folder.clear()
    elif folder.uploads.exists():
        raise OutputError(f"{output} already holds records of a run; name another --output or give --fresh")
    with TerminalProgress(console) as progress:
        progress.federation(config.rounds * len(config.arms))
        run(config, folder, on_round=progress.round)
    write_json(
        output / "manifest.json",
        {
            "config": config.model_dump(mode="json"),
            "versions": provenance.versions(),
            "revision": provenance.revision(),
            "hardware": provenance.hardware(),
            "pictures": {picture.name: picture.digest() for picture in selection.pictures},
        },
    )
    for arm in config.arms:
        console.print(f"{arm.label}: {len(folder.pairs(arm))} uploads in {folder.uploads / arm.label}")
    console.print(f"The private pictures behind them, for the evaluator only: {folder.evaluator}")
