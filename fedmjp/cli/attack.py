"""`fedmjp attack`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from click.core import ParameterSource

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.outcome import tell_outcome
from fedmjp.cli.progress import TerminalProgress
from fedmjp.cli.runs import choose, published_command, single_batches
from fedmjp.cli.their_model import OUTPUT, attack_module, refuse_options
from fedmjp.overrides import parse_pairs

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.plan.experiment import AttackConfig, Experiment
    from benchmarks.uploads.source import UploadSource
    from fedmjp.data.pictures import PictureEntry
    from fedmjp.scenario import Scenario
    from fedmjp.settings import Setting

    # Experiments, the pictures behind each of their uploads, what gives these, and that in words.
    Asked = tuple[list[Experiment], list[list[tuple[PictureEntry, ...]]], list[UploadSource], str]

# What records of a run state themselves.
RECORDED = (
    "defences", "data", "limit", "mask_ratio", "batch_size", "uploads_per_picture", "local_steps",
    "local_learning_rate", "seed", "image_size", "patch_size", "classes",
)  # fmt: skip


def attack(
    context: typer.Context,
    name: Annotated[str, typer.Option("--attack", help="See `fedmjp list attacks`.")],
    model: Annotated[str, typer.Option(help="See `fedmjp list models`.")] = "deit_small",
    defences: Annotated[
        list[str],
        typer.Option(
            "--defence", help="NAME or NAME:KEY=VALUE,KEY=VALUE; repeat it for a pipeline. See `fedmjp list`."
        ),
    ] = [],
    settings: Annotated[
        list[str],
        typer.Option("--setting", help="a, b or c; may be repeated. By default c where pictures are shuffled."),
    ] = [],
    data: Annotated[str, typer.Option(help="'bundled' or a folder of CLASS/picture files.")] = "bundled",
    limit: Annotated[int, typer.Option(help="Number of pictures.")] = 8,
    mask_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Wanted share of shuffled patches, where a defence names none.")
    ] = 0.27,
    batch_size: Annotated[int, typer.Option(help="Pictures behind one upload.")] = 1,
    uploads_per_picture: Annotated[int, typer.Option(help="Under masks drawn independently.")] = 1,
    local_steps: Annotated[int | None, typer.Option(help="Attack the weight delta after so many SGD steps.")] = None,
    local_learning_rate: Annotated[float, typer.Option(help="Of these steps.")] = 0.01,
    labels_known: Annotated[bool, typer.Option("--labels-known", help="The attacker is told the labels.")] = False,
    options: Annotated[list[str], typer.Option("--set", help="KEY=VALUE, an option of the attack.")] = [],
    then: Annotated[str | None, typer.Option(help="What its pictures pass afterwards: reassembly.")] = None,
    image_size: Annotated[int, typer.Option(help="Pixels per side.")] = 224,
    patch_size: Annotated[int, typer.Option(help="Pixels per side of a patch.")] = 16,
    classes: Annotated[int, typer.Option(help="Classes of the model.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of weights, choice of pictures, jigsaws and attack.")] = 0,
    uploads: Annotated[
        Path | None, typer.Option(help="Attack what `fedmjp record` or `fedmjp simulate --uploads` left here.")
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE:FACTORY",
            help="Attack a model of your own: package:factory or FILE.py:factory, which returns a torch.nn.Module. "
            "This runs your code: name only code that you trust.",
        ),
    ] = None,
    gradient: Annotated[
        Path | None, typer.Option(help="What a client uploaded of it: .safetensors or .pt, by named_parameters().")
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="What the client subtracts from pictures in [0, 1]: 0.485,0.456,0.406.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="What it divides them by then: 0.229,0.224,0.225.")] = None,
    private: Annotated[
        Path | None, typer.Option(help="The picture behind the gradient, to score what is recovered.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[Path, typer.Option(help="Folder for results; with --module, results/module by default.")] = Path(
        "results/attack"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget former trials and start over.")] = False,
) -> None:
    """Attack uploads of one model and report: computed here without Flower, recorded before, or of your own model."""
    from benchmarks.campaign.prepare import ledger_of
    from benchmarks.folder.output import OutputFolder
    from benchmarks.plan.planning import plan
    from benchmarks.report.render import render
    from benchmarks.running.engine import Engine
    from benchmarks.uploads.rounds import open_records
    from fedmjp.errors import OutputError

    console = wide_console()
    flags = {option.name: option.opts[0] for option in context.command.params}
    given = [key for key in context.params if context.get_parameter_source(key) is ParameterSource.COMMANDLINE]
    refuse_options({key: flags[key] for key in given})
    if module is not None:
        attack_module(context.params | ({} if "output" in given else {"output": OUTPUT}), console)
        return
    named = set(given)
    if uploads is not None and output.resolve().is_relative_to(uploads.resolve()):
        raise OutputError(f"--output {output} lies in the recording {uploads}; name another folder")
    asked = _direct(context.params, named, console) if uploads is None else _recorded(uploads, context.params, named)
    experiments, batches, sources, origin = asked
    _refuse(experiments, recorded=uploads is not None)
    recording = None if uploads is None else open_records(uploads)
    planned = plan(experiments, batches, uploads="direct" if recording is None else recording.digest())
    ledger = ledger_of(experiments, planned, title=f"Attack {name}", uploads=origin, command=published_command())
    problems = [] if recording is None else [each for one in experiments for each in recording.problems(one)]
    folder = OutputFolder(output)
    folder.prepare(fresh=fresh)
    store = folder.store()
    finished = len(store.finished([trial.key for trial in planned.trials]))
    console.print(f"{finished} of {len(planned.trials)} trials are finished; device {experiments[0].scenario.device}.")
    ledger.save(folder.root)
    with TerminalProgress(console) as progress:
        progress.attacks(len(planned.trials) - finished)
        for part, source in zip(planned.parts, sources, strict=True):
            Engine(part.experiment, folder, store, progress, source).run(part.trials)
    tell_outcome(render(ledger, store, folder, console, planned), output, console, problems, figure=True)


def _attacks(options: Mapping[str, Any]) -> "tuple[AttackConfig, ...]":
    from benchmarks.plan.experiment import AttackConfig

    given = parse_pairs(options["options"], "--set", dashes=True)
    tried = AttackConfig.parse({"name": options["name"], "options": given, "then": options["then"]})
    return (tried, *([] if tried.name == "grey" else [AttackConfig(name="grey")]))


def _direct(options: Mapping[str, Any], named: set[str], console: "Console") -> "Asked":
    from attacks.natural_patches import measured_on
    from benchmarks.plan.experiment import experiments_of
    from benchmarks.uploads.direct import DirectUploads, Memory
    from fedmjp.data.selection import open_source, select
    from fedmjp.defences.pipeline import DefenceConfig, with_mask_ratio
    from fedmjp.errors import BadInputError
    from fedmjp.scenario import of_single_batches

    if "local_learning_rate" in named and "local_steps" not in named:
        raise BadInputError("--local-learning-rate is of the steps that --local-steps asks for; give both or neither")
    ratio = options["mask_ratio"]
    defences = tuple(DefenceConfig.parse(text) for text in options["defences"] if text != "none")
    values = single_batches(options) | {"defences": with_mask_ratio(defences, ratio)}
    scenario = of_single_batches(values, options["limit"])
    experiments = experiments_of(scenario, _settings(options, scenario), _attacks(options), mask_ratio=ratio)
    pictures = open_source(scenario.data, size=scenario.model.image_size, classes=scenario.model.classes)
    known = sum(measured_on(name) for name in pictures.names())
    if known:
        console.print(f"{known} pictures are left out: the prior of natural patches was measured on them.")
    selection = select(pictures, options["limit"], seed=scenario.seed, leave_out=measured_on)
    tell(console, *(f"Skipped: {reason}" for reason in selection.skipped))
    memory = Memory()
    sources: list[UploadSource] = [DirectUploads(each, selection, memory) for each in experiments]
    batches = [selection.batches(each.scenario) for each in experiments]
    return experiments, batches, sources, "computed in process (direct mode)"


def _recorded(folder: Path, options: Mapping[str, Any], named: set[str]) -> "Asked":
    from benchmarks.plan.experiment import Experiment
    from benchmarks.uploads.rounds import open_records
    from fedmjp.errors import BadInputError

    for key in RECORDED:
        if key in named:
            option = "--defence" if key == "defences" else f"--{key.replace('_', '-')}"
            raise BadInputError(f"{option} is what was recorded in {folder}; leave it out with --uploads")
    recording = open_records(folder)
    model = options["model"] if "model" in named else None
    known = {"labels_known": options["labels_known"]}
    scenarios = [each.model_copy(update=known) for each in recording.attacked(model, device=choose(options["device"]))]
    experiments = [
        Experiment.parse({"scenario": each, "attacks": _attacks(options), "settings": _settings(options, each)})
        for each in scenarios
    ]
    batches = [recording.batches(each.scenario) for each in experiments]
    return experiments, batches, [recording.source(each) for each in experiments], "recorded before"


def _settings(options: Mapping[str, Any], scenario: "Scenario") -> "tuple[Setting, ...]":
    """As asked for; else the one that compares with the clean picture."""
    from fedmjp.errors import BadInputError
    from fedmjp.settings import Picture, Setting

    asked = options["settings"] or [Setting.C if scenario.gradient_of is Picture.SHUFFLED else Setting.A]
    unknown = [name for name in asked if name not in set(Setting)]
    if unknown:
        raise BadInputError(f"--setting {unknown[0]!r} is not one of {', '.join(Setting)}")
    if len(set(asked)) < len(asked):
        raise BadInputError(f"settings must each be named once, got {', '.join(asked)}")
    return tuple(map(Setting, asked))


def _refuse(experiments: "list[Experiment]", *, recorded: bool) -> None:
    """Tell before anything is computed that an attack does not apply."""
    from attacks import ATTACKS
    from fedmjp.errors import AttackNotApplicableError
    from fedmjp.models.build import blueprint

    for experiment in experiments:
        model = blueprint(experiment.arm)
        for tried in experiment.attacks:
            reason = tried.refusal(model, experiment.threat)
            if ATTACKS.get(tried.name).role == "bound" and recorded:
                reason = "is a bound: no recorded upload holds the gradients at all tokens"
            if reason:
                raise AttackNotApplicableError(f"{tried.label} on {experiment.scenario.label}: {reason}")
