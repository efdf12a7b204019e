"""Text from anybody, which terminals would obey, and spreadsheets take for a formula and run."""

import re
from typing import TypeVar

Cell = TypeVar("Cell")
# Control characters but for tab and line feed, and halves of letters.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Beginnings that spreadsheets look for, with full-width forms, and the apostrophe, so that ``unguard`` can tell.
FORMULA = re.compile(r"[=+\-@\t\r\n＝＋－＠']")


def printable(text: str) -> str:
    """Replace each character that a terminal would obey.

    Args:
        text: From anybody.
    """
    return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def guard(value: Cell) -> Cell | str:
    """Make a cell that spreadsheets show as it is: text that begins like a formula gets an apostrophe before it.

    Args:
        value: Of the cell.

    Example:
        >>> guard("=1+1"), guard("grey"), guard(-1.5)
        ("'=1+1", 'grey', -1.5)
    """
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def unguard(text: str) -> str:
    """Read a cell of text that ``guard`` made.

    Args:
        text: Of the cell.
    """
    return text.removeprefix("'")
