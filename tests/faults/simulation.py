"""Whether a simulated run loses a round, or counts one twice, when its processes are killed at random.

``python -m tests.faults.simulation --output FOLDER``. `fedmjp simulate` trains on pictures of
noise, once
undisturbed, then again and again until enough processes were killed (SIGKILL), one after another, at random moments:
half of them from the first second on, half of them once a round was done. These are the command itself, what guards
and follows its SuperLink, the SuperLink, its SuperExec, the server's app, and Ray's processes, clients among them. The
script plays the user, who gives the same command again where it ended with another code than 0. A row per kill. At the
end of each run

- weights and history are, to the last bit, those of the undisturbed run with the same seed, but for times,
- no reply is listed as refused (``quorum=1``: a round that lacks a client does not count),
- no process is left,

and a command that failed said why in one line. The exit code is 1 if something of this does not hold.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import psutil
import torch
import typer
from PIL import Image
from safetensors.torch import load_file

from fedmjp.benchmarks.federation.guard import adopt_orphans
from fedmjp.benchmarks.scripts import keep_table
from fedmjp.running import run_function
from fedmjp.seeds import numpy_generator
from fedmjp.server.refusals import RefusalFile
from fedmjp.training.run_folder import TrainingFolder

MODEL = {"name": "deit_micro", "image_size": 64, "patch_size": 8, "classes": 4}
RECIPE = {"batch_size": 2, "learning_rate": 0.05, "warmup_epochs": 0, "mixup": 0, "cutmix": 0}
CLIENTS = 3
PICTURES = 12
POLL_SECONDS = 0.1
FIRST, LATER = 45.0, 10.0  # seconds at most to a kill: from a start or another kill, and from the next round
SILENCE = 600.0  # seconds without a round, a kill or an end, after which a command hangs
GOODBYE = 20.0  # seconds that processes may outlive their command
# By what stands on the command line of a process; the guard's holds the SuperLink's.
VICTIMS = {
    "guard": "fedmjp.benchmarks.federation.guard",
    "follower of the log": "flwr log",
    "SuperLink": "flower-superlink",
    "SuperExec": "flower-superexec",
    "the server's app": "flwr-simulation",
    "a client": "ray::ClientAppActor",
    "raylet": "raylet/raylet",
    "Ray's GCS": "gcs_server",
    "an agent of Ray": "Agent",
}
COMMAND = "fedmjp simulate"
TIMES = ["seconds", "images_per_second", "upload_seconds"]  # columns of the history that no two runs share
HELD = "weights and history are the same to the last bit, and no process is left"


def main(
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")] = Path(
        "results/simulation_kills"
    ),
    kills: Annotated[int, typer.Option(help="Processes to kill.", min=0)] = 100,
    rounds: Annotated[int, typer.Option(help="Of each training run.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Of moments and victims.", min=0)] = 0,
) -> None:
    """Train, kill, and compare."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of all processes that are started: sums depend on it
    adopt_orphans()
    drawn, rows, wrong, runs = numpy_generator(seed, "kills"), list[dict[str, Any]](), list[str](), 0
    folder = Path(tempfile.mkdtemp(prefix="fedmjp-"))
    pictures = _write_pictures(folder / "pictures")
    try:
        undisturbed = _Run(folder / "undisturbed", pictures, rounds)
        wrong += undisturbed.play(drawn, 0)
        began = time.monotonic()
        while len(rows) < kills and not wrong:
            runs += 1
            run = _Run(folder / f"run-{runs}", pictures, rounds)
            wrong += run.play(drawn, kills - len(rows)) or run.differences(undisturbed)
            rows += [{"run": runs, **row} for row in run.rows]
    finally:
        _end(_children())
        shutil.rmtree(folder)
    table = pd.DataFrame(rows)
    victims = table["victim"].value_counts().to_dict() if rows else {}
    seconds = {"seconds": round(time.monotonic() - began), "seconds_undisturbed": undisturbed.seconds}
    about = {"kills": len(rows), "runs": runs, "rounds": rounds, "victims": victims, **seconds, "wrong": wrong}
    keep_table(output, table, about)
    typer.echo(f"{len(rows)} kills in {runs} runs of {rounds} rounds: {victims}")
    typer.echo("; ".join(wrong) or HELD)
    raise typer.Exit(1 if wrong else 0)


