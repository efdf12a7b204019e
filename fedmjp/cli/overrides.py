"""Nested configurations from YAML files."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmjp.config import Checkpoint
from fedmjp.errors import ConfigError
from fedmjp.yaml_files import read_yaml

# Options would silently take the place of a group that is none.
GROUPS = ("model", "recipe", "puzzle", "partition")


def read_values(path: Path | None) -> dict[str, Any]:
    """Read the values of a YAML file; none without a file.

    Args:
        path: Of the file.

    Raises:
        ConfigError: If it cannot be read, or holds no mapping.
    """
    if path is None:
        return {}
    _, values = read_yaml(path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys such as model, puzzle and recipe")
    for name in GROUPS:
        if not isinstance(values.get(name, {}), dict):
            value = values[name]
            raise ConfigError(f"{path}: {name} = {value!r} is no group of keys; write its keys below it, indented")
    return values


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay values over others, group by group.

    Args:
        values: Nested.
        over: What counts where both have a value.
    """
    result = copy.deepcopy(dict(values))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def with_checkpoint(model: Any) -> Any:
    """Read the ``weights`` of a model that may be a file's name; CheckpointError if there is none.

    What is no such thing is given back as it is: reading the configuration tells what is wrong with it.

    Args:
        model: Values; anything that is no such thing is returned as it is.
    """
    if not isinstance(model, Mapping) or not isinstance(model.get("weights"), str):
        return model
    return {**model, "weights": Checkpoint.of(model["weights"]).model_dump()}
