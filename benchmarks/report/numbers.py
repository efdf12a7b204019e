"""Numbers as people read them: decibels with one decimal, errors with two significant digits."""

from rich.filesize import decimal

from benchmarks.leaderboard.entries import Cost, Difference, Share, Statistics

# Errors span ten powers of ten: two significant digits, so that a small one does not read as none.
FORMATS = {"psnr": ".1f", "mse": "#.2g", "fft2d": "#.2g"}
SMALLEST_P = 0.001


def score(value: float, name: str) -> str:
    """One value of a metric."""
    return format(value, FORMATS.get(name, ".3f")).removesuffix(".")


def mean(statistics: Statistics, name: str) -> str:
    """A mean with its interval, where it has one: ``17.3 (16.1 to 18.4)``."""
    return score(statistics.mean, name) + interval(statistics, name)


def interval(statistics: Statistics, name: str) -> str:
    """The interval in brackets, with a space before it; nothing below two pictures."""
    if statistics.low is None or statistics.high is None:
        return ""
    return f" ({score(statistics.low, name)} to {score(statistics.high, name)})"


def difference(found: Difference) -> str:
    """``-3.2 (-4.1 to -2.3), p < 0.001``."""
    return f"{found.mean:+.1f}{difference_interval(found)}{p_value(found.p_value)}"


def difference_interval(found: Difference) -> str:
    """The interval in brackets, with a space before it; nothing below two pictures."""
    return "" if found.low is None or found.high is None else f" ({found.low:+.1f} to {found.high:+.1f})"


def p_value(value: float | None) -> str:
    """``, p = 0.012``; nothing where there was no test."""
    if value is None:
        return ""
    return f", p < {SMALLEST_P:g}" if value < SMALLEST_P else f", p = {value:.2g}"


def share_interval(found: Share) -> str:
    """The interval of a share in percent, in brackets."""
    return f" ({100 * found.low:.0f} to {100 * found.high:.0f})"


def seconds(cost: Cost) -> str:
    """Two significant digits, and never an exponent for long times."""
    value = cost.attack_seconds
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def size(cost: Cost) -> str:
    """``88.2 MB``."""
    return "" if cost.upload_bytes is None else decimal(cost.upload_bytes)


def weights(value: str) -> str:
    """What the numbers were measured on: untrained, or the first letters of the checkpoint's digest."""
    return value if value == "untrained" else f"checkpoint {value[:8]}"
