"""`fedmjp record`."""

from pathlib import Path
from typing import Annotated

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import (
    UPLOADS,
    Arithmetic,
    BatchSize,
    Classes,
    CropScale,
    Data,
    Defences,
    Device,
    Fresh,
    ImageSize,
    LabelSmoothing,
    LocalBatchSize,
    LocalLearningRate,
    LocalMomentum,
    LocalOptimiser,
    LocalSteps,
    LocalWeightDecay,
    MixUp,
    Model,
    PatchSize,
    Seed,
    ServerIfAny,
    UploadsPerPicture,
)
from fedmjp.cli.options import output as output_option
from fedmjp.cli.runs import require_apart, single_batches


def record(
    context: typer.Context,
    clients: Annotated[int, typer.Option(help="Number of clients.", min=1, rich_help_panel=UPLOADS)] = 2,
    pictures_per_client: Annotated[
        int, typer.Option(help="One round each, or per batch.", min=1, rich_help_panel=UPLOADS)
    ] = 1,
    batch_size: BatchSize = 1,
    uploads_per_picture: UploadsPerPicture = 1,
    local_steps: LocalSteps = None,
    local_learning_rate: LocalLearningRate = 0.01,
    local_momentum: LocalMomentum = 0.0,
    local_batch_size: LocalBatchSize = None,
    local_optimiser: LocalOptimiser = "sgd",
    local_weight_decay: LocalWeightDecay = 0.0,
    server: ServerIfAny = None,
    label_smoothing: LabelSmoothing = 0.0,
    mixup: MixUp = 0.0,
    crop_scale: CropScale = None,
    server_learning_rate: Annotated[
        float, typer.Option(help="0 keeps the weights.", min=0, rich_help_panel=UPLOADS)
    ] = 0.0,
    data: Data = "bundled",
    model: Model = "deit_small",
    defences: Defences = ["mjp"],
    image_size: ImageSize = 224,
    patch_size: PatchSize = 16,
    classes: Classes = 1000,
    seed: Seed = 0,
    device: Device = "auto",
    arithmetic: Arithmetic = "float32",
    output: Annotated[Path, output_option("Folder for the records.")] = Path("results/record"),
    fresh: Fresh = False,
) -> None:
    """Run a federation on this machine and record every upload of single batches as it crosses the wire."""
    from fedmjp import provenance
    from fedmjp.benchmarks.federation.simulation import RunFolder, simulate
    from fedmjp.benchmarks.folder.output import write_json
    from fedmjp.claims import claim_folder, watched_folder
    from fedmjp.cli.progress import TerminalProgress
    from fedmjp.data.selection import select_for
    from fedmjp.errors import OutputError
    from fedmjp.models.build import blueprint
    from fedmjp.scenario import Scenario
    from fedmjp.threat import SCOPE

    console = wide_console()
    require_apart(output, data)
    scenario = Scenario.parse(single_batches(context.params))
    network = blueprint(scenario.network)
    if scenario.server is not None:
        scenario.require_server(network)
        tell(console, SCOPE)
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
    gone = watched_folder(output, "what was recorded is lost: run the same command again")
    with gone, TerminalProgress(console) as progress:
        progress.federation(scenario.rounds)
        simulate([scenario], folder, on_round=progress.round)
    pictures = {entry.name: entry.sha256 for entry in selection.entries}
    about = {"scenarios": [scenario.model_dump(mode="json")], "pictures": pictures}
    write_json(output / "manifest.json", about | dict(provenance.environment()))
    count, uploads = sum(map(len, folder.index(scenario).values())), folder.uploads / scenario.folder
    tell(console, f"{scenario.label}: {count} uploads in {uploads}")
    tell(console, f"The private pictures behind them, for the evaluator only, are in {folder.evaluator}")
