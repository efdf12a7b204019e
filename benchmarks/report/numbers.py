"""Numbers as people read them: decibels with one decimal, errors with two significant digits."""

import re
from collections.abc import Callable
from typing import Self

from rich.filesize import decimal

from fedmjp.benchmarks.leaderboard.headline import count_uploads
from fedmjp.benchmarks.report.percent import percent
from fedmjp.zoo import PREFIX, ZOO

# Errors span ten powers of ten: two significant digits, so that a small one does not read as none.
FORMATS = {"psnr": ".1f", "mse": "#.2g", "fft2d": "#.2g", "feature_error": "#.2g"}
SMALLEST_P = 0.001
MINUS = "\u2212"
NO_INTERVAL = "no interval below two uploads"


class CellText(str):
    """One cell of a table as it is written, with what it sorts by and, where it is empty, why.

    Attributes:
        main: The number or name itself.
        interval: What stands behind it: an interval in brackets, or the number of uploads.
        order: The number to sort by; None for text and empty cells.
        why: Why the cell is empty, or has no interval.
    """

    __slots__ = ("interval", "main", "order", "why")
    main: str
    interval: str
    order: float | None
    why: str

    def __new__(cls, main: str, order: float | None = None, why: str = "", interval: str = "", test: str = "") -> Self:
        """Write the parts of a cell one behind the other.

        Args:
            main: The number or name.
            order: The number to sort by.
            why: Why the cell is empty, or has no interval.
            interval: Interval in brackets, or number of uploads, with a leading space.
            test: P-value, with a leading comma.
        """
        text = super().__new__(cls, f"{main}{interval}{test}")
        text.main, text.interval, text.order, text.why = main, interval, order, why
        return text


def empty(why: str = "") -> CellText:
    """Write an empty cell.

    Args:
        why: The reason, which a page may show.
    """
    return CellText("", why=why)


def number(order: float | None, text: str, why: str) -> CellText:
    """Write a number as a given text, or an empty cell where there is none.

    Args:
        order: The number.
        text: How it is written.
        why: The reason where it is None.
    """
    return empty(why) if order is None else CellText(text, order)


def score(value: float, name: str) -> str:
    """Format one value of a metric.

    Args:
        value: The value, in the metric's own unit.
        name: The metric, which decides on the digits.
    """
    return format(value, FORMATS.get(name, ".3f")).removesuffix(".")


def mean(value: float, low: float | None, high: float | None, name: str) -> CellText:
    """Write the mean of a metric with its interval: ``17.3 (16.1 to 18.4)``.

    Args:
        value: The mean, in the metric's own unit.
        low: Lower end of the 95 % interval; None below two uploads.
        high: Upper end.
        name: The metric.
    """
    interval = _interval(low, high, lambda bound: score(bound, name))
    return CellText(score(value, name), value, "" if interval else NO_INTERVAL, interval)


def difference(value: float, low: float | None, high: float | None, p: float | None, scale: float = 1) -> CellText:
    """Write a paired difference: ``-3.2 (-4.1 to -2.3), p < 0.001``.

    Args:
        value: Mean of the differences.
        low: Lower end of the 95 % interval; None below two uploads.
        high: Upper end.
        p: P-value of the test; None where there was no test.
        scale: Factor on the three numbers; 100 makes percentage points of shares.
    """
    interval = _interval(low, high, lambda bound: f"{scale * bound:+.1f}")
    return CellText(f"{scale * value:+.1f}", value, interval=interval, test=p_value(p))


def share(value: float, low: float, high: float) -> CellText:
    """Write a share in percent: ``25 % (10 to 40)``.

    Args:
        value: The share, from 0 to 1.
        low: Lower end of the 95 % interval.
        high: Upper end.
    """
    return CellText(percent(value), value, interval=_interval(low, high, _percent_bound))


def exact(value: float, low: float, high: float, n: int) -> CellText:
    """Write how many pictures are recovered exactly: ``12 of 46 (16 to 40 %)``.

    Args:
        value: Their share, from 0 to 1.
        low: Lower end of the 95 % interval of the share.
        high: Upper end.
        n: Number of pictures.
    """
    interval = f" ({_percent_bound(low)} to {_percent_bound(high)} %)"
    return CellText(f"{round(value * n)} of {n}", value, interval=interval)


def pictures(n: int, uploads: int) -> CellText:
    """Write how many pictures count: ``64``, or ``64 of 8 uploads`` where some came together.

    Args:
        n: Number of pictures.
        uploads: Number of uploads that these were behind.
    """
    return CellText(str(n), n, interval=f" of {count_uploads(uploads)}" if uploads != n else "")


def _percent_bound(value: float) -> str:
    """Write a bound of a share in percent; 0 and 100 stand for none and all alone."""
    whole = round(100 * value)
    extreme = whole in (0, 100) and whole != 100 * value
    return f"{min(99.9, max(0.1, 100 * value)):.1f}" if extreme else f"{whole}"


def _interval(low: float | None, high: float | None, write: Callable[[float], str]) -> str:
    return "" if low is None or high is None else f" ({write(low)} to {write(high)})"


def p_value(value: float | None) -> str:
    """Write a p-value behind a comma: ``, p = 0.012``; nothing where there was no test.

    Args:
        value: The p-value, from 0 to 1.
    """
    if value is None:
        return ""
    return f", p < {SMALLEST_P:g}" if value < SMALLEST_P else f", p = {value:.2g}"


def seconds(value: float | None) -> str:
    """Write a time with two significant digits, never with an exponent; nothing where it was not measured.

    Args:
        value: Seconds.
    """
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def size(value: int | None) -> str:
    """Write a size with its unit: ``88.2 MB``; nothing where it is not known.

    Args:
        value: Bytes.
    """
    return "" if value is None else decimal(value)


def weights(value: str) -> str:
    """Name weights: untrained, those of ours by name, or the first letters of a checkpoint's digest.

    Args:
        value: ``untrained``, or the SHA-256 of a checkpoint.
    """
    names = {model.sha256: f"{PREFIX}{name}" for name, model in ZOO.items()}
    return value if value == "untrained" else names.get(value, f"checkpoint {value[:8]}")


def with_minus(text: str) -> str:
    """Put a true minus sign before each negative number; hyphens inside names and dates stay.

    Args:
        text: Any text.
    """
    return re.sub(r"(?<![\w.)\]-])-(?=\d)", MINUS, text)
