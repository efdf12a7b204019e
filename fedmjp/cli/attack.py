"""`fedmjp attack`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from click.core import ParameterSource

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import (
    ATTACK,
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
    known_attack,
)
from fedmjp.cli.options import output as output_option
from fedmjp.cli.outcome import tell_outcome
from fedmjp.cli.runs import choose, of_weights, published_command, require_apart, single_batches
from fedmjp.cli.their_model import OUTPUT, attack_module, refuse_options
from fedmjp.config import MAX_COUNT
from fedmjp.overrides import parse_pairs
from fedmjp.settings import Picture, Setting

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.benchmarks.plan.experiment import AttackConfig, Experiment
    from fedmjp.benchmarks.uploads.source import UploadSource
    from fedmjp.data.pictures import PictureEntry
    from fedmjp.scenario import Scenario

    # Experiments, the pictures behind each of their uploads, what gives these, and that in words.
    Asked = tuple[list[Experiment], list[list[tuple[PictureEntry, ...]]], list[UploadSource], str]

# What records of a run state themselves.
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
        typer.Option("--attack", help="See `fedmjp list attacks`.", callback=known_attack, rich_help_panel=ATTACK),
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
    """Attack uploads of one model and report: computed here without Flower, recorded before, or of your own model."""
    from fedmjp.benchmarks.campaign.prepare import describe
    from fedmjp.benchmarks.folder.output import OutputFolder
    from fedmjp.benchmarks.plan.planning import plan, require_applicable
    from fedmjp.benchmarks.report.render import FIGURE, render
    from fedmjp.benchmarks.running.engine import Engine
    from fedmjp.benchmarks.running.runner import Recorder, run_experiment
    from fedmjp.benchmarks.uploads.rounds import open_records
    from fedmjp.cli.progress import TerminalProgress
    from fedmjp.threat import SCOPE

    console = wide_console()
    flags = {option.name: option.opts[0] for option in context.command.params}
    given = [key for key in context.params if context.get_parameter_source(key) is ParameterSource.COMMANDLINE]
    refuse_options({key: flags[key] for key in given})
    if module is not None:
        attack_module(context.params | ({} if "output" in given else {"output": OUTPUT}), console)
        return
    named = set(given)
    require_apart(output, data if uploads is None else str(uploads))
    asked = _direct(context.params, named, console) if uploads is None else _recorded(uploads, context.params, named)
    experiments, batches, sources, origin = asked
    recording = None if uploads is None else open_records(uploads)
    if experiments[0].scenario.server is not None:
        tell(console, SCOPE)
    planned = plan(experiments, batches, uploads="direct" if recording is None else recording.digest())
    require_applicable(planned)
    planned = describe(planned, title=f"Attack {name}", uploads=origin, command=published_command())
    problems = [] if recording is None else [problem for one in experiments for problem in recording.problems(one)]
    folder = OutputFolder(output)
    folder.prepare(fresh=fresh)
    store = folder.store()
    finished = len(store.finished([trial.key for trial in planned.tasks]))
    console.print(f"{finished} of {len(planned.tasks)} trials are finished; device {experiments[0].scenario.device}.")
    planned.save(folder.root)
    with TerminalProgress(console) as progress:
        progress.attacks(len(planned.tasks) - finished)
        for part, source in zip(planned.parts, sources, strict=True):
            run_experiment(Engine(part.experiment, source, progress), part.trials, Recorder(folder, store, progress))
    failed = render(planned, store, folder, console, figure=True)
    tell_outcome(failed, output, console, problems, figure=(output / FIGURE).exists())


def _attacks(options: Mapping[str, Any]) -> "tuple[AttackConfig, ...]":
    from fedmjp.benchmarks.leaderboard.measures import MEASURES
    from fedmjp.benchmarks.plan.experiment import AttackConfig

    given = parse_pairs(options["options"], "--set", dashes=True)
    tried = AttackConfig.parse({"name": options["name"], "options": given, "then": options["then"]})
    floor = MEASURES[tried.build().reveals].floor
    return (tried, *([] if tried.name == floor else [AttackConfig(name=floor)]))


def _direct(options: Mapping[str, Any], named: set[str], console: "Console") -> "Asked":
    from fedmjp.attacks.held_out import measured_on
    from fedmjp.benchmarks.plan.experiment import experiments_of
    from fedmjp.benchmarks.uploads.direct import DirectUploads, Memory
    from fedmjp.data.selection import open_source, select
    from fedmjp.defences.pipeline import DefenceConfig, with_mask_ratio
    from fedmjp.errors import BadInputError
    from fedmjp.models.build import build
    from fedmjp.scenario import make_batch_scenario

    if "local_learning_rate" in named and "local_steps" not in named:
        raise BadInputError("--local-learning-rate is of the steps that --local-steps asks for; give both or neither")
    if options["weights"] is not None:
        known = of_weights(options["weights"])
        options = {**options, **{key: value for key, value in known.items() if key == "weights" or key not in named}}
    ratio = options["mask_ratio"]
    defences = tuple(DefenceConfig.parse(text) for text in options["defences"] if text != "none")
    values = single_batches(options) | {"defences": with_mask_ratio(defences, ratio)}
    scenario = make_batch_scenario(values, options["limit"])
    experiments = experiments_of(scenario, _settings(options, scenario), _attacks(options), mask_ratio=ratio)
    for arm in dict.fromkeys(experiment.arm for experiment in experiments if experiment.arm.weights):
        build(arm)  # a checkpoint that does not fit is told before anything is run
    pictures = open_source(scenario.data, size=scenario.model.image_size, classes=scenario.model.classes)
    in_prior = sum(measured_on(name) for name in pictures.names())
    if in_prior:
        console.print(f"{in_prior} pictures are left out: the prior of natural patches was measured on them.")
    selection = select(pictures, options["limit"], seed=scenario.seed, leave_out=measured_on)
    tell(console, *(f"Skipped: {reason}" for reason in selection.skipped))
    memory = Memory()
    sources: list[UploadSource] = [DirectUploads(experiment, selection, memory) for experiment in experiments]
    batches = [selection.batches(experiment.scenario) for experiment in experiments]
    return experiments, batches, sources, "computed in process (direct mode)"


def _recorded(folder: Path, options: Mapping[str, Any], named: set[str]) -> "Asked":
    from fedmjp.benchmarks.plan.experiment import Experiment
    from fedmjp.benchmarks.uploads.rounds import open_records
    from fedmjp.errors import BadInputError

    if given := [key for key in RECORDED if key in named]:
        flags = ", ".join("--defence" if key == "defences" else f"--{key.replace('_', '-')}" for key in given)
        raise BadInputError(f"{flags}: that was decided when {folder} was recorded; leave it out with --uploads")
    recording = open_records(folder)
    model = options["model"] if "model" in named else None
    known = {"labels_known": options["labels_known"]}
    scenarios = [
        scenario.model_copy(update=known) for scenario in recording.attacked(model, device=choose(options["device"]))
    ]
    experiments = [
        Experiment.parse({"scenario": scenario, "attacks": _attacks(options), "settings": _settings(options, scenario)})
        for scenario in scenarios
    ]
    batches = [recording.batches(experiment.scenario) for experiment in experiments]
    return experiments, batches, [recording.source(experiment) for experiment in experiments], "recorded before"


def _settings(options: Mapping[str, Any], scenario: "Scenario") -> "tuple[Setting, ...]":
    """As asked for; else the one that compares with the clean picture."""
    from fedmjp.errors import BadInputError

    asked = options["settings"] or [Setting.C if scenario.gradient_of is Picture.SHUFFLED else Setting.A]
    if len(set(asked)) < len(asked):
        raise BadInputError(f"settings must each be named once, got {', '.join(asked)}")
    return tuple(map(Setting, asked))  # the context holds their letters
