"""Nested configurations from YAML files, and settings over them from the command line: ``recipe.epochs=20``."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedmjp.config import Checkpoint
from fedmjp.errors import ConfigError

DEFENCE_HELP = "NAME or NAME:KEY=VALUE,KEY=VALUE, see `fedmjp list defences`; several act in the order given."


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


def overridden(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Lay ``KEY=VALUE`` settings over nested values; keys are dotted paths, values YAML scalars or lists.

    Raises:
        ConfigError: If a setting has no "=", or goes through something that is no mapping.
    """
    result = copy.deepcopy(dict(values))
    for setting in settings:
        key, text = _pair(setting, "is not KEY=VALUE, such as recipe.epochs=20")
        *path, last = key.split(".")
        target: Any = result
        for part in path:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{setting!r}: {part} is no group of keys")
        target[last] = _parsed(setting, text)
    return result


def parse_pairs(pairs: Sequence[str], name: str, *, dashes: bool = False) -> dict[str, str]:
    """``KEY=VALUE`` texts of an option as a mapping; with ``dashes`` a dash in a key stands for an underscore.

    Raises:
        ConfigError: If one has no "=" or no key, or a key is given twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, value = _pair(pair, "is not of the form KEY=VALUE", f"{name} ")
        key = key.replace("-", "_") if dashes else key
        if key in found:
            raise ConfigError(f"{name} {key} is given twice")
        found[key] = value
    return found


def _pair(text: str, complaint: str, name: str = "") -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{name}{text!r} {complaint}")
    return key, value


def _parsed(setting: str, text: str) -> Any:
    if not text:
        return ""  # YAML's answer would be nothing at all
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{setting!r}: {text!r} is no number, word or list") from None


def with_checkpoint(model: Any) -> Any:
    """The values of a model whose ``weights`` may be a file's name; CheckpointError if there is no such file.

    What is no such thing is given back as it is: reading the configuration tells what is wrong with it.
    """
    if not isinstance(model, Mapping) or not isinstance(model.get("weights"), str):
        return model
    return {**model, "weights": Checkpoint.of(model["weights"]).model_dump()}
