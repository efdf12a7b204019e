"""Text from anybody, which terminals would obey, and spreadsheets take for a formula and run."""

import re
from typing import TypeVar

Cell = TypeVar("Cell")
# Control characters but for tab and line feed, and halves of letters.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# What spreadsheets look for, its full-width forms, and the apostrophe, so that ``unguard`` knows whose it is.
FORMULA = re.compile(r"[=+\-@\t\r\n＝＋－＠']")


def printable(text: str) -> str:
    """Text without what a terminal would obey: a replacement character stands for each such letter."""
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


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
