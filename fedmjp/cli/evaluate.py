"""`fedmjp evaluate`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import PICTURES, ROBUSTNESS, RUN, Device, Seed, TrainedRuns, WeightsAlone, WeightsOf, share
from fedmjp.cli.options import output as output_option
from fedmjp.cli.robustness import (
    ERRORS,
    SUMMARY,
    TABLE,
    RobustnessRequest,
    measure_corruptions,
    measure_natural,
    open_natural,
    read_request,
    report_robustness,
)
from fedmjp.cli.runs import choose, open_trained, require_apart, write_manifest

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.cli.robustness import NaturalExamples
    from fedmjp.evaluation.consistency import Puzzles, Sample
    from fedmjp.evaluation.figures import Figures
    from fedmjp.evaluation.robustness import Hits
    from fedmjp.evaluation.robustness_report import Robustness
    from fedmjp.evaluation.runs import TrainedModel

SWEEP = "sweep.png"
# Files of an earlier evaluation that this one may not write again.
FORMER = ("evaluation.csv", "table.md", SWEEP, ERRORS, SUMMARY, TABLE)


def evaluate(
    folders: TrainedRuns = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="bundled, a folder of pictures or parquet files, or hub:OWNER/NAME.",
            metavar="DIR",
            rich_help_panel=PICTURES,
        ),
    ] = None,
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
    corruptions: Annotated[
        bool,
        typer.Option(
            "--corruptions",
            help="Corrupt them as ImageNet-C does, at the model's size: 15 corruptions, 5 severities. Frost is drawn, "
            "not photographed.",
            rich_help_panel=ROBUSTNESS,
        ),
    ] = False,
    corruption: Annotated[
        list[str],
        typer.Option(help="Only this one, such as fog; may be repeated.", metavar="NAME", rich_help_panel=ROBUSTNESS),
    ] = [],
    imagenet_a: Annotated[
        str | None,
        typer.Option(
            help="ImageNet-A, or pictures of some of the model's classes: accuracy among them, and AURRA.",
            metavar="DIR",
            rich_help_panel=ROBUSTNESS,
        ),
    ] = None,
    imagenet_o: Annotated[
        str | None,
        typer.Option(
            help="ImageNet-O, to be told from --imagenet by a low confidence: AUPR, AUROC, FPR95.",
            metavar="DIR",
            rich_help_panel=ROBUSTNESS,
        ),
    ] = None,
    imagenet: Annotated[
        str | None,
        typer.Option(
            help="ImageNet's validation pictures, of which those of ImageNet-O's classes are taken.",
            metavar="DIR",
            rich_help_panel=ROBUSTNESS,
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    workers: Annotated[
        int, typer.Option(help="Processes that read and corrupt pictures.", min=0, rich_help_panel=RUN)
    ] = 0,
    output: Annotated[Path, output_option("Folder for tables and figure.")] = Path("results/evaluation"),
) -> None:
    """Measure what trained models know, and how far shuffles and corruptions move them (MJP's Tables 1 to 4 and 10)."""
    from fedmjp.claims import claim_folder
    from fedmjp.errors import OutputError
    from fedmjp.evaluation.consistency import Puzzles, sample_pictures
    from fedmjp.evaluation.robustness_report import Robustness
    from fedmjp.evaluation.runs import refuse_twins
    from fedmjp.training.run_folder import TrainingFolder

    extra = {"imagenet_a": imagenet_a, "imagenet_o": imagenet_o, "imagenet": imagenet}
    request = read_request(data, everything=corruptions, names=corruption, **extra)
    for source in [*([data] if data is not None else []), *request.folders]:
        require_apart(output, source)
    puzzles = Puzzles(tuple(mask_ratios), seed, tell_mask=not without_mask)
    resolved_device = choose(device)
    runs = open_trained(folders or [], weights, model)
    refuse_twins(runs)
    samples = [
        sample_pictures(data, classes=run.model.classes, limit=limit, seed=seed) for run in runs if data is not None
    ]
    for folder, pictures in zip(folders or [], samples, strict=False):
        TrainingFolder(folder).check_classes(pictures.dataset.class_names)
    natural = open_natural(runs, folders or [], request, limit=limit, seed=seed)
    if TrainingFolder(output).holds_run():
        raise OutputError(f"{output} is the folder of a training run; name another --output")
    claim_folder(output)
    for name in FORMER:
        (output / name).unlink(missing_ok=True)
    console = wide_console()
    execution: dict[str, Any] = {"device": resolved_device, "workers": workers}
    robustness = [Robustness(run.name) for run in runs]
    written: list[str] = []
    if samples:
        robustness, written = _measure_consistency(runs, samples, puzzles, output, console, **execution)
    if request:
        written += _measure_robustness(
            runs, samples, robustness, natural, request, output, console, seed=seed, **execution
        )
    write_manifest(
        output / "manifest.json",
        "evaluation",
        data=_describe_data(samples),
        mask_ratios=puzzles.ratios,
        mask_told=puzzles.tell_mask,
        **({"robustness": request.published} if request else {}),
        seed=seed,
        device=resolved_device,
        runs=[_describe_run(run) for run in runs],
    )
    tell(console, f"\nWritten to {output}: {', '.join([*written, 'manifest.json'])}.")


def _measure_consistency(
    runs: "Sequence[TrainedModel]",
    samples: "Sequence[Sample]",
    puzzles: "Puzzles",
    output: Path,
    console: "Console",
    **execution: Any,
) -> "tuple[list[Robustness], list[str]]":
    """Write tables and figure of shuffled pictures; return unshuffled predictions and file names."""
    from fedmjp.cli.progress import LiveBars
    from fedmjp.evaluation.consistency import measure_consistency
    from fedmjp.evaluation.figures import compute_figures
    from fedmjp.evaluation.robustness_report import Robustness

    with LiveBars(console, transient=True) as bars:
        task = bars.add_task("Pictures", total=sum(len(pictures.indices) for pictures in samples))
        execution |= {"on_pictures": partial(bars.advance, task), "on_skipped": bars.skip}
        results = [
            measure_consistency(run, pictures, puzzles, **execution)
            for run, pictures in zip(runs, samples, strict=True)
        ]
    measured = [list(compute_figures(consistency)) for consistency in results]
    _tell_doubts(runs, measured, console)
    written = _write_tables(runs, measured, samples[0], output, console)
    return [Robustness(run.name, result.correct) for run, result in zip(runs, results, strict=True)], written


def _measure_robustness(
    runs: "Sequence[TrainedModel]",
    samples: "Sequence[Sample]",
    robustness: "Sequence[Robustness]",
    natural: "Sequence[NaturalExamples]",
    request: RobustnessRequest,
    output: Path,
    console: "Console",
    *,
    seed: int,
    device: str,
    workers: int,
) -> list[str]:
    """Measure corrupted pictures, ImageNet-A and -O; return the names of the files."""
    from fedmjp.models.build import build

    pairs = [(run, build(run.model).to(device)) for run in runs]
    on_skipped = cache(lambda reason: tell(console, f"Skipped: {reason}"))
    scores = [
        measure_natural(run, network, folders, workers=workers, on_skipped=on_skipped)
        for (run, network), folders in zip(pairs, natural, strict=True)
    ]
    robustness = [
        replace(part, adversarial=adversarial, detection=detection)
        for part, (adversarial, detection) in zip(robustness, scores, strict=True)
    ]
    hits: Hits = {}
    if request.corruptions:
        options: dict[str, Any] = {"seed": seed, "workers": workers, "console": console}
        hits = measure_corruptions(pairs, samples[0], robustness, request, output, **options)
    return report_robustness(robustness, hits, _name_data(samples[0]) if samples else "", output, console)


def _tell_doubts(runs: "Sequence[TrainedModel]", measured: "Sequence[Sequence[Figures]]", console: "Console") -> None:
    for run, every in zip(runs, measured, strict=True):
        doubts = [f"its training has not ended: {run.unfinished}"] if run.unfinished else []
        if undecided := every[0].undecided:
            doubts.append(
                f"{undecided} of {every[0].pictures} pictures have logits that are not finite; they count as wrong and "
                "as not consistent, and are left out of Diff. Norm."
            )
        tell(console, *(f"{run.name}: {doubt}" for doubt in doubts), style="bold red")


def _write_tables(
    runs: "Sequence[TrainedModel]",
    measured: "Sequence[Sequence[Figures]]",
    pictures: "Sample",
    output: Path,
    console: "Console",
) -> list[str]:
    from fedmjp.benchmarks.folder.output import write_text
    from fedmjp.drawings import save_plot
    from fedmjp.evaluation.figures import summarise
    from fedmjp.evaluation.sweep import draw_sweep
    from fedmjp.evaluation.tables import build_frame, build_tables, collect_remarks, print_tables, render_markdown
    from fedmjp.texts import guard, printable

    data = _name_data(pictures)
    lines = summarise(runs, measured)
    tables, remarks = build_tables(lines, data), collect_remarks(lines)
    write_text(output / "evaluation.csv", printable(build_frame(runs, measured).map(guard).to_csv(index=False)))
    write_text(output / "table.md", render_markdown(tables, remarks))
    written = ["evaluation.csv", "table.md"]
    if len(measured[0]) > 1:
        save_plot(draw_sweep(lines, data), output / SWEEP, dots_per_inch=150)
        written.append(SWEEP)
    print_tables(tables, console)
    console.print("\n".join(remarks), highlight=False, markup=False)
    return written


def _describe_run(run: "TrainedModel") -> dict[str, Any]:

    return {
        "name": run.name,
        "seed": run.seed,
        "weights_sha256": run.model.weights.sha256 if run.model.weights else None,
        "config": (run.config or run.model).published(),
        "unfinished": run.unfinished or None,
    }


def _describe_data(samples: "Sequence[Sample]") -> dict[str, Any] | None:
    if not samples:
        return None
    return {"name": _name_data(samples[0]), "pictures": len(samples[0].indices), "of": len(samples[0].dataset)}


def _name_data(pictures: "Sample") -> str:
    """Name the data set without this machine's folders."""
    return Path(pictures.dataset.name).name
