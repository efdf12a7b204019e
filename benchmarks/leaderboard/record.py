"""Base of the leaderboard's records, which are read strictly: a number in quotes is no number."""

import textwrap
from typing import Any, Final, Self

from pydantic import ConfigDict, ValidationError

from fedmjp.config import Config
from fedmjp.errors import ConfigError

SCHEMA_VERSION: Final = 4
SHOWN = 3  # errors of a file that is read


class Record(Config):
    """Base of the leaderboard's records: numbers are numbers."""

    model_config = ConfigDict(allow_inf_nan=False)

    @classmethod
    def read(cls, text: str | bytes) -> Self:
        """Validate JSON strictly: a number in quotes is refused.

        Args:
            text: The JSON of one record.

        Raises:
            ConfigError: On unknown or missing keys, wrong types, values out of range; in one line.
        """
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            details = error.errors(include_url=False)
            # Further faults concern another version's form.
            details = [detail for detail in details if detail["loc"][-1:] == ("schema_version",)] or details
            more = f"; and {len(details) - SHOWN} more" if len(details) > SHOWN else ""
            raise ConfigError("; ".join(cls._explain(dict(detail)) for detail in details[:SHOWN]) + more) from None

    @classmethod
    def _explain(cls, detail: dict[str, Any]) -> str:
        if detail["type"] == "missing":
            return f"key {'.'.join(map(str, detail['loc']))!r} is missing"
        if detail["loc"][-1:] == ("schema_version",):
            return (
                f"schema_version is {_Short(repr(detail['input']))}, this version reads {SCHEMA_VERSION}: take the "
                "entries anew from the leaderboard.json that `fedmjp leaderboard DIR` writes of the trials"
            )
        return super()._explain(detail | {"input": _Short(repr(detail["input"]))})


class _Short(str):
    """A value as it stands in a message: cut where it is long."""

    __slots__ = ()

    def __repr__(self) -> str:
        return textwrap.shorten(self, 60)
