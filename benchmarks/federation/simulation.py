"""One federated run from configuration to recorded uploads."""

import math
import re
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.federation.bundle import as_toml, write_app
from benchmarks.federation.superlink import PrivateSuperLink
from fedmjp import provenance
from fedmjp.config import FederationConfig, ModelConfig, RecordingConfig, to_run_config
from fedmjp.errors import FederationError, RecordError
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload, load_fields
from fedmjp.settings import Picture
from server.uploads import UploadFolder

ANSI = re.compile(r"\x1b\[[0-9;]*m")
ROUND = re.compile(r"\[ROUND \d+/\d+\]")
ERROR = re.compile(r"^\s*[\w.]*(Error|Exception)\b: ")
COMPLETED = "finished:completed"
RECORDS = "round-*.safetensors"


@dataclass(frozen=True)
class RunFolder:
    """Records of one federated run: what the server kept, and what clients left for the evaluator.

    The two lie side by side and share file names (round and node), which is how a score finds its
    private picture. Server-side code is given ``uploads`` alone.
    """

    root: Path

    @property
    def uploads(self) -> Path:
        """The server's records, one folder per arm."""
        return self.root / "uploads"

    @property
    def evaluator(self) -> Path:
        """The evaluator's records, one folder per arm."""
        return self.root / "evaluator"

    def clear(self) -> None:
        """Remove former records."""
        for folder in (self.uploads, self.evaluator):
            if folder.exists():
                shutil.rmtree(folder)

    def upload_folder(self, arm: ModelConfig) -> UploadFolder:
        """The server's records of one arm."""
        return UploadFolder(self.uploads / arm.label)

    def index(self, arm: ModelConfig) -> dict[tuple[tuple[str, ...], Picture], list[Path]]:
        """Readable private records of an arm, by the pictures in them and the version in the gradient.

        Records of the same pictures come in the order of their rounds.
        """
        found: dict[tuple[tuple[str, ...], Picture], list[Path]] = {}
        for path in sorted((self.evaluator / arm.label).glob(RECORDS)):
            try:
                fields = load_fields(path)
                found.setdefault((tuple(fields["pictures"]), Picture(fields["gradient_of"])), []).append(path)
            except (RecordError, KeyError, TypeError, ValueError):
                continue
        return found

    def record(self, arm: ModelConfig, private: Path) -> tuple[PrivateBatch, Upload]:
        """A private record and the upload that was computed from it.

        Raises:
            RecordError: If one of them is missing or damaged.
        """
        return PrivateBatch.load(private), Upload.load(self.uploads / arm.label / private.name)

    def count(self) -> int:
        """Number of uploads, of all arms."""
        return len(list(self.uploads.glob(f"*/{RECORDS}")))


def simulate(
    config: FederationConfig,
    folder: RunFolder,
    *,
    upload_tensors: Sequence[str] = (),
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Run a federation on this machine and record it.

    Args:
        config: What to run.
        folder: Where uploads and private batches go.
        upload_tensors: Names of the tensors to keep of every upload; empty keeps all.
        on_round: Called at the start of every round.

    Raises:
        FederationError: If the run failed, with the client's or server's error. Uploads of the
            clients that did not fail are there.
    """
    recording = RecordingConfig(
        uploads_folder=str(folder.uploads.resolve()),
        evaluator_folder=str(folder.evaluator.resolve()),
        upload_tensors=tuple(upload_tensors),
    )

    def on_line(line: str) -> None:
        if ROUND.search(line):
            on_round()

    processes = min(provenance.hardware()["cores"], config.clients)
    share = 1 / config.clients if config.device == "cuda" else 0
    resources = Resources(config.clients, processes, cores=1, gpus=share)
    run_app(to_run_config(config, recording), resources, on_line)


@dataclass(frozen=True)
class Resources:
    """What a simulation takes of this machine.

    Attributes:
        clients: Of the federation.
        processes: Clients that work at the same time; each process holds a model.
        cores: For each of them.
        gpus: For each of them, such as 0.25.
    """

    clients: int
    processes: int
    cores: int
    gpus: float

    def sentence(self) -> str:
        """For the user."""
        where = f"on CPU ({_plural(self.cores, 'core')} each)"
        if self.gpus:
            where = f"on {_plural(math.ceil(self.processes * self.gpus), 'GPU')}, {self.gpus:g} GPU each"
        return f"{_plural(self.clients, 'client')}, {self.processes} at a time, {where}"

    def __str__(self) -> str:
        return (
            f"num-supernodes={self.clients} client-resources-num-cpus={self.cores} "
            f"client-resources-num-gpus={self.gpus} init-args-num-cpus={self.processes * self.cores}"
        )


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count > 1 else "")


def run_app(
    run_config: Mapping[str, str | int | float | bool], resources: Resources, on_line: Callable[[str], None]
) -> None:
    """Run our Flower app in a simulation of its own.

    Args:
        run_config: Of the app.
        resources: Of the simulation.
        on_line: Called with every line of the server's log.

    Raises:
        FederationError: If the run failed, with the client's or server's error.
    """
    with PrivateSuperLink() as superlink:
        app = write_app(superlink.home / "app" / "fedmjp")
        path = superlink.home / "run-config.toml"
        path.write_text(as_toml(run_config), encoding="utf-8")
        run = superlink.submit(app, path, str(resources))
        tail: deque[str] = deque(maxlen=200)
        for line in superlink.log(run):
            tail.append(ANSI.sub("", line))
            on_line(tail[-1])
        if superlink.status(run) != COMPLETED:
            raise FederationError(f"the federated run failed: {_error(tail)}")


def _error(lines: Sequence[str]) -> str:
    errors = [line.strip() for line in lines if ERROR.match(line)]
    return (errors or [line for line in lines if line.strip()] or ["no log"])[-1]
