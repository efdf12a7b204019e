"""What the studies of ``mjp_span`` share: pictures that nothing was developed on, and a file that rows are added to."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from attacks.held_out import developed_on, seen_before
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.data.pictures import PictureSource
from fedmjp.data.selection import Selection, open_source, select
from fedmjp.errors import ConfigError
from fedmjp.exchange import Exchange
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.scenario import Scenario

KEY = ["model", "weights", "ratio", "picture"]
Data = Annotated[str, typer.Option(help="A picture source.")]
Rows = Annotated[Path, typer.Option(help="CSV to append to.")]
Ratios = Annotated[str, typer.Option(help="Mask ratios, comma-separated.")]
Model = Annotated[str, typer.Option(help="KEY=VALUE,... of the model; weights=FILE for trained ones.")]


def undeveloped(source: PictureSource, count: int, *, development: bool) -> Selection:
    """Pictures that attacks have not seen before; or, if asked for, those that they were developed on alone."""
    return select(
        source, count, seed=0, leave_out=(lambda name: not developed_on(name)) if development else seen_before
    )


def rows_with(
    path: Path,
    measure: Callable[[Exchange, VitClassifier], dict[str, Any]],
    *,
    model: str,
    data: str,
    count: int,
    ratios: str,
    development: bool = False,
) -> pd.DataFrame:
    """All rows of a file, after one per picture and mask ratio that it lacks was measured and appended.

    Args:
        path: CSV.
        measure: Gives the figures of one upload, with the network that it is of.
        model: Comma-separated KEY=VALUE pairs of ``ModelConfig``; ``weights`` names a file.
        data: A picture source.
        count: Of the pictures.
        ratios: Comma-separated mask ratios.
        development: Whether to take the pictures that the attack was developed on.

    Raises:
        ConfigError: If model or ratios cannot be read.
    """
    torch.set_num_threads(1)
    wanted, given = _read_ratios(ratios), _read_options(model)
    weights = given.pop("weights", None)
    trained = {} if weights is None else {"weights": Checkpoint.of(weights)}
    config = ModelConfig.parse({"name": "deit_small", "unknown_embedding": True, **given, **trained})
    options = (f"{key}={value}" for key, value in sorted(given.items()) if key != "name")
    label = {
        "model": " ".join([config.name, *options]),
        "weights": "untrained" if weights is None else "/".join(Path(weights).parts[-2:]),
    }
    chosen = undeveloped(
        open_source(data, size=config.image_size, classes=config.classes), count, development=development
    )
    network = build_vit(config)
    done = set(_read(path)[KEY].itertuples(index=False, name=None)) if path.exists() else set()
    path.parent.mkdir(parents=True, exist_ok=True)
    for entry in chosen.entries:
        for ratio in wanted:
            key = {**label, "ratio": ratio, "picture": entry.name}
            if tuple(key.values()) not in done:
                scenario = Scenario.parse({"model": config, "defences": f"mjp:mask_ratio={ratio}"})
                row = key | measure(scenario.exchange([chosen.load(entry)], model=network), network)
                pd.DataFrame([row]).to_csv(path, mode="a", header=not path.exists(), index=False)
    return _read(path)


def _read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=dict.fromkeys(("model", "weights", "picture"), str), float_precision="round_trip")


def _read_options(text: str) -> dict[str, str]:
    options = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--model: {pair!r} is not KEY=VALUE, such as name=deit_tiny")
        options[key] = value
    return options


def _read_ratios(text: str) -> list[float]:
    try:
        ratios = [float(part) for part in text.split(",")]
    except ValueError:
        ratios = [-1.0]
    if not all(0 <= ratio <= 1 for ratio in ratios):
        raise ConfigError(f"--ratios {text!r} are no mask ratios: give numbers from 0 to 1, such as 0.09,0.27")
    return ratios
