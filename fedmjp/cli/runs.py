"""What commands have in common: values of runs from options and files, the device, what a manifest says of it all."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedmjp.cli.console import tell
from fedmjp.cli.overrides import merged, with_checkpoint
from fedmjp.overrides import apply_settings

if TYPE_CHECKING:
    from rich.console import Console

    from fedmjp.evaluation.runs import TrainedModel
    from fedmjp.training.central import Pictures


# Warm-up of the paper's recipe: 20 of 300 epochs.
WARMUP, EPOCHS = 20, 300
# What is known of a model beside its name.
OF_MODEL = ("image_size", "patch_size", "classes", "index_embedding")
# Where results go says nothing elsewhere, and a database's URL may hold a password.
LEFT_OUT = ("--output", "--database")


def choose(device: str) -> Literal["cpu", "cuda"]:
    """Resolve "auto" to CUDA where there is any, else the CPU; check an explicit choice.

    Args:
        device: auto, cpu or cuda.

    Raises:
        DeviceError: If there is no such device on this machine.
    """
    import torch

    from fedmjp.errors import DeviceError

    available = torch.cuda.is_available()
    if device not in ("auto", "cpu", "cuda"):
        raise DeviceError(f"--device {device!r} is not one of auto, cpu, cuda")
    if device == "cuda" and not available:
        raise DeviceError("--device cuda was asked for, but torch sees no CUDA device; use --device cpu")
    return "cuda" if available and device != "cpu" else "cpu"


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out options that nobody named.

    Args:
        options: By name.
    """
    return {name: value for name, value in options.items() if value not in (None, [], {})}


def values_of(
    defaults: Mapping[str, Any],
    file: Mapping[str, Any],
    row: str | None,
    options: Mapping[str, Any],
    settings: Sequence[str] | None,
) -> dict[str, Any]:
    """Lay the values of a training over each other: defaults, file, row of the paper, options, settings.

    Args:
        defaults: Of every run.
        file: Of a YAML file.
        row: Name of a row of the paper's tables.
        options: Of the command.
        settings: KEY=VALUE each.
    """
    from fedmjp.training.rows import row as row_of

    values = dict(defaults)
    for layer in (file, row_of(row).values if row is not None else {}, options):
        values = merged(values, layer)
    return apply_settings(values, settings or [])


