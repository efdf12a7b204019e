"""Configurations that name a thing, with options beside the name: defences, and servers that change weights."""

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, Self

from pydantic import model_serializer, model_validator
from typing_extensions import TypeVar

from fedmjp.config import Config
from fedmjp.errors import BadInputError, UnknownNameError
from fedmjp.registry import Registry


class Optioned(Protocol):
    """A thing that is built from a name and options."""

    options: Any


T = TypeVar("T", bound=Optioned)


class NamedConfig(Config, Generic[T]):
    """A thing by name, with its options beside the name: ``{name: gaussian, noise: 0.001}``.

    Text is ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``, as the command line takes it. ``registry`` knows the names;
    options in ``following`` are kept even where they say what is the default.
    """

    name: str
    options: Mapping[str, Any] = {}

    registry: ClassVar[Registry[Any]]
    following: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, str):
            return _parse(value)
        if isinstance(value, Mapping) and not isinstance(value.get("options"), Mapping):
            values = dict(value)
            return {"name": values.pop("name", None), "options": values}
        return value

    @model_validator(mode="after")
    def _require_buildable(self) -> Self:
        try:
            thing = self.build()
        except UnknownNameError as error:
            raise ValueError(str(error)) from None  # so that a campaign's file can say where it stands
        except BadInputError as error:
            raise ValueError(f"{self.registry.kind} {self.name}: {error}") from None
        # Options as they were understood, so that text from a command line equals numbers from a file; without those
        # that say what is the default anyway, but for those that a campaign or a run would else set.
        values, defaults = (item.options.model_dump(mode="json") for item in (thing, type(thing)()))
        keys = sorted(key for key in self.options if key in self.following or values[key] != defaults[key])
        object.__setattr__(self, "options", {key: values[key] for key in keys})
        return self

    @model_serializer
    def _beside_the_name(self) -> dict[str, Any]:
        return {"name": self.name, **self.options}

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def text(self) -> str:
        """Write it as the command line takes it, with all options that were given."""
        return format_options(self.name, self.options)

    def build(self) -> T:
        """Build the thing itself, anew."""
        thing: T = self.registry.get(self.name)(self.options)
        return thing


def format_options(name: str, options: Mapping[str, Any]) -> str:
    """Write a name and options as the command line takes them.

    Args:
        name: Of a defence or server.
        options: By key; lists are joined by plus signs.
    """
    values = {key: "+".join(map(str, value)) if isinstance(value, list) else value for key, value in options.items()}
    pairs = ",".join(f"{key}={value}" for key, value in values.items())
    return f"{name}:{pairs}" if pairs else name


def _parse(text: str) -> dict[str, Any]:
    """Read ``NAME:KEY=VALUE,KEY=VALUE`` as values."""
    name, colon, settings = text.strip().partition(":")
    options: dict[str, Any] = {}
    for pair in settings.split(",") if colon else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ValueError(f"{text!r}: {pair!r} is not KEY=VALUE; write NAME or NAME:KEY=VALUE,KEY=VALUE")
        if key in options:
            raise ValueError(f"{text!r}: {key} is given twice")
        options[key.replace("-", "_")] = value
    return {"name": name, "options": options}
