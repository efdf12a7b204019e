"""Kill processes of a command at random, give the command again until it succeeds, and compare with an undisturbed run.

A ``Case`` says what is started, which of its processes may be killed, and what must hold at the end. The harness plays
the user, who gives the same command again where it ended with another code than 0; it does nothing else.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from fedmjp.benchmarks.federation.guard import adopt_orphans
from fedmjp.seeds import numpy_generator

POLL_SECONDS = 0.1
SILENCE = 600.0  # seconds without progress, a kill or an end, after which a command hangs
GOODBYE = 20.0  # seconds that processes may outlive their command
COMMAND = "the command"


@dataclass(frozen=True)
class Case:
    """A command whose processes are killed.

    Attributes:
        words: Arguments of ``fedmjp``, from the folder of its inputs and the folder of its results.
        prepare: Writes the inputs into a folder.
        victims: Kinds of processes that may be killed beside the command itself, each with a part of its command line.
        progress: Counts what a folder of results holds: rounds, or trials.
        differences: Says what differs between two folders of results that must be the same.
        pauses: Seconds at most to a kill: from a start or another kill, and from the next progress.
    """

    words: Callable[[Path, Path], list[str]]
    prepare: Callable[[Path], None]
    victims: Mapping[str, str]
    progress: Callable[[Path], int]
    differences: Callable[[Path, Path], list[str]]
    pauses: tuple[float, float]


@dataclass(frozen=True)
class Report:
    """Kills of a case: a row for each, and faults in words, none if all held."""

    rows: pd.DataFrame
    faults: list[str]
    runs: int
    seconds: int


def play(case: Case, kills: int, seed: int) -> Report:
    """Run a case again and again until enough processes were killed, or something did not hold.

    Args:
        case: The command.
        kills: Processes to kill.
        seed: Of moments and victims.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # of all processes that are started: sums depend on it
    adopt_orphans()
    generator, rows, runs = numpy_generator(seed, "kills"), list[dict[str, Any]](), 0
    folder = Path(tempfile.mkdtemp(prefix="fedmjp-"))
    try:
        case.prepare(folder)
        undisturbed = _Run(case, folder, folder / "undisturbed")
        faults = undisturbed.play(generator, 0)
        began = time.monotonic()
        while len(rows) < kills and not faults:
            runs += 1
            run = _Run(case, folder, folder / f"run-{runs}")
            faults = run.play(generator, kills - len(rows)) or case.differences(run.output, undisturbed.output)
            rows += [{"run": runs, **row} for row in run.rows]
    finally:
        _end(_children())
        shutil.rmtree(folder)
    return Report(pd.DataFrame(rows), faults, runs, round(time.monotonic() - began))


@dataclass
class _Run:
    """A run whose command is given again until it ends with 0."""

    case: Case
    inputs: Path
    output: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    open: list[tuple[float, dict[str, Any]]] = field(default_factory=list)  # kills without progress since, by time

    def play(self, generator: np.random.Generator, kills: int) -> list[str]:
        """Run to the end, killing at most so many processes; return faults in words."""
        code, faults = 1, list[str]()
        while code and not faults:
            earlier, errors = len(self.rows), self.output.with_suffix(".errors")
            with errors.open("wb") as file:
                command = self._start(file)
            code = self._watch(command, generator, kills)
            lines = errors.read_text().replace(str(self.inputs), "FOLDER").splitlines()
            killed = len(self.rows) > earlier
            ours = killed and self.rows[-1]["victim"] == COMMAND
            if code and not (killed and (ours or len(lines) == 1)):
                faults.append(f"after {len(self.rows)} kills the command ended with {code} and said {lines[-20:]}")
            if killed:
                self.rows[-1] |= {"code": code, "said": lines[-1] if lines else ""}
        self._note_progress()
        if survivors := _survivors():
            faults.append(f"the run left {survivors}")
        return faults

    def _start(self, errors: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "fedmjp", *self.case.words(self.inputs, self.output)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )

    def _watch(self, command: "subprocess.Popen[bytes]", generator: np.random.Generator, kills: int) -> int:
        """Kill at random until the command ends; return its exit code."""
        began, progress, heard = time.monotonic(), self.case.progress(self.output), time.monotonic()
        due = began + self._pause(generator)
        while command.poll() is None:
            now = time.monotonic()
            if self.case.progress(self.output) > progress:
                progress, heard = self.case.progress(self.output), now
                due = now + generator.uniform(0, self.case.pauses[1]) if due == math.inf else due
                self._note_progress()
            if len(self.rows) < kills and now >= due:
                row = {**self._kill(command, generator), "seconds": round(now - began, 1), "progress": progress}
                self.rows.append({**row, "code": None, "said": "", "next_progress": None})
                self.open.append((now, self.rows[-1]))
                due, heard = now + self._pause(generator), now
            if now - heard > SILENCE:
                command.send_signal(signal.SIGABRT)
            time.sleep(POLL_SECONDS)
        return int(command.wait())

    def _kill(self, command: "subprocess.Popen[bytes]", generator: np.random.Generator) -> dict[str, Any]:
        """Kill a process of a drawn kind."""
        victims: dict[str, list[psutil.Process]] = {COMMAND: [psutil.Process(command.pid)]}
        for process, words in _children().items():
            kind = next((kind for kind, sign in self.case.victims.items() if sign in words), None)
            if kind is not None:
                victims.setdefault(kind, []).append(process)
        kind = sorted(victims)[generator.integers(len(victims))]
        with suppress(psutil.NoSuchProcess):  # it ended in this very moment
            victims[kind][generator.integers(len(victims[kind]))].kill()
        return {"victim": kind, "present": ", ".join(sorted(victims))}

    def _pause(self, generator: np.random.Generator) -> float:
        """Draw the seconds to the next kill; half of the time without bound, until there is progress."""
        return float(generator.uniform(0, self.case.pauses[0])) if generator.random() < 1 / 2 else math.inf

    def _note_progress(self) -> None:
        for moment, row in self.open:
            row["next_progress"] = round(time.monotonic() - moment, 1)
        self.open.clear()


def _survivors() -> list[str]:
    """End the processes that outlived their command for long; return their command lines."""
    deadline, running = time.monotonic() + GOODBYE, _children()
    while running and time.monotonic() < deadline:
        psutil.wait_procs(running, timeout=POLL_SECONDS)
        running = _children()
    _end(running)
    return list(running.values())


def _children() -> dict[psutil.Process, str]:
    """Map all processes below this one, whoever started them, to their command lines."""
    words = {}
    for process in _descendants():
        with suppress(psutil.Error):
            words[process] = " ".join(process.cmdline())
    return words


def _descendants() -> Iterator[psutil.Process]:
    yield from (process for process in psutil.Process().children(recursive=True) if process not in OUTSIDE)


def _end(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(processes))


OUTSIDE = frozenset(psutil.Process().children(recursive=True))  # processes that are not a case's
