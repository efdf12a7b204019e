"""YAML from anybody: plain text, numbers, lists and groups of keys; whatever else it holds is refused in one line."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from fedmjp.errors import ConfigError
from fedmjp.files import read_file
from fedmjp.texts import UNPRINTABLE

LARGEST = 1_000_000  # bytes: fifty thousand names of pictures fit
MOST_VALUES = 100_000  # with those that aliases repeat
DEEPEST = 50
LONGEST_NUMBER = 100  # characters
OLD_NUMBER = re.compile(
    r"[+-]?(?P<base60>[\d_]+(:[\d_.]+)+)|[+-]?(?P<octal>0[0-7_]+)"
)  # of YAML 1.1, and of nobody else
KINDS = frozenset({"str", "int", "float", "bool", "null", "seq", "map"})
STANDARD = "tag:yaml.org,2002:"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _RefusedError(Exception):
    """A file with content that no configuration needs; the message says where and what."""


def read_yaml(path: Path) -> tuple[yaml.Node | None, Any]:
    """Read a file.

    Args:
        path: Of the file.

    Returns:
        The nodes, by which messages find lines, and the values; None and None of an empty file.

    Raises:
        ConfigError: If it cannot be read, is no YAML, or holds what is no plain value, in one line.
    """
    try:
        text = read_file(path, LARGEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return _parse(text)
    except _RefusedError as error:
        raise ConfigError(f"{path}, {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def parse_value(text: str) -> Any:
    """Read a value as the command line gives it.

    Args:
        text: In YAML.

    Raises:
        ValueError: If it is no plain value.
    """
    try:
        return _parse(text)[1]
    except _RefusedError as error:
        raise ValueError(str(error).partition(": ")[2]) from None  # the line is the only one
    except yaml.YAMLError:
        raise ValueError(f"{text!r} is no number, word or list") from None


def _parse(text: str) -> tuple[yaml.Node | None, Any]:
    depth = 0
    for event in yaml.parse(text, LOADER):  # one by one: a deep file is not read to its end
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise _RefusedError(f"{_line(event)}: more than {DEEPEST} values stand in each other")
    loader = LOADER(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None, None
        _Measure().add(root)
        return root, loader.construct_document(root)
    finally:
        loader.dispose()


class _Measure:
    """A count of values as they are when aliases are followed; nodes that stand at several places are visited once."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int] | None] = {}
        self._constructor = SafeConstructor()

    def add(self, node: yaml.Node) -> tuple[int, int]:
        """Count the values in a node, and how deep they stand in each other.

        Args:
            node: With all that is in it.
        """
        if id(node) in self._sizes:
            size = self._sizes[id(node)]
            if size is None:
                raise _RefusedError(f"{_line(node)}: an alias contains itself")
            return size
        self._sizes[id(node)] = None
        _require_plain(node, self._constructor)
        sizes = [self.add(child) for child in _children(node)]
        count, depth = 1 + sum(count for count, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
        if count > MOST_VALUES or depth > DEEPEST:
            raise _RefusedError(
                f"{_line(node)}: with aliases, {count:,} values {depth} deep; at most {MOST_VALUES:,} and {DEEPEST}"
            )
        self._sizes[id(node)] = count, depth
        return count, depth


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        if key.tag == f"{STANDARD}merge":
            yield value
            continue
        if not isinstance(key, yaml.ScalarNode) or key.tag != f"{STANDARD}str":
            text = key.value[:40] if isinstance(key, yaml.ScalarNode) else "of several values"
            raise _RefusedError(f"{_line(key)}: the key {text} is no text; keys are names such as seeds")
        # YAML readers keep the last of two equal keys without a word.
        if key.value in lines:
            raise _RefusedError(f"{_line(key)}: key {key.value!r} was given before, in line {lines[key.value]}")
        lines[key.value] = key.start_mark.line + 1
        yield key
        yield value


def _require_plain(node: yaml.Node, constructor: SafeConstructor) -> None:
    kind = node.tag.removeprefix(STANDARD)
    if kind not in KINDS:
        raise _RefusedError(f"{_line(node)}: {kind!r} is no text, number, list or group of keys; put text in quotes")
    if not isinstance(node, yaml.ScalarNode):
        return
    if kind in ("int", "float") and len(node.value) > LONGEST_NUMBER:
        raise _RefusedError(f"{_line(node)}: a number of {len(node.value):,} characters")
    if kind == "str" and UNPRINTABLE.search(node.value):
        raise _RefusedError(f"{_line(node)}: text with characters that cannot be printed")
    try:
        value = constructor.construct_object(node)
    except (ValueError, LookupError, yaml.YAMLError):
        raise _RefusedError(f"{_line(node)}: {node.value[:60]!r} is no value of the kind {kind!r}") from None
    if kind in ("int", "float") and (old := OLD_NUMBER.fullmatch(node.value)):
        base = "to the base 60" if old["base60"] else "to the base 8"
        raise _RefusedError(
            f"{_line(node)}: YAML reads {node.value} as {value}, {base}: write {value}, or {node.value!r} in quotes"
        )


def _line(place: Any) -> str:
    return f"line {place.start_mark.line + 1}"
