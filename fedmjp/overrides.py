"""Settings over nested values, as command lines give them: ``recipe.epochs=20``, ``grids.0.settings=[a]``."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedmjp.errors import ConfigError
from fedmjp.yaml_files import parse_value


def apply_settings(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Lay ``KEY=VALUE`` settings over nested values.

    Args:
        values: Groups of keys in groups and lists; they stay as they are.
        settings: Keys are dotted paths, with places in lists counted from 0; values are YAML. The last one counts.

    Raises:
        ConfigError: If a setting has no "=", is no YAML, or goes through something that is no group of keys.
    """
    result: Any = dict(values)
    for setting in settings:
        key, text = _pair(setting)
        try:
            value = parse_value(text) if text else ""  # YAML's answer would be nothing at all
        except ValueError as error:
            raise ConfigError(f"{setting!r} cannot be applied: {error}") from None
        try:
            result = _replaced(result, key.split("."), value)
        except LookupError as error:
            raise ConfigError(f"{setting!r} cannot be applied: no group of keys, and no list, has {error}") from None
    return dict(result)


def _replaced(values: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy with another value at the end of the path; LookupError where the path ends before."""
    if not path:
        return value
    part, *deeper = path
    if isinstance(values, Mapping):
        return {**values, part: _replaced(values.get(part, {}), deeper, value)}
    if isinstance(values, list) and part.isdigit() and int(part) < len(values):
        place = int(part)
        return [*values[:place], _replaced(values[place], deeper, value), *values[place + 1 :]]
    raise LookupError(part)


def parse_pairs(pairs: Sequence[str], name: str, *, dashes: bool = False) -> dict[str, str]:
    """Read the ``KEY=VALUE`` texts of an option as a mapping.

    Args:
        pairs: The texts.
        name: Of the option, for messages.
        dashes: Whether a dash in a key stands for an underscore.

    Raises:
        ConfigError: If one has no "=" or no key, or a key is given twice.
    """
    values: dict[str, str] = {}
    for pair in pairs:
        key, value = _pair(pair, f"{name} ")
        key = key.replace("-", "_") if dashes else key
        if key in values:
            raise ConfigError(f"{name} {key} is given twice")
        values[key] = value
    return values


def _pair(text: str, name: str = "") -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{name}{text!r} is not of the form KEY=VALUE, such as seed=1")
    return key, value
