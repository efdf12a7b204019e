"""Figures that papers report, as printed there."""

from collections.abc import Iterable
from importlib import resources

from pydantic import TypeAdapter

from benchmarks.leaderboard.entries import Reported
from fedmjp.errors import UnknownNameError

_ROWS = TypeAdapter(tuple[Reported, ...])


def reported_in(names: Iterable[str]) -> tuple[Reported, ...]:
    """The rows of tables, by name (``mjp_table5``).

    Raises:
        UnknownNameError: If there is no such table.
    """
    tables = {
        file.name.removesuffix(".json"): file for file in resources.files(__package__).joinpath("reported").iterdir()
    }
    rows: list[Reported] = []
    for name in names:
        if name not in tables:
            raise UnknownNameError("reported table", name, tables)
        rows += _ROWS.validate_json(tables[name].read_bytes())
    return tuple(rows)
