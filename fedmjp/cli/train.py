"""`fedmjp train`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmjp.cli.overrides import DEFENCE_HELP

# Of x~: of the paper's Table 5, and of the official consistency script; Tables 1, 3 and 4 do not say theirs.
ROW_RATIOS = (0.27, 0.5)

if TYPE_CHECKING:
    from fedmjp.training.config import TrainingConfig
    from fedmjp.training.run_folder import TrainingFolder


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
    from fedmjp.cli.device import choose
    from fedmjp.cli.overrides import merged, read_values
    from fedmjp.cli.progress import wide_console
    from fedmjp.cli.training_progress import TrainingProgress
    from fedmjp.overrides import overridden
    from fedmjp.training.central import open_pictures
    from fedmjp.training.central import train as run
    from fedmjp.training.config import TrainingConfig
    from fedmjp.training.run_folder import TrainingFolder
    from fedmjp.training.state import load_state

    own = {"data": data, "seed": seed, "model": None if seed is None else {"seed": seed}, "device": device}
    given = {**own, "defences": defences or None}
    values: dict[str, Any] = {"model": {"name": "deit_small"}}
    for layer in (read_values(config_file), _row(row), {key: each for key, each in given.items() if each is not None}):
        values = merged(values, layer)
    values = _with_files(overridden(values, settings or []))
    config = TrainingConfig.parse(values | {"device": choose(str(values.get("device", "auto")))})
    pictures = open_pictures(config.data, config.model.classes)  # before anything is deleted
    claim_folder(output)
    folder = TrainingFolder(output)
    folder.check_own()
    if fresh:
        folder.clear()
    load_state(folder.state, config=config.digest())  # another run's folder is told before its manifest is replaced
    console = wide_console()
    if not pictures.held_out:
        told = "has no validation split: Top-1 is measured on the pictures that are trained on"
        console.print(f"{pictures.train.name} {told}.", highlight=False, markup=False, soft_wrap=True)
    with TrainingProgress(console) as progress:
        _note(config, folder)
        run(config, pictures, folder, progress.events())
    console.print(f"Written to {output}: weights.safetensors, history.csv, history.png, manifest.json.", markup=False)
    if row is not None:
        _evaluate(config, folder)


def _evaluate(config: "TrainingConfig", folder: "TrainingFolder") -> None:
    from fedmjp.cli.evaluate import evaluate

    ratios = list(ROW_RATIOS)
    evaluate(
        data=config.data, folders=[folder.root], mask_ratios=ratios, device=config.device, output=folder.evaluation
    )


def _with_files(values: dict[str, Any]) -> dict[str, Any]:
    """Files by names that mean the same in every folder, and what is in them."""
    from fedmjp.cli.overrides import with_checkpoint

    data = values.get("data", "bundled")
    return {
        **values,
        "model": with_checkpoint(values["model"]),
        "data": located(data) if isinstance(data, str) else data,
    }


def located(data: str) -> str:
    """A source of pictures that means the same in every working directory."""
    return data if data == "bundled" or data.startswith("hub:") else str(Path(data).absolute())


def _row(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    from fedmjp.training.rows import row

    return row(name).values


def _note(config: "TrainingConfig", folder: "TrainingFolder") -> None:
    """The manifest, before anything can go wrong; pictures and weights are named without their folders."""
    from benchmarks.folder.output import write_json
    from fedmjp import provenance
    from fedmjp.cli.command_line import published_command
    from fedmjp.training.run_folder import published

    about = {"kind": "central", "command": published_command(), "config": published(config)}
    write_json(folder.manifest, about | provenance.environment())
