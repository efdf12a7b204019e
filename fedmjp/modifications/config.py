"""A server that changes weights, as scenarios and threat models name it."""

from typing import Annotated

from pydantic import BeforeValidator

from fedmjp.modifications import HONEST, SERVERS
from fedmjp.modifications.base import Modification
from fedmjp.named import NamedConfig


class ServerConfig(NamedConfig[Modification]):
    """A server by name, with its options beside the name: ``{name: class_fishing, class: 3}``.

    Text is ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``, as the command line takes it.
    """

    registry = SERVERS

    __hash__ = NamedConfig.__hash__


def _honest(value: object) -> object:
    return None if value in (HONEST, "") else value


Server = Annotated[ServerConfig | None, BeforeValidator(_honest)]
