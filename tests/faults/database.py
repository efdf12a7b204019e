"""Whether a campaign loses a trial, or counts one twice, when processes of its database are killed at random.

``python -m tests.faults.database --output FOLDER``. `fedmjp campaign work` runs in several
processes on a
PostgreSQL server that the script makes on this machine. The server's processes are killed (SIGKILL) at random moments,
one after another: a worker's backend, the postmaster, or another one. The script plays the service managers: it starts
the server again some seconds after its postmaster is gone, and a worker that ended with another code than 0. A campaign
that is done is followed by the same one in another database, until enough kills are made. A row per kill. At the end
of each

- every planned trial stands in the database once, finished,
- its scores are, to the last bit, those of the same campaign in one process that nobody disturbs,
- the pictures in the database are, byte for byte, the files that this process keeps,

and each worker that ended did so with 1, after which it may be tried again, and said why in one line. The exit code is
1 if something of this does not hold.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import psutil
import torch
import typer
import yaml

from fedmjp.benchmarks.campaign.file import read_campaign
from fedmjp.benchmarks.campaign.prepare import Prepared, prepare
from fedmjp.benchmarks.folder.output import OutputFolder
from fedmjp.benchmarks.folder.queue import Queue
from fedmjp.benchmarks.folder.store import Store
from fedmjp.benchmarks.running.leasing import offer
from fedmjp.benchmarks.running.progress import RunProgress
from fedmjp.benchmarks.running.runner import run_campaign
from fedmjp.benchmarks.scripts import keep_table
from fedmjp.errors import FedmjpError
from fedmjp.running import FAILED, run_function
from fedmjp.seeds import numpy_generator
from tests.faults.campaign import CAMPAIGN, HELD, differences
from tests.postgresql import Server, started

POLL_SECONDS = 0.5
LONGEST = 30.0  # seconds from one kill, or from the start of a campaign, to the next
RESTART = 10.0  # seconds at most that the server stays away
MOST_ENDS = 20  # of workers after one kill: more were not the kill's fault
BACKEND, POSTMASTER, OTHER = "a worker's backend", "postmaster", "another process of the server"


def main(
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")] = Path(
        "results/simulation_kills/database"
    ),
    kills: Annotated[int, typer.Option(help="Processes to kill.", min=0)] = 30,
    workers: Annotated[int, typer.Option(help="At work at any time.", min=1)] = 2,
    weights: Annotated[int, typer.Option(help="Draws of weights of a campaign, six jobs each.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Of moments and victims.", min=0)] = 0,
) -> None:
    """Work, kill, and compare."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of all processes that are started: sums depend on it
    torch.set_num_threads(1)
    drawn, rows, wrong, campaigns = numpy_generator(seed, "kills"), list[dict[str, Any]](), list[str](), 0
    with tempfile.TemporaryDirectory() as scratch, started("of-this-study") as server:
        file = Path(scratch) / "campaign.yaml"
        file.write_text(yaml.safe_dump({**CAMPAIGN, "seeds": list(range(weights))}))
        prepared = prepare(read_campaign(file), device="cpu", command="")
        undisturbed = OutputFolder(Path(scratch) / "undisturbed")
        undisturbed.prepare(fresh=False)
        run_campaign(prepared, undisturbed, RunProgress(), database="", workers=1, ray="")
        began = time.monotonic()
        while len(rows) < kills and not wrong:
            campaigns += 1
            disturbed = _Disturbed.offer(prepared, server, f"campaign_{campaigns}", Path(scratch))
            try:
                disturbed.work(workers, drawn, kills - len(rows))
            finally:
                disturbed.end()
            store = disturbed.store()
            wrong += disturbed.wrong + differences(prepared, store, undisturbed)
            store.close()  # its backend is no worker's
            rows += [{"campaign": campaigns, **row} for row in disturbed.rows]
    about = {"kills": len(rows), "workers": workers, "campaigns": campaigns, "trials": len(prepared.plan.trials)}
    table = pd.DataFrame(rows)
    victims = table["victim"].value_counts().to_dict() if rows else {}
    seconds = round(time.monotonic() - began)
    keep_table(output, table, {**about, "victims": victims, "seconds": seconds, "wrong": wrong})
    typer.echo(f"{len(rows)} kills in {campaigns} campaigns of {about['trials']} trials: {victims}, {seconds} s")
    typer.echo("; ".join(wrong) or HELD)
    raise typer.Exit(1 if wrong else 0)


