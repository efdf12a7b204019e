"""Whether a deployment loses an upload, or counts one twice, when its processes are killed at random.

``python -m tests.faults.deployment --output FOLDER``. A deployment on this machine's loopback, with
as many
sites as asked for and pictures of noise, trains for so many rounds. Meanwhile processes are killed (SIGKILL) at random
moments, one after another: SuperLink, SuperExec, reverse proxy, the server's app, a site's SuperNode, a site's app. The
script plays the systems of server and sites: it starts again, by its unit, what is gone, and a run that failed, nothing
else. A row per kill. At the end

- each round stands in the history once, and every site was counted in it or is listed as refused,
- the weights are, to the last bit, those of the same rounds without Flower, network and kills, where the listed replies
  are left out; they would be others if a reply that is not listed were lost, or one counted twice.

The exit code is 1 if either does not hold.
"""

import json
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
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pandas as pd
import psutil
import torch
import typer
from flwr.app import Message, MessageType
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image
from safetensors.torch import load_file

from fedmjp.benchmarks.deployment.creating import create, state_folder
from fedmjp.benchmarks.deployment.layout import Deployment, DeploymentConfig, as_yaml
from fedmjp.benchmarks.federation.connection import free_port
from fedmjp.benchmarks.scripts import keep_table
from fedmjp.clients.app import query, train
from fedmjp.config import RunConfig
from fedmjp.running import run_function
from fedmjp.scenario import TrainingScenario, make_run_config
from fedmjp.seeds import numpy_generator
from fedmjp.server.loop import Federation
from fedmjp.training.run_folder import TrainingFolder
from tests.units import read_units

MODEL = {"name": "deit_micro", "image_size": 64, "patch_size": 8, "classes": 4}
# Sites with pictures of their own draw from the system what is drawn at all.
RECIPE = {
    "batch_size": 2, "learning_rate": 0.05, "warmup_epochs": 0, "repeats": 1, "rand_augment": "", "color_jitter": 0.0,
    "random_erasing": 0.0, "mixup": 0.0, "cutmix": 0.0, "drop_path": 0.0,
}  # fmt: skip
PICTURES = 8  # of a site, in four classes
POLL_SECONDS = 0.5
ROUND_SECONDS = 300.0  # after which the server gives up on a reply
# By the last word of a unit's name.
SERVERS = {"superlink": "SuperLink", "superexec": "SuperExec", "proxy": "reverse proxy"}
APP = "flwr-serverapp"  # stands on the command line of the server's app
CLIENT = "fedmjp.clients.gate.program"
HELD = "every upload was counted once, or is listed as refused; the weights are the same to the last bit"
Lost = set[tuple[int, int]]  # (round, client)


