"""What somebody who means ill, or a failing disk, makes of good files; and a limit on how long it may take."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))  # of each kind; more by hand
SECONDS = 20  # that an example may take on a machine that is busy
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        ["", "=1+1", "../..", "/dev/zero", "\0", "\ud800", "a" * 5000, "$\\frac$", "[red]", "nan", "<b>", "-1", "mjp"]
    ),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 10**30, 1e308, -1e308, 5e-324, 0.5, float("nan"), float("inf")]),
    st.text(max_size=8),
    st.integers(),
    st.floats(),
    st.recursive(
        st.none() | st.integers(-2, 2),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
)


def fuzzed(test: Any) -> Any:
    """As many examples as asked for, the same in every run, however long they take."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=checks
    )(test)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """AssertionError in the midst of what takes longer."""

    def late(*_: object) -> None:
        raise AssertionError(f"it hangs: no answer in {seconds} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes that were cut, overwritten, filled or repeated in a few places."""
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(found) - 1, 0)))
        match draw(st.sampled_from(["cut", "flip", "drop", "fill", "insert", "double"])):
            case "cut":
                del found[place:]
            case "flip" if found:
                found[place] = draw(st.integers(0, 255))
            case "drop":
                del found[place : place + draw(st.integers(1, 64))]
            case "fill":
                length = min(draw(st.integers(1, 64)), len(found) - place)
                found[place : place + length] = bytes([draw(st.sampled_from([0, 255, 32]))]) * length
            case "insert":
                found[place:place] = draw(st.binary(min_size=1, max_size=8))
            case _:
                found[place:place] = found[place : place + 200]
    return bytes(found)


@st.composite
def changed(draw: st.DrawFn, content: Any) -> Any:
    """A copy of nested values of which a few were replaced, removed or renamed."""
    found = content
    for _ in range(draw(st.integers(1, 3))):
        found = _changed_once(draw, found)
    return found


def _changed_once(draw: st.DrawFn, content: Any) -> Any:
    if not isinstance(content, dict | list) or not content or draw(st.integers(0, 9)) == 0:
        return draw(ODD)
    if isinstance(content, list):
        place = draw(st.integers(0, len(content) - 1))
        kept = [*content[:place], *content[place + 1 :]]
        inner = _changed_once(draw, content[place])
        return draw(st.sampled_from([kept, [*content, content[place]]])) if draw(st.integers(0, 9)) == 0 else [
            *content[:place], inner, *content[place + 1 :]
        ]  # fmt: skip
    key = draw(st.sampled_from(sorted(content)))
    others = {name: value for name, value in content.items() if name != key}
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from([others, {**others, f"{key}x": content[key]}]))
    return {**others, key: _changed_once(draw, content[key])}
