"""Text in CSV files: spreadsheets take cells that begin like a formula for one, and run it."""

import re
from typing import TypeVar

Cell = TypeVar("Cell")
# What spreadsheets look for, its full-width forms, and the apostrophe, so that ``unguard`` knows whose it is.
FORMULA = re.compile(r"[=+\-@\t\r\n＝＋－＠']")


def guard(value: Cell) -> Cell | str:
    """A cell that is shown as it is: text that begins like a formula gets an apostrophe before it.

    Example:
        >>> guard("=1+1"), guard("grey"), guard(-1.5)
        ("'=1+1", 'grey', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def unguard(text: str) -> str:
    """The inverse of ``guard``, for text."""
    return text.removeprefix("'")
