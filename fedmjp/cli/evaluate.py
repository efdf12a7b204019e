"""`fedmjp evaluate`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import PICTURES, RUN, Device, Seed, TrainedRuns, WeightsAlone, WeightsOf, share
from fedmjp.cli.options import output as output_option
from fedmjp.cli.runs import choose, open_trained, require_apart, write_manifest

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.evaluation.consistency import Sample
    from fedmjp.evaluation.figures import Figures
    from fedmjp.evaluation.runs import Trained


def evaluate(
    data: Annotated[
        str,
        typer.Option(
            help="bundled, a folder of pictures or parquet files, or hub:OWNER/NAME.",
            metavar="DIR",
            rich_help_panel=PICTURES,
        ),
    ],
    folders: TrainedRuns = None,
    weights: WeightsAlone = None,
    model: WeightsOf = [],
    limit: Annotated[
        int | None, typer.Option(help="Only so many pictures, at random.", min=1, rich_help_panel=PICTURES)
    ] = None,
    mask_ratios: Annotated[
        list[float],
        typer.Option(
            "--mask-ratio",
            callback=share,
            help="Of shuffled pictures; may be repeated.",
            min=0,
            max=1,
            rich_help_panel=PICTURES,
        ),
    ] = [0.27],
    without_mask: Annotated[
        bool,
        typer.Option(
            "--without-mask",
            help="Do not tell defended models which patches were shuffled.",
            rich_help_panel=PICTURES,
        ),
    ] = False,
    seed: Seed = 0,
    device: Device = "auto",
    workers: Annotated[int, typer.Option(help="Processes that read pictures.", min=0, rich_help_panel=RUN)] = 0,
    output: Annotated[Path, output_option("Folder for tables and figure.")] = Path("results/evaluation"),
) -> None:
    """Measure what trained models know, and how far shuffled patches move them (MJP's Tables 1, 3 and 4, Fig. 3)."""
    from benchmarks.folder.output import claim_folder
    from fedmjp.cli.progress import LiveBars
    from fedmjp.errors import OutputError
    from fedmjp.evaluation.consistency import Puzzles, measure, sample
    from fedmjp.evaluation.figures import figures
    from fedmjp.evaluation.runs import refuse_twins
    from fedmjp.training.run_folder import TrainingFolder

    require_apart(output, data)
    puzzles = Puzzles(tuple(mask_ratios), seed, tell_mask=not without_mask)
    chosen = choose(device)
    runs = open_trained(folders or [], weights, model)
    refuse_twins(runs)
    samples = [sample(data, classes=run.model.classes, limit=limit, seed=seed) for run in runs]
    for folder, pictures in zip(folders or [], samples, strict=bool(folders)):
        TrainingFolder(folder).check_classes(pictures.dataset.class_names)
    if TrainingFolder(output).holds_run():
        raise OutputError(f"{output} is the folder of a training run; name another --output")
    claim_folder(output)
    console = wide_console()
    with LiveBars(console, transient=True) as bars:
        task = bars.add_task("Pictures", total=sum(len(pictures.indices) for pictures in samples))
        how: dict[str, Any] = {"device": chosen, "workers": workers}
        how |= {"on_pictures": partial(bars.advance, task), "on_skipped": bars.skip}
        pairs = zip(runs, samples, strict=True)
        measured = [list(figures(measure(run, pictures, puzzles, **how))) for run, pictures in pairs]
    _tell_doubts(runs, measured, console)
    _report(runs, measured, samples[0], output, console)
    write_manifest(
        output / "manifest.json",
        "evaluation",
        data={"name": _named(samples[0]), "pictures": len(samples[0].indices), "of": len(samples[0].dataset)},
        mask_ratios=puzzles.ratios,
        mask_told=puzzles.tell_mask,
        seed=seed,
        device=chosen,
        runs=[_about(run) for run in runs],
    )


def _tell_doubts(runs: "Sequence[Trained]", measured: "Sequence[Sequence[Figures]]", console: "Console") -> None:

    for run, every in zip(runs, measured, strict=True):
        doubts = [f"its training has not ended: {run.unfinished}"] if run.unfinished else []
        if undecided := every[0].undecided:
            doubts.append(
                f"{undecided} of {every[0].pictures} pictures have logits that are not finite; they count as wrong and "
                "as not consistent, and are left out of Diff. Norm."
            )
        tell(console, *(f"{run.name}: {doubt}" for doubt in doubts), style="bold red")


def _report(
    runs: "Sequence[Trained]",
    measured: "Sequence[Sequence[Figures]]",
    pictures: "Sample",
    output: Path,
    console: "Console",
) -> None:
    from benchmarks.folder.output import write_text
    from fedmjp.drawings import save_plot
    from fedmjp.evaluation.figures import summarise
    from fedmjp.evaluation.sweep import sweep
    from fedmjp.evaluation.tables import frame, markdown, notes, print_sheets, sheets
    from fedmjp.texts import guard, printable

    data = _named(pictures)
    lines = summarise(runs, measured)
    tables, remarks = sheets(lines, data), notes(lines)
    write_text(output / "evaluation.csv", printable(frame(runs, measured).map(guard).to_csv(index=False)))
    write_text(output / "table.md", markdown(tables, remarks))
    figure = output / "sweep.png"
    figure.unlink(missing_ok=True)
    written = ["evaluation.csv", "table.md", "manifest.json"]
    if len(measured[0]) > 1:
        save_plot(sweep(lines, data), figure, dots_per_inch=150)
        written.append(figure.name)
    print_sheets(tables, console)
    console.print("\n".join(remarks), highlight=False, markup=False)
    tell(console, f"\nWritten to {output}: {', '.join(written)}.")


def _about(run: "Trained") -> dict[str, Any]:
    from fedmjp.training.run_folder import published

    return {
        "name": run.name,
        "seed": run.seed,
        "weights_sha256": run.model.weights.sha256 if run.model.weights else None,
        "config": published(run.config or run.model),
        "unfinished": run.unfinished or None,
    }


def _named(pictures: "Sample") -> str:
    """The data set without this machine's folders."""
    return Path(pictures.dataset.name).name
