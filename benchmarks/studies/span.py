"""What the studies of ``mjp_span`` share: pictures that nothing was developed on, and rows that outlive a kill."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

from fedmjp import provenance
from fedmjp.attacks.held_out import developed_on, seen_before
from fedmjp.benchmarks.scripts import keep_table
from fedmjp.config import Checkpoint, ModelConfig
from fedmjp.data.pictures import PictureSource
from fedmjp.data.selection import Selection, open_source, select
from fedmjp.errors import ConfigError
from fedmjp.models.build import build_vit
from fedmjp.scenario import Scenario

NAMED = ("ratio", "picture")
DIGITS = 16  # of the digest of the code that made a row
ROWS = "rows.csv"
Data = Annotated[str, typer.Option(help="A picture source.", metavar="FOLDER")]
Output = Annotated[Path, typer.Option(help=f"Folder of the study; its {ROWS} is added to.", metavar="DIR")]
Ratios = Annotated[str, typer.Option(help="Mask ratios, comma-separated.")]
Model = Annotated[str, typer.Option(help="KEY=VALUE,... of the model; weights=FILE for trained ones.")]


def undeveloped(source: PictureSource, count: int, *, development: bool) -> Selection:
    """Pictures that attacks have not seen before; or, if asked for, those that they were developed on alone."""
    return select(
        source, count, seed=0, leave_out=(lambda name: not developed_on(name)) if development else seen_before
    )


def keep_rows_of(
    output: Path,
    measure: Callable[..., dict[str, Any]],
    *,
    options: Mapping[str, Any],
    model: str,
    data: str,
    count: int,
    ratios: str,
    after: int = 0,
    development: bool = False,
) -> pd.DataFrame:
    """Measure a row per picture and mask ratio, each appended when it is there, and keep all of them as a study.

    Rows that the folder has of the same code and options are not measured again, others are left out.

    Args:
        output: Folder of the study.
        measure: Gives the figures of one upload, an exchange and its network, with the options as keywords.
        options: Of ``measure``, with JSON-ready values.
        model: Comma-separated KEY=VALUE pairs of ``ModelConfig``; ``weights`` names a file.
        data: A picture source.
        count: Of the pictures.
        ratios: Comma-separated mask ratios.
        after: How many of the draw are passed over first.
        development: Whether to take the pictures that the attack was developed on.

    Returns:
        The rows.

    Raises:
        ConfigError: If model or ratios cannot be read.
    """
    torch.set_num_threads(1)
    wanted, given = _read_ratios(ratios), _read_options(model)
    weights = given.pop("weights", None)
    trained = {} if weights is None else {"weights": Checkpoint.of(weights)}
    config = ModelConfig.parse({"name": "deit_small", "unknown_embedding": True, **given, **trained})
    sizes = (f"{key}={value}" for key, value in sorted(given.items()) if key != "name")
    label = {
        "code": provenance.code_digest()[:DIGITS],
        "model": " ".join([config.name, *sizes]),
        "weights": "untrained" if weights is None else "/".join(Path(weights).parts[-2:]),
        **options,
    }
    source = open_source(data, size=config.image_size, classes=config.classes)
    chosen = undeveloped(source, after + count, development=development)
    entries = chosen.entries[after:]
    network = build_vit(config)
    path = output / ROWS
    done = set(_rows_of(path, label)[list(NAMED)].itertuples(index=False, name=None)) if path.exists() else set()
    output.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        for ratio in wanted:
            if (ratio, entry.name) not in done:
                scenario = Scenario.parse({"model": config, "defences": f"mjp:mask_ratio={ratio}"})
                exchange = scenario.exchange([chosen.load(entry)], model=network)
                row = {**label, "ratio": ratio, "picture": entry.name, **measure(exchange, network, **options)}
                pd.DataFrame([row]).to_csv(path, mode="a", header=not path.exists(), index=False)
    rows = _rows_of(path, label)
    rows = rows[rows["picture"].isin([entry.name for entry in entries]) & rows["ratio"].isin(wanted)]
    keep_table(output, rows, {"pictures": count, "after": after, "mask_ratios": wanted})
    return rows


def _rows_of(path: Path, label: Mapping[str, Any]) -> pd.DataFrame:
    """Those of a file whose columns say what ``label`` says."""
    texts = [name for name, value in label.items() if isinstance(value, str)]
    rows = pd.read_csv(path, dtype=dict.fromkeys([*texts, "picture"], str), float_precision="round_trip")
    alike = rows.reindex(columns=list(label)).eq(pd.Series(label, dtype=object)).all(axis=1)
    return rows[alike]


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
