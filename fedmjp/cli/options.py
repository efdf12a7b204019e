"""What several commands take, in the same words, and checked before anything heavy is imported."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from fedmjp.errors import BadInputError

# Groups of options in --help.
PICTURES, MODEL, UPLOADS, ATTACK, TRAINING, RUN, THEIR_MODEL, ROBUSTNESS = (
    "Pictures", "Model and defences", "Uploads", "Attack", "Training", "Run", "Your own model", "Robustness",
)  # fmt: skip
ATTACKS, DEFENCES, SERVERS = "fedmjp.attacks:ATTACKS", "fedmjp.defences:DEFENCES", "fedmjp.threat:SERVERS"
NOBODY = {"none", "honest"}  # what no defence, and no server that changes weights, is called
DEFENCE_HELP = "NAME or NAME:KEY=VALUE,KEY=VALUE, see `fedmjp list defences`; repeat it for several, in their order."


def examples(*commands: str, keys: Mapping[str, str] | None = None) -> str:
    """Write the end of a command's --help: commands that do something, and the keys of KEY=VALUE by their group.

    Args:
        commands: Whole command lines.
        keys: Names of keys by their group.
    """
    key_lines = [f"{group}.KEY: {names}" if group else names for group, names in (keys or {}).items()]
    return "\n\n".join(map(escape, ["Examples:", *commands, *(["", "Keys:", *key_lines] if key_lines else [])]))


def output(help_text: str) -> Any:
    """Make the option of the folder that a command writes to.

    Args:
        help_text: Shown by --help.
    """
    return typer.Option("--output", help=help_text, parser=_folder, metavar="DIR", rich_help_panel=RUN)


def known_model(name: str) -> str:
    """Check the name of a model, and return it.

    Args:
        name: As typed.

    Raises:
        UnknownNameError: If there is no such model.
    """
    from fedmjp.models.architectures import TIMM, architecture

    if not name.startswith(TIMM):  # timm itself takes seconds, and is asked when the model is built
        architecture(name)
    return name


def known(registry: str) -> Callable[[Any], Any]:
    """Make the callback that checks the names of an option, and returns them as typed.

    Args:
        registry: That knows the names, as ``module:attribute``; it is imported when the option is read.
    """

    def check(typed: str | Sequence[str] | None) -> str | Sequence[str] | None:
        for text in [typed] if isinstance(typed, str) else typed or ():
            name = text.partition(":")[0].strip()
            if name not in NOBODY:
                module, _, attribute = registry.partition(":")
                getattr(import_module(module), attribute).require(name)
        return typed

    return check


def share(value: Any) -> Any:
    """Refuse NaN, which no range excludes, and return the value.

    Args:
        value: A share, or a list of them.

    Raises:
        BadParameter: If one is NaN.
    """
    if any(entry != entry for entry in (value if isinstance(value, Sequence) else [value])):
        raise typer.BadParameter("nan is not in the range 0<=x<=1.")
    return value


def _folder(text: str | Path) -> Path:
    if not str(text):
        raise BadInputError("--output is empty: name a folder")
    return Path(text)


Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Values of keys, which are listed below, such as recipe.batch_size=64."
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A YAML file of these keys.", metavar="FILE", rich_help_panel=RUN)
]
_Model: Any = typer.Option(help="See `fedmjp list models`.", callback=known_model, rich_help_panel=MODEL)
_Defence: Any = typer.Option("--defence", help=DEFENCE_HELP, callback=known(DEFENCES), rich_help_panel=MODEL)
_Server: Any = typer.Option(
    "--server",
    metavar="NAME",
    help="The server changes the weights that it sends: NAME or NAME:KEY=VALUE,KEY=VALUE, see `fedmjp list servers`. "
    "For measuring your own deployment, in federations started here alone.",
    callback=known(SERVERS),
    rich_help_panel=UPLOADS,
)
_Device: Any = typer.Option(help="Where the work is done; auto takes CUDA where there is any.", rich_help_panel=RUN)
_Strategy: Any = typer.Option(
    help="fedavg by default; trimmed_mean, median, krum and multi_krum stand hostile clients.",
    rich_help_panel=TRAINING,
)
_Arithmetic: Any = typer.Option(
    help="Of the clients' networks; tf32 on CUDA alone. Attacks compute in float32.", rich_help_panel=RUN
)
_Fresh: Any = typer.Option("--fresh", help="Forget what a former run left, and start over.", rich_help_panel=RUN)

Model = Annotated[str, _Model]
Defences = Annotated[list[str], _Defence]
DefencesIfAny = Annotated[list[str] | None, _Defence]
ServerIfAny = Annotated[str | None, _Server]
# What commands look into: runs, or in their place one file of weights and what it is of.
TrainedRuns = Annotated[list[Path] | None, typer.Argument(help="Folders of training runs.", metavar="[RUN]...")]
WeightsAlone = Annotated[
    Path | None, typer.Option(help="A file of weights instead of runs.", metavar="FILE", rich_help_panel=MODEL)
]
WeightsOf = Annotated[
    list[str],
    typer.Option(
        help="What the weights are of, such as name=deit_small; may be repeated.",
        metavar="KEY=VALUE",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], _Device]
DeviceIfAny = Annotated[Literal["auto", "cpu", "cuda"] | None, _Device]
StrategyIfAny = Annotated[
    Literal["fedavg", "fedprox", "fedavgm", "fedadam", "fedsgd", "trimmed_mean", "median", "krum", "multi_krum"] | None,
    _Strategy,
]
# The words of fedmjp.arithmetic, which imports torch.
Arithmetic = Annotated[Literal["float32", "tf32", "bfloat16"], _Arithmetic]
ArithmeticIfAny = Annotated[Literal["float32", "tf32", "bfloat16"] | None, _Arithmetic]
Fresh = Annotated[bool, _Fresh]
Data = Annotated[
    str, typer.Option(help="'bundled' or a folder of CLASS/picture files.", metavar="DIR", rich_help_panel=PICTURES)
]
Pictures = Annotated[
    str | None,
    typer.Option(
        help="bundled (the default), a folder of pictures or parquet files, or hub:OWNER/NAME.",
        metavar="DIR",
        rich_help_panel=PICTURES,
    ),
]
WeightsIfAny = Annotated[
    str | None,
    typer.Option(
        help="Trained weights: a file, or zoo:NAME. Of ours, and beside the manifest of a run, model, sizes and "
        "classes are known. Untrained by default.",
        metavar="FILE",
        rich_help_panel=MODEL,
    ),
]
MaskRatio = Annotated[
    float,
    typer.Option(
        callback=share,
        min=0,
        max=1,
        help="Wanted share of shuffled patches, where a defence names none.",
        rich_help_panel=MODEL,
    ),
]
ImageSize = Annotated[int, typer.Option(help="Pixels per side.", min=1, rich_help_panel=MODEL)]
PatchSize = Annotated[int, typer.Option(help="Pixels per side of a patch.", min=1, rich_help_panel=MODEL)]
Classes = Annotated[int, typer.Option(help="Classes of the model.", min=2, rich_help_panel=MODEL)]
BatchSize = Annotated[int, typer.Option(help="Pictures behind one upload.", min=1, rich_help_panel=UPLOADS)]
UploadsPerPicture = Annotated[
    int, typer.Option(help="Under masks drawn independently.", min=1, rich_help_panel=UPLOADS)
]
LocalSteps = Annotated[
    int | None,
    typer.Option(help="Upload the weight delta after so many steps.", min=1, rich_help_panel=UPLOADS),
]
LocalLearningRate = Annotated[float, typer.Option(help="Of these steps.", rich_help_panel=UPLOADS)]
LocalMomentum = Annotated[float, typer.Option(help="Of these steps.", min=0, rich_help_panel=UPLOADS)]
LocalBatchSize = Annotated[
    int | None,
    typer.Option(help="Pictures of one of these steps, in turn; by default all.", min=1, rich_help_panel=UPLOADS),
]
LocalOptimiser = Annotated[
    Literal["sgd", "adamw"],
    typer.Option(help="Of these steps; clients begin with a new one in every round.", rich_help_panel=UPLOADS),
]
LocalWeightDecay = Annotated[float, typer.Option(help="Of these steps.", min=0, max=1, rich_help_panel=UPLOADS)]
LabelSmoothing = Annotated[
    float,
    typer.Option(help="Of the clients' loss, below 1; the attacker knows it.", min=0, rich_help_panel=UPLOADS),
]
MixUp = Annotated[
    float,
    typer.Option(
        help="Alpha: clients mix each batch in pairs; the attacker knows alpha, not the share.",
        min=0,
        rich_help_panel=UPLOADS,
    ),
]
CropScale = Annotated[
    float | None,
    typer.Option(
        help="Clients show random crops that keep at least this share of a picture, others in each upload; the "
        "attacker knows the share, not the crops.",
        min=0,
        max=1,
        rich_help_panel=UPLOADS,
    ),
]
Seed = Annotated[int, typer.Option(help="Of all that is drawn.", min=0, rich_help_panel=RUN)]
SeedIfAny = Annotated[int | None, typer.Option(help="Of all that is drawn; 0 by default.", min=0, rich_help_panel=RUN)]