def with_warm_up(values: Mapping[str, Any], epochs: object) -> dict[str, Any]:
    """Add the paper's share of warm-up epochs, unless the values state their own.

    Args:
        values: Of a training.
        epochs: Of the run; warm-up takes no more.
    """
    if not isinstance(epochs, int):
        return dict(values)  # told when it is read
    share = min(WARMUP, max(0, epochs) * WARMUP // EPOCHS)
    return merged({"recipe": {"warmup_epochs": share}}, values)


def with_files(values: dict[str, Any]) -> dict[str, Any]:
    """Replace names of files by names that mean the same in every process, and "auto" by the device.

    Args:
        values: Of a training.
    """
    from fedmjp.arithmetic import require_arithmetic

    data, device, recipe = (
        values.get("data", "bundled"),
        choose(str(values.get("device", "auto"))),
        values.get("recipe"),
    )
    if isinstance(recipe, Mapping) and recipe.get("precision") == "tf32":
        require_arithmetic("tf32", device)
    return {
        **values,
        "device": device,
        "data": located(data) if isinstance(data, str) else data,
        "model": with_checkpoint(values["model"]),
    }


def located(data: str) -> str:
    """Return a source of pictures under a name that means the same in every working directory.

    Args:
        data: "bundled", hub:OWNER/NAME or a folder.

    Raises:
        BadInputError: If it is empty.
    """
    from fedmjp.errors import BadInputError

    if not data:
        raise BadInputError("the source of pictures is empty: name 'bundled' or a folder")
    return data if data == "bundled" or data.startswith("hub:") else str(Path(data).absolute())


def require_apart(output: Path, source: str) -> None:
    """Refuse to write results among the pictures or uploads that they are made of.

    Args:
        output: Folder for results.
        source: Pictures or uploads.

    Raises:
        OutputError: If the folder lies among them.
    """
    from fedmjp.errors import OutputError

    if Path(located(source)).is_absolute() and output.resolve().is_relative_to(Path(source).resolve()):
        raise OutputError(f"--output {output} lies in {source}, which is read; name another folder")


def single_batches(options: Mapping[str, Any]) -> dict[str, Any]:
    """Build the batch fields of a scenario from equally named command options.

    Args:
        options: Of the command.
    """
    from fedmjp.arithmetic import require_arithmetic
    from fedmjp.config import ModelConfig
    from fedmjp.scenario import Scenario

    steps, device = options["local_steps"], choose(options["device"])
    require_arithmetic(options["arithmetic"], device)
    network = {key: value for key, value in options.items() if key in ModelConfig.model_fields}
    return {
        **{key: value for key, value in options.items() if key in Scenario.model_fields},
        "model": {**network, "name": options["model"]},
        "update": "gradient" if steps is None else "delta",
        "local_steps": 1 if steps is None else steps,
        "device": device,
        "data": located(options["data"]),
    }


def of_weights(file: str) -> dict[str, Any]:
    """Collect the options of a model with trained weights, as far as the zoo or the run beside them knows these.

    Args:
        file: A path, or zoo:NAME.

    Raises:
        BadInputError: If there are no such weights, or they cannot be read.
    """
    from fedmjp.config import Checkpoint
    from fedmjp.models.checkpoints import holds_unknown_embedding
    from fedmjp.training.run_folder import TrainingFolder
    from fedmjp.zoo import PREFIX, zoo_model

    checkpoint, run = Checkpoint.of(file), TrainingFolder(Path(file).parent)
    facts: dict[str, Any] = {}
    if file.startswith(PREFIX):
        facts = zoo_model(file).model
    elif run.weights.name == Path(file).name and run.holds_run():
        facts = run.config().network.model_dump()
    return {
        **({"model": facts["name"]} if facts else {}),
        **{key: facts[key] for key in OF_MODEL if key in facts},
        "unknown_embedding": holds_unknown_embedding(checkpoint),
        "weights": checkpoint.model_dump(),
    }


def open_trained(folders: Sequence[Path], weights: Path | None, model: Sequence[str]) -> "list[TrainedModel]":
    """Open the models that a command names: folders of training runs, or one file of weights.

    Args:
        folders: Of training runs.
        weights: A file instead.
        model: KEY=VALUE each, what the file is of.

    Raises:
        BadInputError: If both are named, or none.
    """
    from fedmjp.config import Checkpoint, ModelConfig
    from fedmjp.errors import BadInputError
    from fedmjp.evaluation.runs import TrainedModel, open_run
    from fedmjp.overrides import apply_settings

    if bool(folders) == bool(weights or model) or bool(weights) != bool(model):
        raise BadInputError("name folders of training runs, or instead a file: --weights FILE --model name=NAME")
    if weights is None:
        return [open_run(folder) for folder in folders]
    values = apply_settings({"weights": Checkpoint.of(weights).model_dump()}, model)
    return [TrainedModel(weights.name, ModelConfig.parse(values), None)]


def write_manifest(path: Path, kind: str, **about: Any) -> None:
    """Write a manifest of results: the command, this process's environment, and further facts.

    Args:
        path: Of the manifest.
        kind: Of results.
        about: Further facts.
    """
    from fedmjp import provenance
    from fedmjp.benchmarks.folder.output import write_json

    write_json(path, {"kind": kind, "command": published_command(), **about, **provenance.environment()})


def published_command() -> str:
    """Return the command line of this process without this machine's folders, as results show it."""
    words: list[str] = []
    arguments = iter(sys.argv[1:])
    for word in arguments:
        name, equals, value = word.partition("=")
        if name in LEFT_OUT:
            if not equals:
                next(arguments, None)
        elif equals and Path(value).is_absolute():
            words.append(f"{name}={Path(value).name}")
        else:
            words.append(Path(word).name if Path(word).is_absolute() else word)
    return shlex.join(["fedmjp", *words])


def tell_held_out(pictures: "Pictures", trained_on: str, console: "Console") -> None:
    """Warn where Top-1 is measured on the pictures of the training.

    Args:
        pictures: Of the training.
        trained_on: The end of a sentence, who was trained on them.
        console: The terminal.
    """
    if not pictures.held_out:
        caveat = f"has no validation split: Top-1 is measured on the pictures that {trained_on}"
        tell(console, f"{pictures.train.name} {caveat}.")
