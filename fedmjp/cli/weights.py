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
    from fedmjp.models.known import known_checkpoints, searched
    from fedmjp.zoo import PREFIX, TASK, ZOO

    console = wide_console()
    for known in known_checkpoints():
        path = known.find()
        fits = f", for {known.model} with an unknown embedding" if known.unknown_embedding else ""
        tell(console, f"{known.name:<{NAME_WIDTH}}{'here' if path else 'not here'}{fits}", f"  from {known.source}")
        if known.release:
            tell(console, f"  or its release, {known.release}")
        if path:
            _tell_file(path)
    tell(console, f"\nOurs, on {TASK}:")
    for ours in ZOO.values():
        trained = f"{ours.architecture}, {ours.training}, {ours.defence}, patches of {ours.patch_size}"
        where = "here" if ours.find() else "not here"
        tell(console, f"{PREFIX + ours.name:<{NAME_WIDTH}}{where}, Top-1 {ours.top1} %", f"  {trained}")
        tell(console, f"  sha256 {ours.sha256}")
    tell(console, f"{PREFIX}NAME stands wherever a file of weights is taken; its digest is checked.")
    tell(console, "\nNames are those of the models that weights fit. Looked in:", *(f"- {text}" for text in searched()))
    tell(console, "`fedmjp weights fetch NAME` downloads one, or says how to get it by hand.")


@weights.command(epilog=examples("fedmjp weights fetch deit_small"))
def fetch(name: Annotated[str, typer.Argument(help="As `fedmjp weights` lists it, or timm:NAME.")]) -> None:
    """Find published weights on this machine, or download them."""
    from fedmjp.models.known import known
    from fedmjp.zoo import PREFIX

    _tell_file(Path(name) if name.startswith(PREFIX) else known(name).fetch())


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
    from fedmjp.models.known import checked

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
    checkpoint = checked(file)
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
    from fedmjp.models.known import checked

    checkpoint = checked(path)
    tell(wide_console(), f"  file {checkpoint.path}", f"  sha256 {checkpoint.sha256}")
