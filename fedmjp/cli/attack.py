"""`fedmjp attack`: scenario, exchange, attack, score, and one table."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from click.core import ParameterSource

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import (
    ATTACK,
    ATTACKS,
    PICTURES,
    THEIR_MODEL,
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
    MaskRatio,
    MixUp,
    Model,
    PatchSize,
    Seed,
    ServerIfAny,
    UploadsPerPicture,
    WeightsIfAny,
    known,
)
from fedmjp.cli.options import output as output_option
from fedmjp.cli.outcome import print_scores, tell_errors
from fedmjp.cli.runs import choose, of_weights, published_command, require_apart, single_batches
from fedmjp.cli.their_model import OUTPUT, attack_module
from fedmjp.config import MAX_COUNT, digest_of
from fedmjp.errors import AttackNotApplicableError, OutputError
from fedmjp.metrics import RECOGNISABLE
from fedmjp.overrides import parse_pairs
from fedmjp.settings import Picture, Setting

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment
    from fedmjp.benchmarks.uploads.source import UploadSource
    from fedmjp.data.pictures import PictureEntry
    from fedmjp.scenario import Scenario

SCORES, FIGURE = "scores.csv", "reconstructions.jpg"
NEED_MODULE = {"gradient", "mean", "std", "private"}
APPLY = NEED_MODULE | {
    "name", "module", "batch_size", "local_steps", "local_learning_rate", "options", "seed", "device", "output",
}  # fmt: skip
BASELINE, BASELINE_OF_PICTURES = "chance", "grey"
# Records of a run state these themselves.
RECORDED = (
    "defences", "data", "limit", "mask_ratio", "batch_size", "uploads_per_picture", "local_steps",
    "local_learning_rate", "local_momentum", "local_batch_size", "local_optimiser", "local_weight_decay",
    "label_smoothing", "mixup", "crop_scale", "server", "arithmetic", "seed", "weights", "image_size", "patch_size",
    "classes",
)  # fmt: skip


def attack(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Option("--attack", help="See `fedmjp list attacks`.", callback=known(ATTACKS), rich_help_panel=ATTACK),
    ],
    settings: Annotated[
        list[Setting],
        typer.Option(
            "--setting",
            help="a: gradient of the picture; b, c: of the shuffled one, compared with the shuffled (b) or the private "
            "one (c). Repeat it for several. By default c where pictures are shuffled, else a.",
            rich_help_panel=ATTACK,
        ),
    ] = [],
    labels_known: Annotated[
        bool, typer.Option("--labels-known", help="The attacker is told the labels.", rich_help_panel=ATTACK)
    ] = False,
    options: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the attack.", rich_help_panel=ATTACK),
    ] = [],
    then: Annotated[
        Literal["reassembly"] | None,
        typer.Option(help="What its pictures pass afterwards.", rich_help_panel=ATTACK),
    ] = None,
    uploads: Annotated[
        Path | None,
        typer.Option(
            help="Attack what `fedmjp record` or `fedmjp simulate --uploads` left here, instead of computing uploads.",
            metavar="DIR",
            rich_help_panel=UPLOADS,
        ),
    ] = None,
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
    module: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE:FACTORY",
            help="Attack a model of your own: package:factory or FILE.py:factory, which returns a torch.nn.Module. "
            "This runs your code: name only code that you trust.",
            rich_help_panel=THEIR_MODEL,
        ),
    ] = None,
    gradient: Annotated[
        Path | None,
        typer.Option(
            help="What a client uploaded of it: .safetensors or .pt, by named_parameters().",
            rich_help_panel=THEIR_MODEL,
        ),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            help="What the client subtracts from pictures in [0, 1]: 0.485,0.456,0.406.", rich_help_panel=THEIR_MODEL
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(help="What it divides them by then: 0.229,0.224,0.225.", rich_help_panel=THEIR_MODEL),
    ] = None,
    private: Annotated[
        Path | None,
        typer.Option(help="The picture behind the gradient, to score what is recovered.", rich_help_panel=THEIR_MODEL),
    ] = None,
    data: Data = "bundled",
    limit: Annotated[int, typer.Option(help="Number of pictures.", min=1, max=MAX_COUNT, rich_help_panel=PICTURES)] = 8,
    model: Model = "deit_small",
    weights: WeightsIfAny = None,
    defences: Defences = [],
    mask_ratio: MaskRatio = 0.27,
    image_size: ImageSize = 224,
    patch_size: PatchSize = 16,
    classes: Classes = 1000,
    seed: Seed = 0,
    device: Device = "auto",
    arithmetic: Arithmetic = "float32",
    output: Annotated[Path, output_option("Folder for results; with --module, results/module by default.")] = Path(
        "results/attack"
    ),
    fresh: Fresh = False,
) -> None:
    """Attack uploads of one model and print their scores: computed here, recorded before, or of your own model."""
    console = wide_console()
    flags = {option.name: option.opts[0] for option in context.command.params}
    typed = {key for key in context.params if context.get_parameter_source(key) is ParameterSource.COMMANDLINE}
    _refuse_options({key: flags[key] for key in context.params if key in typed})
    if module is not None:
        attack_module(context.params | ({} if "output" in typed else {"output": OUTPUT}), console)
        return
    require_apart(output, data if uploads is None else str(uploads))
    gc.disable()  # torch and timm make a million objects that stay: to look for cycles among them takes a second
    try:
        if uploads is None:
            job = _prepare_direct(context.params, typed, console)
        else:
            job = _open_recorded(uploads, context.params, typed)
        gc.freeze()
    finally:
        gc.enable()
    try:
        _attack(job, output, console, fresh=fresh)
    finally:
        gc.unfreeze()  # extensions that count their objects would take them for leaks


def _refuse_options(typed: Mapping[str, str]) -> None:
    """Refuse options that go only with --module, or only without it.

    Args:
        typed: Those that the user typed, by their names in Python and on the command line.

    Raises:
        BadInputError: If there is such an option, or --gradient is missing.
    """
    from fedmjp.errors import BadInputError

    if "module" not in typed:
        if alone := next((option for name, option in typed.items() if name in NEED_MODULE), None):
            raise BadInputError(f"{alone} is of a model of your own: name it with --module package:factory")
        return
    if extra := next((option for name, option in typed.items() if name not in APPLY), None):
        raise BadInputError(f"{extra} does not go with --module, whose upload is taken as it is; leave it out")
    if "gradient" not in typed:
        raise BadInputError("--module needs --gradient FILE, which holds what a client uploaded")


@dataclass(frozen=True)
class _Job:
    """What one command attacks.

    Attributes:
        experiments: The scenario in each version of the pictures, and its undefended twins.
        batches: The pictures behind each of their uploads.
        sources: What gives these uploads.
        origin: The same in words.
        digest: Of the uploads, or "direct" where they are computed.
        skipped: Why pictures were passed over.
        unusable: Uploads that cannot be attacked, with the reason.
    """

    experiments: "list[Experiment]"
    batches: "list[list[tuple[PictureEntry, ...]]]"
    sources: "list[UploadSource]"
    origin: str
    digest: str = "direct"
    skipped: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()


def _attack(job: _Job, output: Path, console: "Console", *, fresh: bool) -> None:
    """Attack each upload, write its rows as they come, and print one table."""
    from fedmjp.benchmarks.folder.output import OutputFolder
    from fedmjp.benchmarks.folder.scores import ScoreTable
    from fedmjp.benchmarks.plan.planning import plan
    from fedmjp.benchmarks.report.figure import write_figure
    from fedmjp.benchmarks.running.engine import Engine, jobs_of
    from fedmjp.cli.progress import TerminalProgress
    from fedmjp.provenance import environment
    from fedmjp.threat import SCOPE

    scenario = job.experiments[0].scenario
    if scenario.server is not None:
        tell(console, SCOPE)
    planned = plan(job.experiments, job.batches, uploads=job.digest)
    for cell in planned.cells:
        if cell.refusal:
            raise AttackNotApplicableError(f"{cell.attack} on {cell.model}-{cell.defence}: {cell.refusal}")
    folder = OutputFolder(output)
    if folder.database.exists() and not fresh:
        raise OutputError(f"{output} holds a campaign's trials; name another --output, or forget them with --fresh")
    folder.prepare(fresh=fresh)
    table = ScoreTable(output, planned)
    machine = environment()
    table.write_manifest(_about(job), machine)
    finished = table.finished
    console.print(f"{len(finished)} of {len(planned.tasks)} trials are finished; device {scenario.device}.")
    with TerminalProgress(console) as progress:
        progress.attacks(len(planned.tasks) - len(finished))
        for part, source in zip(planned.parts, job.sources, strict=True):
            engine = Engine(part.experiment, source, progress, environment=machine)
            for work in jobs_of(0, part.trials, finished):
                for results in engine.results(work.trials):
                    table.require_place(results.rows)
                    folder.kept.save(results.pictures)
                    table.put(results.rows)
                    progress.trials(len(results.rows))
    trials = list(table.trials.values())
    print_scores(planned.cells, trials, console)
    files = [SCORES, "manifest.json"]
    if pictured := [trial for trial in planned.tasks if trial.cell.reveals == "pictures"]:
        write_figure(pictured, trials, folder.pictures, output / FIGURE)
        files = [FIGURE, *files, "pictures/"]
    table.require_place()
    tell(console, f"Written to {output}: {', '.join(files)}. For a board: fedmjp leaderboard {output}")
    tell_errors([str(trial.error) for trial in trials if trial.status == "failed"], console, job.unusable)


def _about(job: _Job) -> dict[str, Any]:
    """Describe a job as its manifest does."""
    from fedmjp.metrics import DISCLOSED

    config = {"experiments": [experiment.published() for experiment in job.experiments]}
    first = job.experiments[0]
    attacks = {attack.name: attack for experiment in job.experiments for attack in experiment.attacks}
    title = f"Attack {next(iter(attacks))}"
    disclosed = any(attack.build().reveals != "pictures" for attack in attacks.values())
    return {
        "command": published_command(),
        "name": title.lower().replace(" ", "-"),
        "title": title,
        "question": "",
        "seed": first.scenario.seed,
        "data": Path(first.scenario.data).name,
        "uploads": job.origin,
        "metrics": [*first.metrics, *(DISCLOSED if disclosed else ())],
        "recognisable_at": RECOGNISABLE,
        "skipped": list(job.skipped),
        "utility": {},
        "keep": "all",
        "reported": [],
        "notes": [],
        "config": config,
        "config_sha256": digest_of(config),
    }


def _attacks(options: Mapping[str, Any]) -> "tuple[AttackConfig, ...]":
    """Return the attack that the options name, and the baseline that knows nothing of the uploads."""
    from fedmjp.benchmarks.plan.experiment import AttackConfig

    values = parse_pairs(options["options"], "--set", dashes=True)
    attack = AttackConfig.parse({"name": options["name"], "options": values, "then": options["then"]})
    baseline = BASELINE_OF_PICTURES if attack.build().reveals == "pictures" else BASELINE
    return (attack, *([] if attack.name == baseline else [AttackConfig(name=baseline)]))


def _prepare_direct(options: Mapping[str, Any], typed: set[str], console: "Console") -> _Job:
    """Choose the pictures, and plan to compute their uploads here."""
    from fedmjp.attacks.held_out import measured_on
    from fedmjp.benchmarks.plan.experiment import experiments_of
    from fedmjp.benchmarks.uploads.direct import DirectUploads, Memory
    from fedmjp.data.selection import open_source, select
    from fedmjp.defences.pipeline import DefenceConfig, with_mask_ratio
    from fedmjp.errors import BadInputError
    from fedmjp.models.build import build
    from fedmjp.scenario import make_batch_scenario

    if "local_learning_rate" in typed and "local_steps" not in typed:
        raise BadInputError("--local-learning-rate is of the steps that --local-steps asks for; give both or neither")
    if options["weights"] is not None:
        model = of_weights(options["weights"])
        options = {**options, **{key: value for key, value in model.items() if key == "weights" or key not in typed}}
    ratio = options["mask_ratio"]
    defences = tuple(DefenceConfig.parse(text) for text in options["defences"] if text != "none")
    values = single_batches(options) | {"defences": with_mask_ratio(defences, ratio)}
    scenario = make_batch_scenario(values, options["limit"])
    experiments = experiments_of(scenario, _settings(options, scenario), _attacks(options), mask_ratio=ratio)
    for network in dict.fromkeys(experiment.scenario.network for experiment in experiments):
        if network.weights:
            build(network)  # a checkpoint that does not fit is told before anything is run
    pictures = open_source(scenario.data, size=scenario.model.image_size, classes=scenario.model.classes)
    in_prior = sum(measured_on(name) for name in pictures.names())
    if in_prior:
        console.print(f"{in_prior} pictures are left out: the prior of natural patches was measured on them.")
    selection = select(pictures, options["limit"], seed=scenario.seed, leave_out=measured_on)
    tell(console, *(f"Skipped: {reason}" for reason in selection.skipped))
    memory = Memory()
    sources: list[UploadSource] = [DirectUploads(experiment, selection, memory) for experiment in experiments]
    batches = [selection.batches(experiment.scenario) for experiment in experiments]
    return _Job(experiments, batches, sources, "computed in process (direct mode)", skipped=tuple(selection.skipped))


def _open_recorded(folder: Path, options: Mapping[str, Any], typed: set[str]) -> _Job:
    """Open what `fedmjp record` or `fedmjp simulate --uploads` left in a folder."""
    from fedmjp.benchmarks.plan.experiment import Experiment
    from fedmjp.benchmarks.uploads.rounds import open_records
    from fedmjp.errors import BadInputError

    if refused := [key for key in RECORDED if key in typed]:
        flags = ", ".join("--defence" if key == "defences" else f"--{key.replace('_', '-')}" for key in refused)
        raise BadInputError(f"{flags}: that was decided when {folder} was recorded; leave it out with --uploads")
    recording = open_records(folder)
    model = options["model"] if "model" in typed else None
    knowledge = {"labels_known": options["labels_known"]}
    recorded = recording.attacked(model, device=choose(options["device"]))
    scenarios = [scenario.model_copy(update=knowledge) for scenario in recorded]
    experiments = [
        Experiment.parse({"scenario": scenario, "attacks": _attacks(options), "settings": _settings(options, scenario)})
        for scenario in scenarios
    ]
    batches = [recording.batches(experiment.scenario) for experiment in experiments]
    sources = [recording.source(experiment) for experiment in experiments]
    unusable = tuple(problem for experiment in experiments for problem in recording.problems(experiment))
    return _Job(experiments, batches, sources, "recorded before", recording.digest(), unusable=unusable)


def _settings(options: Mapping[str, Any], scenario: "Scenario") -> "tuple[Setting, ...]":
    """Return the settings that were named; else the one that compares with the clean picture."""
    from fedmjp.errors import BadInputError

    letters = options["settings"] or [Setting.C if scenario.gradient_of is Picture.SHUFFLED else Setting.A]
    if len(set(letters)) < len(letters):
        raise BadInputError(f"settings must each be named once, got {', '.join(letters)}")
    return tuple(Setting[letter.upper()] for letter in letters)  # the parameters of click are letters
