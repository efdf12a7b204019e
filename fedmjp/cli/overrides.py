"""Nested configurations from YAML files."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fedmjp.config import Checkpoint
from fedmjp.errors import ConfigError

# Options would silently take the place of a group that is none.
GROUPS = ("model", "recipe", "puzzle", "partition")


def read_values(path: Path | None) -> dict[str, Any]:
    """The values of a YAML file; none without a file.

    Raises:
        ConfigError: If it cannot be read, or holds no mapping.
    """
    if path is None:
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys such as model, puzzle and recipe")
    for key in _keys(values):
        if not isinstance(key, str):
            raise ConfigError(f"{path}: the key {key!r} is no text; keys are names such as model, puzzle and recipe")
    for name in GROUPS:
        if not isinstance(values.get(name, {}), dict):
            value = values[name]
            raise ConfigError(f"{path}: {name} = {value!r} is no group of keys; write its keys below it, indented")
    return values


def _keys(values: Mapping[Any, Any]) -> Iterator[Any]:
    for key, value in values.items():
        yield key
        if isinstance(value, Mapping):
            yield from _keys(value)


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with others laid over them."""
    result = copy.deepcopy(dict(values))
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def with_checkpoint(model: Any) -> Any:
    """The values of a model whose ``weights`` may be a file's name; CheckpointError if there is no such file.

    What is no such thing is given back as it is: reading the configuration tells what is wrong with it.
    """
    if not isinstance(model, Mapping) or not isinstance(model.get("weights"), str):
        return model
    return {**model, "weights": Checkpoint.of(model["weights"]).model_dump()}