def main(
    output: Annotated[Path, typer.Option(help="Folder for the table.", metavar="FOLDER")] = Path(
        "results/deployment_kills"
    ),
    kills: Annotated[int, typer.Option(help="Processes to kill.", min=0)] = 100,
    rounds: Annotated[int, typer.Option(help="Of the training.", min=1)] = 100,
    sites: Annotated[int, typer.Option(help="Number of sites.", min=1)] = 2,
    every: Annotated[float, typer.Option(help="Mean seconds between kills.", min=0.1)] = 10.0,
    seed: Annotated[int, typer.Option(help="Of moments and victims.", min=0)] = 0,
) -> None:
    """Train, kill, and compare."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of all processes that are started: sums depend on it
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="fedmjp-"))
    deployed = _Deployed.create(folder, sites, rounds)
    try:
        table = pd.DataFrame(deployed.play(numpy_generator(seed, "kills"), kills, every))
        wrong = deployed.wrong(len(table))
    finally:
        deployed.end()
        shutil.rmtree(folder)
    counts = table["victim"].str.replace(r" of site .*", " of a site", regex=True).value_counts().to_dict()
    about = {"rounds": rounds, "sites": sites, "kills": len(table), "victims": counts, "wrong": wrong}
    keep_table(output, table, about | deployed.told)
    typer.echo(f"{len(table)} kills in {rounds} rounds: {counts}")
    typer.echo("; ".join(wrong) or HELD)
    raise typer.Exit(1 if wrong else 0)


@dataclass
class _Deployed:
    """A deployment on this machine, its sites, and its run."""

    folder: Path
    rounds: int
    deployment: Deployment
    pictures: list[Path]
    nodes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    servers: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    run: "subprocess.Popen[bytes] | None" = None
    runs: int = 0
    told: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def create(cls, folder: Path, sites: int, rounds: int) -> "_Deployed":
        """Make and start it."""
        names = tuple(f"site-{number}" for number in range(sites))
        port, inside = free_port(), free_port()
        config = DeploymentConfig(sites=names, port=port, inside=inside, state=state_folder())
        deployment = create(folder / "deployment", config)
        pictures = [_write_pictures(folder / name, number) for number, name in enumerate(names)]
        values = {"model": MODEL, "recipe": RECIPE, "rounds": rounds, "round_seconds": ROUND_SECONDS, "device": "cpu"}
        (folder / "run.yaml").write_text(as_yaml(values))
        config.state.mkdir(mode=0o700)  # the unit's RuntimeDirectory
        return cls(folder, rounds, deployment, pictures)

    @property
    def results(self) -> TrainingFolder:
        """What the run leaves."""
        return TrainingFolder(self.folder / "results")

    def play(self, drawn: np.random.Generator, kills: int, every: float) -> Iterator[dict[str, Any]]:
        """Train to the end; a row for each process that is killed meanwhile."""
        began, killed, due = time.monotonic(), 0, drawn.exponential(every)
        while self._keep_alive():
            seconds = time.monotonic() - began
            if killed < kills and seconds >= due and (victims := dict(self._victims())):
                victim = sorted(victims)[drawn.integers(len(victims))]
                victims[victim].kill()
                killed, due = killed + 1, seconds + drawn.exponential(every)
                yield {"kill": killed, "seconds": round(seconds, 2), "round": self._done() + 1, "victim": victim}
            time.sleep(POLL_SECONDS)
        self.told = {"seconds": round(time.monotonic() - began), "runs": self.runs, "refused": len(self._refused())}

    def wrong(self, kills: int) -> list[str]:
        """What was lost or counted twice, in words."""
        history, refused = pd.read_csv(self.results.history), self._refused()
        wrong = []
        if list(history["round"]) != list(range(1, self.rounds + 1)):
            wrong.append(f"the history holds the rounds {list(history['round'])}")
        for number, counted in zip(history["round"], history["clients"], strict=True):
            listed = sum(lost[0] == number for lost in refused)
            if counted + listed != len(self.pictures):
                wrong.append(f"round {number} counted {counted} sites and lists {listed}")
        undisturbed = self._undisturbed(refused)
        weights = load_file(self.results.weights)
        if weights.keys() != undisturbed.keys() or any(
            not torch.equal(weights[name], value) for name, value in undisturbed.items()
        ):
            wrong.append(f"the weights differ from those of the same rounds without {kills} kills")
        return wrong

    def end(self) -> None:
        """Stop everything."""
        for process in [*self.nodes.values(), *([] if self.run is None else [self.run]), *self.servers.values()]:
            _kill_group(process)
        shutil.rmtree(self.deployment.config().state)

    def _keep_alive(self) -> bool:
        """Start again what a site's or the server's system would; whether the run goes on."""
        for unit in read_units(self.deployment.units):
            title = SERVERS[unit.name.removesuffix(".service").rpartition("-")[2]]
            if title not in self.servers or self.servers[title].poll() is not None:
                if title in self.servers:
                    _kill_group(self.servers[title])  # with what is left of its control group
                self.servers[title] = self._start_process(title, unit.command)
        for number, name in enumerate(self.deployment.config().sites):
            if name not in self.nodes or self.nodes[name].poll() is not None:
                site = str(self.deployment.site(name).root)
                self.nodes[name] = self._start(name, "node", site, "--data", str(self.pictures[number]))
        if self.run is None or self.run.poll() is not None:
            if self.run is not None and self.run.returncode == 0:
                return False
            self.runs += 1
            words = ["run", str(self.deployment.root), "--data", str(self.pictures[0])]
            words += ["--config", str(self.folder / "run.yaml"), "--output", str(self.results.root)]
            self.run = self._start("run", *words)
        return True

    def _start(self, log: str, *words: str) -> "subprocess.Popen[bytes]":
        return self._start_process(log, [sys.executable, "-P", "-m", "fedmjp", "deploy", *words])

    def _start_process(self, log: str, command: list[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _victims(self) -> Iterator[tuple[str, psutil.Process]]:
        for title, server in self.servers.items():
            if server.poll() is None:
                yield title, psutil.Process(server.pid)
                for process, words in _below(psutil.Process(server.pid)):
                    if APP in words:
                        yield "the server's app", process
        for name, node in self.nodes.items():
            if node.poll() is None:
                yield f"SuperNode of {name}", psutil.Process(node.pid)
                for process, words in _below(psutil.Process(node.pid)):
                    if CLIENT in words:
                        yield f"app of {name}", process

    def _done(self) -> int:
        path = self.results.history
        return max(path.read_text().count("\n") - 1, 0) if path.exists() else 0

    def _refused(self) -> Lost:
        path = self.results.refused
        rows = (
            pd.read_csv(path).dropna(subset=["client"]) if path.exists() else pd.DataFrame(columns=["round", "client"])
        )
        return {(int(number), int(client)) for number, client in zip(rows["round"], rows["client"], strict=True)}

    def _undisturbed(self, lost: Lost) -> Mapping[str, torch.Tensor]:
        """The weights after the same rounds in this process, without the replies that are listed."""
        scenario = self.results.config()
        assert isinstance(scenario, TrainingScenario)
        scenario = scenario.model_copy(update={"data": str(self.pictures[0])})
        folder = TrainingFolder(self.folder / "undisturbed")
        folder.root.mkdir()
        names = json.dumps(self.results.kept_classes())
        run = make_run_config([scenario], output_folder=str(folder.root), class_names=names)
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # no engine gives messages their identity
        grid: Any = _NoEngine(run, self.pictures, lost)
        Federation(grid, scenario, run).play()
        return load_file(folder.weights)


@dataclass(frozen=True)
class _NoEngine:
    """As much of a Grid as the server needs, with clients in this process."""

    run: RunConfig
    pictures: list[Path]
    lost: Lost

    def get_node_ids(self) -> Iterable[int]:
        """A node for each site."""
        return range(1, len(self.pictures) + 1)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """The replies that are not lost."""
        del timeout  # nobody is waited for
        sent = list(messages)
        for number, message in enumerate(sent):
            message.metadata.__dict__["_message_id"] = f"message-{number}"
        return self._replies(sent)

    def _replies(self, messages: Iterable[Message]) -> Iterator[Message]:
        for message in messages:
            client = message.metadata.dst_node_id - 1
            place = {"partition-id": client, "num-partitions": len(self.pictures), "data": str(self.pictures[client])}
            context: Any = SimpleNamespace(run_config=self.run.flat(), node_config=place, node_id=client + 1)
            asks = message.metadata.message_type == MessageType.QUERY
            answer: Callable[[Message, Any], Message] = query if asks else train
            if asks or (_round_of(message), client) not in self.lost:
                reply = answer(message, context)
                reply.metadata.__dict__["_src_node_id"] = client + 1
                yield reply


def _round_of(message: Message) -> int:
    asked: Any = message.content["config"]
    return int(asked["server-round"])


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it has started, as the end of a service does."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _below(process: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    """Processes that a process has started, with their command lines."""
    for child in process.children(recursive=True):
        try:
            yield child, " ".join(child.cmdline())
        except psutil.Error:
            continue


def _write_pictures(folder: Path, seed: int) -> Path:
    drawn = np.random.default_rng(seed)
    for number in range(PICTURES):
        path = folder / f"class-{number % int(str(MODEL['classes']))}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(drawn.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize((72, 72), Image.Resampling.BICUBIC).save(path)
    return folder


if __name__ == "__main__":
    run_function(main)
