"""`fedmjp study positions`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import PICTURES, Seed, TrainedRuns, WeightsAlone, WeightsOf, examples
from fedmjp.cli.options import output as output_option
from fedmjp.cli.runs import open_trained, require_apart, write_manifest

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from fedmjp.evaluation.figures import Estimate
    from fedmjp.evaluation.position_report import Sheet, StudiedModel
    from fedmjp.evaluation.runs import TrainedModel
    from fedmjp.models.classifier import Classifier

study = typer.Typer(no_args_is_help=True, help="Look into trained models.")


@study.callback()
def _studies() -> None:
    """Look into trained models."""


@study.command(
    epilog=examples(
        "fedmjp study positions results/train-none results/train-mjp",
        "fedmjp study positions --weights FILE --model name=deit_small",
    )
)
def positions(
    folders: TrainedRuns = None,
    weights: WeightsAlone = None,
    model: WeightsOf = [],
    data: Annotated[
        str,
        typer.Option(
            help="Of the pictures whose attention is shown: bundled, or a folder.",
            metavar="DIR",
            rich_help_panel=PICTURES,
        ),
    ] = "bundled",
    pictures: Annotated[int, typer.Option(help="So many of them, at random.", min=1, rich_help_panel=PICTURES)] = 8,
    seed: Seed = 0,
    output: Annotated[Path, output_option("Folder for tables, figures and page.")] = Path("results/positions"),
) -> None:
    """Say what the position embeddings of trained models hold (MJP's Tables 6 and 8, Fig. 1, 4, 7 and 8)."""
    from fedmjp.claims import claim_folder
    from fedmjp.evaluation.position_figures import draw_energy, draw_projections, draw_similarities, project_by_umap
    from fedmjp.evaluation.position_report import measure_positions, write_report
    from fedmjp.extras import require
    from fedmjp.models.build import build

    require("study", "`fedmjp study`")
    require_apart(output, data)
    runs = open_trained(folders or [], weights, model)
    networks = [build(run.model) for run in runs]
    models = [_studied(run, network) for run, network in zip(runs, networks, strict=True)]
    attention, looked = _attention(runs, networks, data, pictures, seed)
    claim_folder(output)
    console = wide_console()
    study_results = measure_positions(models, seed=seed)
    tables = [studied.table for studied in models]
    flat = [project_by_umap(table.rows, seed) for table in tables]
    figures = {
        "energy": draw_energy(study_results.spectra),
        "projections": draw_projections(tables, flat),
        "similarities": draw_similarities(tables),
        "attention": attention,
    }
    written = write_report(output, study_results, figures, [looked])
    write_manifest(
        output / "manifest.json",
        "positions",
        data=Path(data).name,
        pictures=pictures,
        seed=seed,
        runs=[
            {"name": run.name, "seed": run.seed, "weights_sha256": run.model.weights and run.model.weights.sha256}
            for run in runs
        ],
    )
    for sheet in (*study_results.sheets, looked):
        tell(console, f"\n{sheet.title}\n{sheet.rows.to_string(index=False)}")
    tell(console, f"\nWritten to {output}: {', '.join([*written, 'manifest.json'])}.")


def _studied(run: "TrainedModel", network: "Classifier") -> "StudiedModel":
    from fedmjp.evaluation.position_report import StudiedModel
    from fedmjp.evaluation.positions import read_positions

    table = read_positions(network, run.name)
    return StudiedModel(table, run.model.name, "mjp" if network.defended else "none", run.model.localisation)


def _attention(
    runs: "Sequence[TrainedModel]", networks: "Sequence[Classifier]", data: str, count: int, seed: int
) -> "tuple[Figure, Sheet]":
    """Draw Fig. 8 and tabulate the attention of the last block."""
    import pandas as pd

    from fedmjp.evaluation.attention import (
        compute_entropies,
        compute_head_distances,
        load_whole_pictures,
        read_last_attention,
    )
    from fedmjp.evaluation.figures import estimate_mean
    from fedmjp.evaluation.position_figures import draw_attention
    from fedmjp.evaluation.position_report import Sheet

    first_maps: dict[str, Tensor] = {}
    lines = []
    for run, network in zip(runs, networks, strict=True):
        images = load_whole_pictures(data, network.image_size, count=count, seed=seed)
        attention = read_last_attention(network, images, run.name)
        first_maps[run.name] = attention[0]
        entropy, distance = compute_entropies(attention).mean(dim=1), compute_head_distances(attention)
        lines.append(
            {
                "run": run.name,
                "heads": attention.shape[1],
                "pictures": len(images),
                "entropy, bits (95 %)": _in_words(estimate_mean(entropy.numpy())),
                "distance between heads (95 %)": _in_words(estimate_mean(distance.numpy())),
            }
        )
        first = images[0]
    about = (
        "What the class token's query gives the patches in the last block (Fig. 8), each picture resized to the "
        "model's size without a crop. The paper calls MJP's heads more diverse: distance is the mean total variation "
        "between two heads, 0 where they look at the same and 1 where at nothing in common."
    )
    return draw_attention(first, first_maps), Sheet("Attention of the last block", about, pd.DataFrame(lines))


def _in_words(estimate: "Estimate | None") -> str:
    if estimate is None:
        return "-"
    low, high = estimate.band
    return f"{estimate.value:.3f} ({low:.3f} to {high:.3f})"
