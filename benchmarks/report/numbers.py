"""Numbers as people read them: decibels with one decimal, errors with two significant digits."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from rich.filesize import decimal

from fedmjp.benchmarks.leaderboard.entries import BoardEntry, Cost, Difference, Share, Statistics
from fedmjp.benchmarks.leaderboard.headline import exactly, uploads
from fedmjp.benchmarks.report.percent import percent
from fedmjp.zoo import PREFIX, ZOO

# Errors span ten powers of ten: two significant digits, so that a small one does not read as none.
FORMATS = {"psnr": ".1f", "mse": "#.2g", "fft2d": "#.2g", "feature_error": "#.2g"}
SMALLEST_P = 0.001
MINUS = "\u2212"
NO_INTERVAL = "no interval below two uploads"


@dataclass(frozen=True)
class Value:
    """One cell of a table: a number or name, what it sorts by, and why it is empty where it is.

    ``interval`` stands behind the number: an interval in brackets, or of how many uploads; ``test`` behind both, where
    no details follow.
    """

    main: str
    order: float | None = None
    why: str = ""
    interval: str = ""
    test: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return f"{self.main}{self.interval}{self.test}"


def score(value: float, name: str) -> str:
    """One value of a metric."""
    return format(value, FORMATS.get(name, ".3f")).removesuffix(".")


def mean(statistics: Statistics, name: str) -> Value:
    """A mean with its interval, where it has one: ``17.3 (16.1 to 18.4)``."""
    interval = _interval(statistics, lambda value: score(value, name))
    return Value(score(statistics.mean, name), statistics.mean, "" if interval else NO_INTERVAL, interval)


def difference(measured: Difference, scale: float = 1) -> Value:
    """``-3.2 (-4.1 to -2.3), p < 0.001``; of shares, a scale of 100 tells percentage points."""
    interval = _interval(measured, lambda value: f"{scale * value:+.1f}")
    return Value(f"{scale * measured.mean:+.1f}", measured.mean, interval=interval, test=p_value(measured.p_value))


def share(measured: Share) -> Value:
    """In percent: ``25 % (10 to 40)``."""
    return Value(percent(measured.share), measured.share, interval=_interval(measured, _percent))


def exact(entry: BoardEntry) -> Value:
    """Pictures recovered exactly: ``12 of 46 (16 to 40 %)``."""
    recovered = entry.exact
    if recovered is None:
        return Value("")
    return Value(
        exactly(entry), recovered.share, interval=f" ({_percent(recovered.low)} to {_percent(recovered.high)} %)"
    )


def counted(entry: BoardEntry) -> Value:
    """How many pictures count: ``64``, ``64 of 8 uploads`` where some came together."""
    return Value(str(entry.n), entry.n, interval=f" of {uploads(entry)}" if entry.together else "")


def _percent(value: float) -> str:
    """A bound of a share: 0 and 100 are said of none and of all alone."""
    whole = round(100 * value)
    extreme = whole in (0, 100) and whole != 100 * value
    return f"{min(99.9, max(0.1, 100 * value)):.1f}" if extreme else f"{whole}"


def _interval(measured: Statistics | Difference | Share, shown: Callable[[float], str]) -> str:
    return (
        "" if measured.low is None or measured.high is None else f" ({shown(measured.low)} to {shown(measured.high)})"
    )


def p_value(value: float | None) -> str:
    """``, p = 0.012``; nothing where there was no test."""
    if value is None:
        return ""
    return f", p < {SMALLEST_P:g}" if value < SMALLEST_P else f", p = {value:.2g}"


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
    """What was measured on: untrained, weights of ours by name, or the first letters of the checkpoint's digest."""
    named = {model.sha256: f"{PREFIX}{name}" for name, model in ZOO.items()}
    return value if value == "untrained" else named.get(value, f"checkpoint {value[:8]}")


def defence_name(entry: BoardEntry) -> str:
    """``no defence``, ``mjp, mask ratio 0.27``."""
    if not entry.defences:
        return "no defence"
    return entry.defence + (f", mask ratio {entry.mask_ratio:g}" if entry.mask_ratio else "")


def with_minus(text: str) -> str:
    """Text with a true minus sign before each negative number; hyphens inside names and dates stay."""
    return re.sub(r"(?<![\w.)\]-])-(?=\d)", MINUS, text)
