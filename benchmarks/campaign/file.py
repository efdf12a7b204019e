"""Reading a campaign's YAML file: every complaint names the line, and the key that was probably meant."""

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from fedmjp.benchmarks.campaign.spec import Campaign, Grid
from fedmjp.errors import BadInputError, ConfigError, suggestion
from fedmjp.overrides import apply_settings
from fedmjp.yaml_files import read_yaml

Location = tuple[int | str, ...]
GRIDS = "grids"
SHOWN = 10  # things that are wrong
SHORT = reprlib.Repr()  # of values in messages
SHORT.maxstring = 100


def read_campaign(path: Path, overrides: Sequence[str] = ()) -> Campaign:
    """Read and validate.

    Args:
        path: The file.
        overrides: ``key=value`` with dotted keys (``data.pictures=20``, ``grids.0.settings=[a]``); values
            are YAML.

    Raises:
        ConfigError: With file and line, or the override, of the first things that are wrong.
    """
    root, values = read_yaml(path)
    if root is None or not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys and values, such as 'name: my_campaign'")
    values = apply_settings(values, overrides)
    if truths := [*Campaign.find_truths(values), *Grid.find_truths(values.get("shared"), ("shared",))]:
        raise ConfigError("; ".join(_complaint(detail, root, path, overrides) for detail in truths[:SHOWN]))
    try:
        return Campaign.model_validate(values)
    except ValidationError as error:
        details = [dict(detail) for detail in error.errors()]
        # A list is also called too short when all that it holds is wrong.
        first_hand = [detail for detail in details if detail["type"] != "too_short" or len(details) == 1]
        relevant = first_hand or details
        complaints = [_complaint(detail, root, path, overrides) for detail in relevant[:SHOWN]]
        more = [f"and {len(relevant) - SHOWN:,} more"] if len(relevant) > SHOWN else []
        raise ConfigError("; ".join(dict.fromkeys([*complaints, *more]))) from None
    except BadInputError as error:  # an unknown model or attack says so itself
        raise ConfigError(f"{path}: {error}") from None


def _complaint(detail: dict[str, Any], root: yaml.Node, path: Path, overrides: Sequence[str]) -> str:
    location = _place(root, detail["loc"])
    key = ".".join(map(str, location))
    if key and any(_touches(override.partition("=")[0], key) for override in overrides):
        where = "override"
    else:
        where = f"{path}, line {_deepest(root, location)[1]}"
    if detail["type"] == "extra_forbidden":
        fields = _fields(Campaign, detail["loc"][:-1])
        return f"{where}: unknown key {key!r}, {suggestion(str(location[-1]), fields)}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "missing":
        return f"{where}: {key!r} is missing"
    value = SHORT.repr(detail["input"])
    return f"{where}: {key} = {value}: {message}" if key else f"{where}: {message}"


def _touches(override: str, key: str) -> bool:
    return key == override or key.startswith(f"{override}.") or override.startswith(f"{key}.")


def _fields(model: type[BaseModel], location: Location) -> list[str]:
    """List the keys that are known at a place of the file."""
    for step in location:
        if isinstance(step, int):
            continue
        field = model.model_fields.get(step)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    extra = ["shared"] if model is Campaign else []
    return [*model.model_fields, *extra]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        model = _model_in(argument)
        if model:
            return model
    return None


def _place(root: yaml.Node, location: Location) -> Location:
    """Find where a value really stands: a grid takes from ``shared`` what it does not say itself."""
    if location[:1] == (GRIDS,) and len(location) > 2:
        shared: Location = ("shared", *location[2:])
        if _deepest(root, location[:3])[0] < 3 and _deepest(root, shared[:2])[0] == 2:
            return shared
    return location


def _deepest(node: yaml.Node, location: Location) -> tuple[int, int]:
    """Count the steps that can be gone towards a location, and find the line where they end."""
    line = node.start_mark.line + 1
    for depth, step in enumerate(location):
        child = _child(node, step)
        if child is None:
            return depth, line
        line, node = child
    return len(location), line


def _child(node: yaml.Node, step: int | str) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line + 1, node.value[step]
    return None
