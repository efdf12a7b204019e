"""`fedmjp benchmark`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from click.core import ParameterSource

from fedmjp.cli.options import (
    ATTACK,
    PICTURES,
    Arithmetic,
    Classes,
    Data,
    Defences,
    Device,
    Fresh,
    ImageSize,
    MaskRatio,
    Model,
    PatchSize,
    WeightsIfAny,
)
from fedmjp.cli.options import output as output_option
from fedmjp.cli.runs import choose, located, of_weights, published_command, require_apart
from fedmjp.config import MAX_COUNT

if TYPE_CHECKING:
    from fedmjp.defences.pipeline import DefenceConfig


def benchmark(
    context: typer.Context,
    battery: Annotated[
        str, typer.Option(help="What is tried, by name: standard.", rich_help_panel=ATTACK)
    ] = "standard",
    data: Data = "bundled",
    pictures: Annotated[
        int, typer.Option(help="Number of pictures.", min=1, max=MAX_COUNT, rich_help_panel=PICTURES)
    ] = 8,
    model: Model = "deit_small",
    weights: WeightsIfAny = None,
    defences: Defences = [],
    mask_ratio: MaskRatio = 0.27,
    image_size: ImageSize = 224,
    patch_size: PatchSize = 16,
    classes: Classes = 1000,
    output: Annotated[Path, output_option("Folder for results.")] = Path("results/benchmark"),
    device: Device = "auto",
    arithmetic: Arithmetic = "float32",
    fresh: Fresh = False,
) -> None:
    """Try a model and its defences with a named battery of attacks, against every kind of server, and report."""
    from fedmjp.benchmarks.campaign.prepare import prepare
    from fedmjp.benchmarks.campaign.spec import Campaign
    from fedmjp.cli.campaign_run import run_prepared

    require_apart(output, data)
    given_options = {key for key in context.params if context.get_parameter_source(key) is ParameterSource.COMMANDLINE}
    stated = of_weights(weights) if weights is not None else {}
    sizes = {"model": model, "image_size": image_size, "patch_size": patch_size, "classes": classes}
    sizes |= {key: value for key, value in stated.items() if key in sizes and key not in given_options}
    name = sizes.pop("model")
    campaign = Campaign.parse(
        {
            "name": f"benchmark-{battery}",
            "title": f"Battery {battery}",
            "question": "What do uploads of this model with these defences give away, and to which server?",
            "data": {"source": located(data), "pictures": pictures},
            "battery": battery,
            "rows": [{"models": [name], "defences": [_pipeline(defences)], "mask_ratios": [mask_ratio]}],
            "weights": {} if weights is None else {name: weights},
            "metrics": ["mse", "psnr", "ssim"],
            **sizes,
        }
    )
    prepared = prepare(campaign, device=choose(device), arithmetic=arithmetic, command=published_command())
    run_prepared(prepared, output, fresh=fresh)


def _pipeline(defences: list[str]) -> "list[DefenceConfig]":
    """Read the defences as one pipeline; the word ``none`` stands for none."""
    from fedmjp.defences.pipeline import DefenceConfig

    return [DefenceConfig.parse(text) for text in defences if text != "none"]
