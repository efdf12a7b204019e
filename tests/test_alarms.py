"""Work whose time is over ends, and leaves no module half imported."""

import importlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedmjp.processes import raise_on_alarm

SLOW = "import time\ntime.sleep(0.3)\n"


class OverError(BaseException):
    """The time is over."""


@pytest.fixture
def alarm() -> Iterator[None]:
    """One that rings after 0.1 seconds."""
    former = signal.signal(signal.SIGALRM, raise_on_alarm(OverError, signal.ITIMER_REAL))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


@pytest.fixture
def slow_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that imports a part of itself, and takes longer than the alarm."""
    package = tmp_path / "slow_to_import"
    package.mkdir()
    (package / "__init__.py").write_text("import slow_to_import.part\nimport slow_to_import.slow\n")
    (package / "part.py").touch()
    (package / "slow.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    yield package.name
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]


def import_and_work(name: str) -> None:
    importlib.import_module(name)
    assert sys.modules[name].part
    time.sleep(5)


@pytest.mark.usefixtures("alarm")
def test_work_ends_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(OverError):
        time.sleep(5)
    assert time.monotonic() - began < 2


@pytest.mark.usefixtures("alarm")
def test_an_import_is_finished_first_and_the_work_behind_it_ended(slow_to_import: str) -> None:
    began = time.monotonic()
    with pytest.raises(OverError):
        import_and_work(slow_to_import)
    assert time.monotonic() - began < 2
    assert importlib.import_module(slow_to_import).part, "as a later import finds it"