@dataclass
class _Run:
    """A training run, whose command is given again until it ends with 0."""

    root: Path
    pictures: Path
    rounds: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    open: list[tuple[float, dict[str, Any]]] = field(default_factory=list)  # kills without a round after them, by time
    seconds: int = 0

    @property
    def results(self) -> TrainingFolder:
        """What the run leaves."""
        return TrainingFolder(self.root / "results")

    def play(self, drawn: np.random.Generator, kills: int) -> list[str]:
        """Train to the end, and kill so many processes at most; what went wrong, in words."""
        self.root.mkdir()
        began, code, wrong = time.monotonic(), 1, list[str]()
        while code and not wrong:
            before = len(self.rows)
            with (self.root / "errors").open("wb") as errors:
                command = self._start(errors)
            code = self._watch(command, drawn, kills)
            said = (self.root / "errors").read_text().replace(str(self.root), "FOLDER").splitlines()
            ours = len(self.rows) > before and self.rows[-1]["victim"] == COMMAND
            if code and (len(self.rows) == before or (not ours and len(said) != 1)):
                wrong.append(f"after {len(self.rows)} kills the command ended with {code} and said {said[-20:]}")
            if len(self.rows) > before:
                self.rows[-1] |= {"code": code, "said": said[-1] if said else ""}
        self._come_on()
        self.seconds = round(time.monotonic() - began)
        if left := _left():
            wrong.append(f"the run left {left}")
        return wrong

    def differences(self, other: "_Run") -> list[str]:
        """What differs from another run that must be the same, in words."""
        wrong = []
        weights, expected = load_file(self.results.weights), load_file(other.results.weights)
        if weights.keys() != expected.keys() or any(
            not torch.equal(weights[name], value) for name, value in expected.items()
        ):
            wrong.append(f"the weights differ after {len(self.rows)} kills")
        tables = [pd.read_csv(folder.history).drop(columns=TIMES) for folder in (self.results, other.results)]
        if not tables[0].equals(tables[1]):
            wrong.append(f"the history differs after {len(self.rows)} kills")
        if refused := RefusalFile(self.results.refused).read():
            wrong.append(f"replies are listed as refused: {refused}")
        return wrong

    def _start(self, errors: Any) -> "subprocess.Popen[bytes]":
        words = ["simulate", "--data", str(self.pictures), "--output", str(self.results.root), "--device", "cpu"]
        words += ["--clients", str(CLIENTS), "--rounds", str(self.rounds), "--strategy", "fedadam", "--defence", "mjp"]
        words += ["quorum=1", *(f"model.{key}={value}" for key, value in MODEL.items())]
        words += [f"recipe.{key}={value}" for key, value in RECIPE.items()]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "fedmjp", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )

    def _watch(self, command: "subprocess.Popen[bytes]", drawn: np.random.Generator, kills: int) -> int:
        """Kill at random until the command ends; its exit code."""
        began, done, heard = time.monotonic(), self._done(), time.monotonic()
        due = began + _wait(drawn)
        while command.poll() is None:
            now = time.monotonic()
            if self._done() > done:
                done, heard = self._done(), now
                due = now + drawn.uniform(0, LATER) if due == math.inf else due
                self._come_on()
            if len(self.rows) < kills and now >= due and (victims := list(_victims(command))):
                kinds = sorted({kind for kind, _ in victims})
                kind = kinds[drawn.integers(len(kinds))]
                processes = [process for name, process in victims if name == kind]
                with suppress(psutil.NoSuchProcess):  # it ended in this very moment
                    processes[drawn.integers(len(processes))].kill()
                row = {"victim": kind, "seconds": round(now - began, 1), "done": done, "running": _running(victims)}
                self.rows.append({**row, "code": None, "said": "", "next_round": None})
                self.open.append((now, self.rows[-1]))
                typer.echo(f"{kind} killed after {now - began:.0f} s, {done} rounds done")
                due, heard = now + _wait(drawn), now
            if now - heard > SILENCE:
                command.send_signal(signal.SIGABRT)
            time.sleep(POLL_SECONDS)
        return int(command.wait())

    def _come_on(self) -> None:
        """A round was done, or the whole run: note how long after kills."""
        for at, row in self.open:
            row["next_round"] = round(time.monotonic() - at, 1)
        self.open.clear()

    def _done(self) -> int:
        path = self.results.history
        return max(path.read_text().count("\n") - 1, 0) if path.exists() else 0


def _wait(drawn: np.random.Generator) -> float:
    """Seconds to the next kill; without bound, until a round is done, half of the time: most of it goes into starts."""
    return float(drawn.uniform(0, FIRST)) if drawn.random() < 1 / 2 else math.inf


def _victims(command: "subprocess.Popen[bytes]") -> Iterator[tuple[str, psutil.Process]]:
    yield COMMAND, psutil.Process(command.pid)
    for process, words in _children().items():
        kind = next((kind for kind, sign in VICTIMS.items() if sign in words), None)
        if kind is not None:
            yield kind, process


def _running(victims: list[tuple[str, psutil.Process]]) -> str:
    """How far the run had come, by which of its processes there were."""
    kinds = {kind for kind, _ in victims}
    stages = ["a client", "raylet", "the server's app", "SuperLink", COMMAND]
    return next(stage for stage in stages if stage in kinds)


def _left() -> list[str]:
    """Processes that are left, which are then ended."""
    deadline, left = time.monotonic() + GOODBYE, _children()
    while left and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=POLL_SECONDS)
        left = _children()
    _end(left)
    return list(left.values())


def _children() -> dict[psutil.Process, str]:
    """All that was started here, whoever started it, with its command line."""
    words = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            words[process] = " ".join(process.cmdline())
    return words


def _end(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes)


def _write_pictures(folder: Path) -> Path:
    drawn = np.random.default_rng(0)
    for number in range(PICTURES):
        path = folder / f"class-{number % int(str(MODEL['classes']))}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(drawn.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize((72, 72), Image.Resampling.BICUBIC).save(path)
    return folder


if __name__ == "__main__":
    run_function(main)
