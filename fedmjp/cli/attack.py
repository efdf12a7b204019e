"""`fedmjp attack`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from click.core import ParameterSource

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.plan.experiment import Experiment
    from benchmarks.uploads.source import UploadSource
    from fedmjp.config import Checkpoint
    from fedmjp.data.pictures import PictureEntry

# What records of a run state themselves.
RECORDED = (
    "data", "limit", "mask_ratio", "batch_size", "uploads_per_picture", "local_steps", "local_learning_rate",
    "precision", "noise", "kept", "seed", "image_size", "patch_size", "classes",
)  # fmt: skip


def attack(
    context: typer.Context,
    name: Annotated[str, typer.Option("--attack", help="See `fedmjp list attacks`.")],
    model: Annotated[str, typer.Option(help="See `fedmjp list models`.")] = "deit_small",
    defence: Annotated[str, typer.Option(help="none, jigsaw or mjp.")] = "none",
    settings: Annotated[list[str], typer.Option("--setting", help="a, b or c; may be repeated.")] = ["a"],
    data: Annotated[str, typer.Option(help="'bundled' or a folder of CLASS/picture files.")] = "bundled",
    limit: Annotated[int, typer.Option(help="Number of pictures.")] = 8,
    mask_ratio: Annotated[float, typer.Option(help="Wanted share of shuffled patches, 0 to 1.")] = 0.27,
    batch_size: Annotated[int, typer.Option(help="Pictures behind one upload.")] = 1,
    uploads_per_picture: Annotated[int, typer.Option(help="Under masks drawn independently.")] = 1,
    local_steps: Annotated[int | None, typer.Option(help="Attack the weight delta after so many SGD steps.")] = None,
    local_learning_rate: Annotated[float, typer.Option(help="Of these steps.")] = 0.01,
    precision: Annotated[str, typer.Option(help="Uploads are rounded to float32, float16 or bfloat16.")] = "float32",
    noise: Annotated[float, typer.Option(help="Added to uploads, relative to each tensor's RMS.")] = 0.0,
    kept: Annotated[float, typer.Option(help="Share of each tensor that pruning leaves.")] = 1.0,
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
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results/attack"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget former trials and start over.")] = False,
) -> None:
    """Attack uploads of one model and report: computed here without Flower, or recorded before."""
    from benchmarks.campaign.prepare import ledger_of
    from benchmarks.folder.output import OutputFolder
    from benchmarks.folder.store import Store
    from benchmarks.plan.planning import plan
    from benchmarks.report.render import render_experiment
    from benchmarks.running.engine import Engine
    from benchmarks.uploads.rounds import open_records
    from fedmjp.cli.command_line import published_command
    from fedmjp.cli.outcome import tell_outcome
    from fedmjp.cli.progress import TerminalProgress, wide_console

    console = wide_console()
    given = {key: value for key, value in context.params.items() if _is_given(context, key)}
    _refuse_contradictions(given, uploads, output)
    if uploads is None:
        experiment, batches, source, origin = _direct(context.params, console)
    else:
        experiment, batches, source, origin = _recorded(uploads, given, context.params)
    _refuse(experiment, recorded=uploads is not None)
    recording = None if uploads is None else open_records(uploads)
    planned = plan([experiment], [batches], uploads="direct" if recording is None else recording.digest())
    ledger = ledger_of(experiment, planned, title=f"Attack {name}", uploads=origin, command=published_command())
    problems = [] if recording is None else recording.problems(experiment)
    folder = OutputFolder(output)
    folder.prepare(fresh=fresh)
    store = Store.at(folder.database)
    finished = len(store.finished([trial.key for trial in planned.trials]))
    console.print(f"{finished} of {len(planned.trials)} trials are finished; device {experiment.federation.device}.")
    ledger.save(folder.root)
    with TerminalProgress(console) as progress:
        Engine(experiment, folder, store, progress, source).run(planned.trials)
    tell_outcome(render_experiment(planned, ledger, store, folder, console), output, console, problems, figure=True)


def _refuse_contradictions(given: dict[str, Any], uploads: Path | None, output: Path) -> None:
    from fedmjp.errors import BadInputError, OutputError

    if uploads is not None and output.resolve().is_relative_to(uploads.resolve()):
        raise OutputError(f"--output {output} lies in the recording {uploads}; name another folder")
    if "local_learning_rate" in given and "local_steps" not in given and uploads is None:
        raise BadInputError("--local-learning-rate is of the steps that --local-steps asks for; give both or neither")


def parse_options(options: list[str]) -> dict[str, str]:
    """``KEY=VALUE`` texts of ``--set`` as a mapping; a dash in a key stands for an underscore."""
    parts = [option.partition("=") for option in options]
    return parse_pairs([f"{key.replace('-', '_')}{equals}{value}" for key, equals, value in parts], "--set")


def parse_pairs(pairs: list[str], name: str) -> dict[str, str]:
    """``KEY=VALUE`` texts of an option as a mapping.

    Raises:
        BadInputError: If one has no ``=`` or no key, or a key is given twice.
    """
    from fedmjp.errors import BadInputError

    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadInputError(f"{name} {pair!r} is not of the form KEY=VALUE")
        if key in found:
            raise BadInputError(f"{name} {key} is given twice")
        found[key] = value
    return found


def _is_given(context: typer.Context, key: str) -> bool:
    return context.get_parameter_source(key) is ParameterSource.COMMANDLINE


def _experiment(values: dict[str, Any], federation: Any, checkpoints: "dict[str, Checkpoint]") -> "Experiment":
    from benchmarks.plan.experiment import AttackConfig, Experiment

    tried = AttackConfig.parse(
        {"name": values["name"], "options": parse_options(values["options"]), "then": values["then"]}
    )
    attacks = (tried, *([] if tried.name == "grey" else [AttackConfig(name="grey")]))
    return Experiment.parse(
        {
            "federation": federation,
            "attacks": dict.fromkeys(federation.models, attacks),
            "settings": values["settings"],
            "labels_known": values["labels_known"],
            "checkpoints": checkpoints,
        }
    )


def _direct(
    values: dict[str, Any], console: "Console"
) -> "tuple[Experiment, list[tuple[PictureEntry, ...]], UploadSource, str]":
    from attacks.natural_patches import measured_on
    from benchmarks.uploads.direct import DirectUploads
    from fedmjp.cli.device import choose
    from fedmjp.config import FederationConfig
    from fedmjp.data.selection import open_source, select
    from fedmjp.models.build import architecture
    from fedmjp.settings import Setting
    from fedmjp.threat import PROTOCOL

    architecture(values["model"])
    shared = (
        "mask_ratio",
        "batch_size",
        "local_learning_rate",
        "image_size",
        "patch_size",
        "classes",
        "seed",
        *PROTOCOL,
    )
    federation = FederationConfig.parse(
        {
            **{key: values[key] for key in shared},
            "models": (values["model"],),
            "defences": (values["defence"],),
            "data": values["data"] if values["data"] == "bundled" else str(Path(values["data"]).resolve()),
            "clients": 1,
            "pictures_per_client": values["limit"],
            "inputs": tuple({_setting(each, Setting).gradient_of: None for each in values["settings"]}),
            "update": "gradient" if values["local_steps"] is None else "delta",
            "local_steps": 1 if values["local_steps"] is None else values["local_steps"],
            "device": choose(values["device"]),
        }
    )
    pictures = open_source(federation.data, size=federation.image_size, classes=federation.classes)
    known = sum(measured_on(name) for name in pictures.names())
    if known:
        console.print(f"{known} pictures are left out: the prior of natural patches was measured on them.")
    selection = select(pictures, values["limit"], seed=federation.seed, leave_out=measured_on)
    for reason in selection.skipped:
        console.print(f"Skipped: {reason}", highlight=False, markup=False, soft_wrap=True)
    experiment = _experiment(values, federation, {})
    source = DirectUploads(experiment, selection)
    return experiment, selection.batches(federation), source, "computed in process (direct mode)"


def _recorded(
    folder: Path, given: dict[str, Any], values: dict[str, Any]
) -> "tuple[Experiment, list[tuple[PictureEntry, ...]], UploadSource, str]":
    from benchmarks.uploads.rounds import open_records
    from fedmjp.cli.device import choose
    from fedmjp.errors import BadInputError

    for key in RECORDED:
        if key in given:
            option = f"--{key.replace('_', '-')}"
            raise BadInputError(f"{option} is what was recorded in {folder}; leave it out with --uploads")
    recording = open_records(folder)
    federation = recording.arms(given.get("model"), given.get("defence"), device=choose(values["device"]))
    experiment = _experiment(values, federation, recording.checkpoints(federation))
    return experiment, recording.batches(federation), recording.source(experiment), "recorded before"


def _setting(name: str, settings: Any) -> Any:
    from fedmjp.errors import BadInputError

    try:
        return settings(name)
    except ValueError:
        raise BadInputError(f"--setting {name!r} is not one of {', '.join(settings)}") from None


def _refuse(experiment: "Experiment", *, recorded: bool) -> None:
    """Tell before anything is computed that an attack does not apply."""
    from attacks import ATTACKS
    from fedmjp.errors import AttackNotApplicableError
    from fedmjp.models.build import blueprint

    for arm in experiment.arms:
        model = blueprint(arm)
        for tried in experiment.attacks[arm.name]:
            reason = tried.refusal(model, experiment.threat)
            if ATTACKS.get(tried.name).role == "bound" and recorded:
                reason = "is a bound: no recorded upload holds the gradients at all tokens"
            if reason:
                raise AttackNotApplicableError(f"{tried.label} on {arm.name}: {reason}")
