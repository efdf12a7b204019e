"""`fedmjp weights`, `fedmjp weights verify FILE` and `fedmjp weights fetch NAME`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedmjp.cli.console import tell, wide_console
from fedmjp.cli.options import MODEL, Classes, DefencesIfAny, ImageSize, Model, examples

weights = typer.Typer(
    invoke_without_command=True, help="List published checkpoints, check a file of weights, or download one."
)

NAME_WIDTH = 28
SELDOM = "Of a model that was trained with it."


@weights.callback()
def table(context: typer.Context) -> None:
    """List published checkpoints, and weights of ours, and whether they are on this machine."""
    if context.invoked_subcommand is not None:
        return
    from fedmjp.models.known import known_checkpoints, list_places
    from fedmjp.zoo import PREFIX, TASK, ZOO

    console = wide_console()
    for checkpoint in known_checkpoints():
        path = checkpoint.find()
        fits = f", for {checkpoint.model} with an unknown embedding" if checkpoint.unknown_embedding else ""
        tell(
            console,
            f"{checkpoint.name:<{NAME_WIDTH}}{'here' if path else 'not here'}{fits}",
            f"  from {checkpoint.source}",
        )
        if checkpoint.release:
            tell(console, f"  or its release, {checkpoint.release}")
        if path:
            _tell_file(path)
    tell(console, f"\nOurs, on {TASK}:")
    for zoo_entry in ZOO.values():
        trained = (
            f"{zoo_entry.architecture}, {zoo_entry.training}, {zoo_entry.defence}, patches of {zoo_entry.patch_size}"
        )
        where = "here" if zoo_entry.find() else "not here"
        tell(console, f"{PREFIX + zoo_entry.name:<{NAME_WIDTH}}{where}, Top-1 {zoo_entry.top1} %", f"  {trained}")
        tell(console, f"  sha256 {zoo_entry.sha256}")
    tell(console, f"{PREFIX}NAME stands wherever a file of weights is taken; its digest is checked.")
    tell(
        console,
        "\nNames are those of the models that weights fit. Looked in:",
        *(f"- {text}" for text in list_places()),
    )
    tell(console, "`fedmjp weights fetch NAME` downloads one, or says how to get it by hand.")


@weights.command(epilog=examples("fedmjp weights fetch deit_small"))
def fetch(name: Annotated[str, typer.Argument(help="As `fedmjp weights` lists it, or timm:NAME.")]) -> None:
    """Find published weights on this machine, or download them."""
    from fedmjp.models.known import find_checkpoint
    from fedmjp.zoo import PREFIX

    _tell_file(Path(name) if name.startswith(PREFIX) else find_checkpoint(name).fetch())


@weights.command(epilog=examples("fedmjp weights verify FILE --model deit_small"))
def verify(
    file: Annotated[Path, typer.Argument(help="Weights: .safetensors, .pth, .pt or .bin.", show_default=False)],
    model: Model,
    defences: DefencesIfAny = None,
    image_size: ImageSize = 224,
    patch_size: Annotated[
        int | None,
        typer.Option(help="Pixels per side of a patch.", show_default="the model's", min=1, rich_help_panel=MODEL),
    ] = None,
    classes: Classes = 1000,
    localisation: Annotated[
        Literal["none", "pca", "linear", "nonlinear"], typer.Option(help=SELDOM, rich_help_panel=MODEL)
    ] = "none",
    localisation_layers: Annotated[
        int, typer.Option(help="Of the nonlinear one.", min=2, max=3, rich_help_panel=MODEL)
    ] = 3,
    index_embedding: Annotated[bool, typer.Option("--index-embedding", help=SELDOM, rich_help_panel=MODEL)] = False,
) -> None:
    """Load a file into a model, strictly, and tell what it is."""
    from fedmjp.config import ModelConfig
    from fedmjp.defences.pipeline import read_pipeline
    from fedmjp.models.architectures import architecture
    from fedmjp.models.build import build
    from fedmjp.models.checkpoints import load_checkpoint
    from fedmjp.models.known import open_checkpoint

    design = architecture(model)
    config = ModelConfig.parse(
        {
            "name": model,
            "image_size": image_size,
            "patch_size": patch_size or design.patch_size or 16,
            "classes": classes,
            "localisation": localisation,
            "localisation_layers": localisation_layers,
            "index_embedding": index_embedding,
        }
    )
    checkpoint = open_checkpoint(file)
    pipeline = read_pipeline(defences or [])
    built = build(pipeline.change_model(config))
    layout = load_checkpoint(built, checkpoint, ignored=design.ignored_weights)
    parameters = sum(parameter.numel() for parameter in built.parameters())
    tell(
        wide_console(),
        f"{file} fits {model} with defence {pipeline.label}",
        f"layout      {layout}",
        f"parameters  {parameters:,}",
        f"sha256      {checkpoint.sha256}",
    )


def _tell_file(path: Path) -> None:
    from fedmjp.models.known import open_checkpoint

    checkpoint = open_checkpoint(path)
    tell(wide_console(), f"  file {checkpoint.path}", f"  sha256 {checkpoint.sha256}")