@dataclass
class _Disturbed:
    """A campaign in a database of its own, its workers, and the server that they share."""

    server: Server
    database: str
    scratch: Path
    places: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def offer(cls, prepared: Prepared, server: Server, database: str, scratch: Path) -> "_Disturbed":
        """Put the campaign there."""
        server.execute(f"CREATE DATABASE {database}")
        disturbed = cls(server, database, scratch)
        store = disturbed.store()
        offer(prepared, store=store, queue=Queue(store), device="cpu", arithmetic="float32")
        store.close()
        return disturbed

    def store(self) -> Store:
        """The trials, over a connection of our own."""
        return Store.open(self.server.url(self.database))

    def work(self, workers: int, drawn: np.random.Generator, kills: int) -> None:
        """Let workers work to the end, start again what ends before, and kill so many processes at most."""
        self.places = [self._start(place) for place in range(workers)]
        began = time.monotonic()
        due = began + drawn.uniform(0, LONGEST)
        while not self.wrong and any(worker.poll() != 0 for worker in self.places):
            for place, worker in enumerate(self.places):
                if worker.poll():
                    self._note_end(place, worker)
                    self.places[place] = self._start(place)
            now = time.monotonic()
            if len(self.rows) < kills and now >= due:
                self._kill(drawn, round(now - began, 1))
                typer.echo(f"{self.rows[-1]['victim']} killed after {now - began:.0f} s")
                due = time.monotonic() + drawn.uniform(0, LONGEST)
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Leave no worker behind."""
        for worker in self.places:
            worker.kill()
            worker.wait()

    def _start(self, place: int) -> "subprocess.Popen[bytes]":
        with self._errors(place).open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "fedmjp", "campaign", "work"],
                env={**os.environ, "FEDMJP_DATABASE": self.server.url(self.database)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def _note_end(self, place: int, worker: "subprocess.Popen[bytes]") -> None:
        said = self._errors(place).read_text().splitlines()
        fit = worker.returncode == FAILED and len(said) == 1
        if not fit or not self.rows or self.rows[-1]["ended"] == MOST_ENDS:
            self.wrong.append(f"after {len(self.rows)} kills a worker ended with {worker.returncode} and said {said}")
            return
        row = self.rows[-1]
        row |= {"ended": row["ended"] + 1, "code": worker.returncode, "said": said[0]}

    def _kill(self, drawn: np.random.Generator, seconds: float) -> None:
        finished, victims = self._finished(), self._victims()
        kind = sorted(victims)[drawn.integers(len(victims))]
        process, doing = victims[kind][drawn.integers(len(victims[kind]))]
        family = [self.server.postmaster(), *self.server.postmaster().children()]
        process.kill()
        row = {"victim": kind, "doing": doing, "seconds": seconds, "finished": finished}
        self.rows.append({**row, "ended": 0, "code": None, "said": "", "away": None})
        if kind == POSTMASTER:
            psutil.wait_procs(family)
            away = drawn.uniform(0, RESTART)
            time.sleep(away)
            self.server.start()
            self.rows[-1]["away"] = round(away, 1)

    def _victims(self) -> dict[str, list[tuple[psutil.Process, str]]]:
        """The server's processes, each with what it does."""
        victims: dict[str, list[tuple[psutil.Process, str]]] = {POSTMASTER: [(self.server.postmaster(), "")]}
        for process in self.server.postmaster().children():
            with suppress(psutil.Error):
                said = " ".join(process.cmdline()).removeprefix("postgres: ").strip()
                ours = f" {self.database} " in said
                doing = said.partition(") ")[2] if ours else said
                victims.setdefault(BACKEND if ours else OTHER, []).append((process, doing))
        return victims

    def _finished(self) -> int | None:
        with suppress(FedmjpError):  # the server recovers from the kill before
            store = self.store()
            counts = store.counts()
            store.close()
            return counts.get("ok", 0)
        return None

    def _errors(self, place: int) -> Path:
        return self.scratch / f"{self.database}-{place}"


if __name__ == "__main__":
    run_function(main)
