"""`fedmjp record`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmjp.cli.overrides import DEFENCE_HELP

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.federation.simulation import RunFolder


def record(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="See `fedmjp list models`.")] = "deit_small",
    defences: Annotated[list[str], typer.Option("--defence", help=DEFENCE_HELP)] = ["mjp"],
    data: Annotated[str, typer.Option(help="'bundled' or a folder of CLASS/picture files.")] = "bundled",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 2,
    pictures_per_client: Annotated[int, typer.Option(help="One round each, or per batch.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Pictures behind one upload.")] = 1,
    uploads_per_picture: Annotated[int, typer.Option(help="Under masks drawn independently.")] = 1,
    local_steps: Annotated[int | None, typer.Option(help="Upload the weight delta after so many SGD steps.")] = None,
    local_learning_rate: Annotated[float, typer.Option(help="Of these steps.")] = 0.01,
    image_size: Annotated[int, typer.Option(help="Pixels per side.")] = 224,
    patch_size: Annotated[int, typer.Option(help="Pixels per side of a patch.")] = 16,
    classes: Annotated[int, typer.Option(help="Classes of the model.")] = 1000,
    server_learning_rate: Annotated[float, typer.Option(help="0 keeps the weights.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of weights, choice of pictures and jigsaws.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[Path, typer.Option(help="Folder for the records.")] = Path("results/record"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove former records first.")] = False,
) -> None:
    """Run a federation on this machine and record every upload of single batches as it crosses the wire."""
    from benchmarks.federation.simulation import RunFolder, simulate
    from benchmarks.folder.output import claim_folder, write_json
    from fedmjp import provenance
    from fedmjp.cli.device import choose
    from fedmjp.cli.progress import TerminalProgress, wide_console
    from fedmjp.cli.train import located
    from fedmjp.config import ModelConfig
    from fedmjp.data.selection import select_for
    from fedmjp.models.build import blueprint
    from fedmjp.scenario import Scenario

    console = wide_console()
    values = {key: value for key, value in context.params.items() if key in Scenario.model_fields}
    network = {key: value for key, value in context.params.items() if key in ModelConfig.model_fields}
    values |= {
        "model": {"name": model, **network},
        "update": "gradient" if local_steps is None else "delta",
        "local_steps": 1 if local_steps is None else local_steps,
        "device": choose(device),
        "data": located(data),
    }
    scenario = Scenario.parse(values)
    blueprint(scenario.network)
    selection = select_for(scenario)
    _tell_skipped(selection.skipped, console)
    claim_folder(output)
    folder = RunFolder(output)
    _make_room(folder, fresh=fresh)
    with TerminalProgress(console) as progress:
        progress.federation(scenario.rounds)
        simulate([scenario], folder, on_round=progress.round)
    about = {
        "scenarios": [scenario.model_dump(mode="json")],
        "versions": provenance.versions(),
        "revision": provenance.revision(),
        "hardware": provenance.hardware(),
        "pictures": {entry.name: entry.sha256 for entry in selection.entries},
    }
    write_json(output / "manifest.json", about)
    count, uploads = sum(map(len, folder.index(scenario).values())), folder.uploads / scenario.folder
    console.print(f"{scenario.label}: {count} uploads in {uploads}", markup=False)
    console.print(f"The private pictures behind them, for the evaluator only, are in {folder.evaluator}", markup=False)


def _tell_skipped(reasons: Sequence[str], console: "Console") -> None:
    for reason in reasons:
        console.print(f"Skipped: {reason}", highlight=False, markup=False, soft_wrap=True)
    if reasons:
        console.print(f"{len(reasons)} damaged pictures were skipped.")


def _make_room(folder: "RunFolder", *, fresh: bool) -> None:
    from fedmjp.errors import OutputError

    if fresh:
        folder.clear()
    elif folder.uploads.exists():
        raise OutputError(f"{folder.root} already holds the records of a run; name another --output or give --fresh")
