"""`fedmjp train`."""

from pathlib import Path
from typing import Annotated

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.overrides import DEFENCE_HELP, read_values
from fedmjp.cli.progress import TrainingProgress
from fedmjp.cli.runs import given, tell_held_out, values_of, with_files, write_manifest

# Of x~: of the paper's Table 5, and of the official consistency script; Tables 1, 3 and 4 do not say theirs.
ROW_RATIOS = (0.27, 0.5)


def train(
    settings: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE, such as recipe.epochs=20 or model.image_size=64.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="bundled (default), a folder of pictures or parquet files, or hub:OWNER/NAME.")
    ] = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="A YAML file of such keys.")] = None,
    row: Annotated[
        str | None, typer.Option(help="A row of the paper, such as table4-J; evaluated beside its figures at the end.")
    ] = None,
    defences: Annotated[list[str] | None, typer.Option("--defence", help=DEFENCE_HELP)] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial weights and of everything else; 0 by default.")] = None,
    device: Annotated[str | None, typer.Option(help="auto (default), cpu or cuda.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for weights, history and state.")] = Path("results/train"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of going on.")] = False,
) -> None:
    """Train with all pictures in one place, by the paper's recipe; goes on where it was stopped."""
    from benchmarks.folder.output import claim_folder
    from fedmjp.cli.evaluate import evaluate
    from fedmjp.extras import require
    from fedmjp.training.central import open_pictures
    from fedmjp.training.central import train as run
    from fedmjp.training.config import TrainingConfig
    from fedmjp.training.run_folder import TrainingFolder, published
    from fedmjp.training.state import load_state

    require("training", "fedmjp train")
    named = {"data": data, "seed": seed, "model": given({"seed": seed}), "device": device, "defences": defences}
    defaults = {"model": {"name": "deit_small"}}
    config = TrainingConfig.parse(
        with_files(values_of(defaults, read_values(config_file), row, given(named), settings))
    )
    pictures = open_pictures(config.data, config.model.classes)  # before anything is deleted
    claim_folder(output)
    folder = TrainingFolder(output)
    folder.check_own()
    if fresh:
        folder.clear()
    load_state(folder.state, config=config.digest())  # another run's folder is told before its manifest is replaced
    console = wide_console()
    tell_held_out(pictures, "are trained on", console)
    with TrainingProgress(console) as progress:
        write_manifest(folder.manifest, "central", config=published(config))
        run(config, pictures, folder, progress.events())
    tell(console, f"Written to {output}: weights.safetensors, history.csv, history.png, manifest.json.")
    if row is not None:
        ratios = list(ROW_RATIOS)
        evaluate(config.data, [output], mask_ratios=ratios, device=config.device, output=folder.evaluation)
