"""What commands of `fedmjp campaign` have in common."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmjp.cli.options import MODEL, RUN, Arithmetic
from fedmjp.cli.runs import choose, located, published_command
from fedmjp.overrides import parse_pairs

if TYPE_CHECKING:
    from fedmjp.benchmarks.campaign.prepare import Prepared

File = Annotated[Path, typer.Argument(help="The campaign's YAML file.", show_default=False)]
Overrides = Annotated[list[str], typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the file to replace.")]
Weights = Annotated[
    list[str],
    typer.Option(
        "--weights", metavar="MODEL=FILE", help="A checkpoint, of MODEL or MODEL-DEFENCE.", rich_help_panel=MODEL
    ),
]
Database = Annotated[
    str,
    typer.Option(
        envvar="FEDMJP_DATABASE",
        help="postgresql://... instead of a SQLite file in the folder.",
        metavar="URL",
        rich_help_panel=RUN,
    ),
]
Folder = Annotated[Path, typer.Argument(help="What `fedmjp campaign run --output` wrote.", show_default=False)]


def prepared_of(
    file: Path, overrides: list[str], weights: list[str], device: str, arithmetic: "Arithmetic"
) -> "Prepared":
    """Prepare a campaign as its file and the command line state it.

    Args:
        file: The campaign's file.
        overrides: ``key=value`` of the file.
        weights: ``MODEL=FILE``.
        device: auto, cpu or cuda.
        arithmetic: Of clients.

    Raises:
        BadInputError: If either is wrong, or pictures or weights cannot be used.
    """
    from fedmjp.benchmarks.campaign.file import read_campaign
    from fedmjp.benchmarks.campaign.prepare import prepare
    from fedmjp.zoo import PREFIX

    checkpoints = parse_pairs(weights, "--weights")
    read = read_campaign(file, [*overrides, *(f"weights.{label}={path}" for label, path in checkpoints.items())])
    data = read.data.model_copy(update={"source": located(read.data.source)})
    whole = {
        label: path if path.startswith(PREFIX) else str(Path(path).absolute()) for label, path in read.weights.items()
    }
    read = read.model_copy(update={"data": data, "weights": whole})
    return prepare(read, device=choose(device), arithmetic=arithmetic, command=published_command())
