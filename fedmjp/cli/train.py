"""`fedmjp train`."""

from pathlib import Path
from typing import Annotated

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import (
    TRAINING,
    ArithmeticIfAny,
    ConfigFile,
    DefencesIfAny,
    DeviceIfAny,
    Fresh,
    Pictures,
    SeedIfAny,
    Settings,
)
from fedmjp.cli.options import output as output_option
from fedmjp.cli.overrides import read_values
from fedmjp.cli.runs import given, require_apart, tell_held_out, values_of, with_files, with_warm_up, write_manifest

# Of x~: of the paper's Table 5, and of the official consistency script; Tables 1, 3 and 4 do not say theirs.
ROW_RATIOS = (0.27, 0.5)


def train(
    settings: Settings = None,
    data: Pictures = None,
    config_file: ConfigFile = None,
    row: Annotated[
        str | None,
        typer.Option(
            help="A row of the paper, such as table4-J; evaluated beside its figures at the end.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    defences: DefencesIfAny = None,
    seed: SeedIfAny = None,
    device: DeviceIfAny = None,
    arithmetic: ArithmeticIfAny = None,
    output: Annotated[Path, output_option("Folder for weights, history and state.")] = Path("results/train"),
    fresh: Fresh = False,
) -> None:
    """Train with all pictures in one place, by the paper's recipe; goes on where it was stopped.

    Several GPUs train together where torchrun starts a process for each.
    """
    from fedmjp.claims import claim_folder, watched_folder
    from fedmjp.cli.evaluate import evaluate
    from fedmjp.cli.progress import TrainingProgress
    from fedmjp.extras import require
    from fedmjp.training.central import open_pictures
    from fedmjp.training.central import train as run
    from fedmjp.training.config import TrainingConfig
    from fedmjp.training.process_group import torchrun_group
    from fedmjp.training.run_folder import TrainingFolder
    from fedmjp.training.state import load_state

    require("training", "fedmjp train")
    options = {"data": data, "seed": seed, "model": given({"seed": seed}), "device": device, "defences": defences}
    options |= {"recipe": given({"precision": arithmetic})}
    defaults = {"model": {"name": "deit_small"}}
    values = values_of(defaults, read_values(config_file), row, given(options), settings)
    recipe = values.get("recipe")
    epochs = recipe.get("epochs") if isinstance(recipe, dict) else None
    config = TrainingConfig.parse(with_files(with_warm_up(values, epochs)))
    require_apart(output, config.data)
    pictures = open_pictures(config.data, config.model.classes)  # before anything is deleted
    folder, console = TrainingFolder(output), wide_console()
    with torchrun_group(config.device) as group:
        if group.first:
            claim_folder(output)
            folder.check_own()
            if fresh:
                folder.clear()
            load_state(folder.state, config=config.digest())  # before another run's manifest is replaced
            tell_held_out(pictures, "are trained on", console)
            write_manifest(folder.manifest, "central", processes=group.of, config=config.published())
        group.wait()
        gone = watched_folder(output, "what it held is lost: run the same command again")
        with gone, TrainingProgress(console, quiet=not group.first) as progress:
            run(config, pictures, folder, progress.events(), group)
    if not group.first:
        return
    tell(console, f"Written to {output}: weights.safetensors, history.csv, history.png, manifest.json.")
    if row is not None:
        ratios = list(ROW_RATIOS)
        evaluate([output], config.data, mask_ratios=ratios, device=config.device, output=folder.evaluation)
