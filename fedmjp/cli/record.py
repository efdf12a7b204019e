"""`fedmjp record`."""

from pathlib import Path
from typing import Annotated

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.overrides import DEFENCE_HELP
from fedmjp.cli.progress import TerminalProgress
from fedmjp.cli.runs import single_batches


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
    from fedmjp.data.selection import select_for
    from fedmjp.errors import OutputError
    from fedmjp.models.build import blueprint
    from fedmjp.scenario import Scenario

    console = wide_console()
    scenario = Scenario.parse(single_batches(context.params))
    blueprint(scenario.network)
    selection = select_for(scenario)
    tell(console, *(f"Skipped: {reason}" for reason in selection.skipped))
    if selection.skipped:
        console.print(f"{len(selection.skipped)} damaged pictures were skipped.")
    claim_folder(output)
    folder = RunFolder(output)
    if fresh:
        folder.clear()
    elif folder.uploads.exists():
        raise OutputError(f"{output} already holds the records of a run; name another --output or give --fresh")
    with TerminalProgress(console) as progress:
        progress.federation(scenario.rounds)
        simulate([scenario], folder, on_round=progress.round)
    pictures = {entry.name: entry.sha256 for entry in selection.entries}
    about = {"scenarios": [scenario.model_dump(mode="json")], "pictures": pictures}
    write_json(output / "manifest.json", about | dict(provenance.environment()))
    count, uploads = sum(map(len, folder.index(scenario).values())), folder.uploads / scenario.folder
    tell(console, f"{scenario.label}: {count} uploads in {uploads}")
    tell(console, f"The private pictures behind them, for the evaluator only, are in {folder.evaluator}")
