"""One federated run from configuration to recorded uploads."""

import re
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.federation.bundle import as_toml, write_app
from benchmarks.federation.superlink import PrivateSuperLink
from fedmjp import provenance
from fedmjp.config import FederationConfig, ModelConfig, RecordingConfig, to_run_config
from fedmjp.errors import FederationError, RecordError
from fedmjp.records import load_fields
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

    def index(self, arm: ModelConfig) -> dict[tuple[tuple[str, ...], Picture], Path]:
        """Readable private records of an arm, by the pictures in them and the version in the gradient."""
        found = {}
        for path in sorted((self.evaluator / arm.label).glob(RECORDS)):
            try:
                fields = load_fields(path)
                found[tuple(fields["pictures"]), Picture(fields["gradient_of"])] = path
            except (RecordError, KeyError, TypeError, ValueError):
                continue
        return found

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
    with PrivateSuperLink() as superlink:
        app = write_app(superlink.home / "app" / "fedmjp")
        run_config = superlink.home / "run-config.toml"
        run_config.write_text(as_toml(to_run_config(config, recording)), encoding="utf-8")
        run = superlink.submit(app, run_config, _resources(config))
        tail: deque[str] = deque(maxlen=200)
        for line in superlink.log(run):
            tail.append(ANSI.sub("", line))
            if ROUND.search(line):
                on_round()
        if superlink.status(run) != COMPLETED:
            raise FederationError(f"the federated run failed: {_error(tail)}")


def _resources(config: FederationConfig) -> str:
    share = 1 / config.clients if config.device == "cuda" else 0
    # One process per core, but none that no client could use: each holds a model.
    processes = min(provenance.hardware()["cores"], config.clients)
    return (
        f"num-supernodes={config.clients} client-resources-num-cpus=1 "
        f"client-resources-num-gpus={share} init-args-num-cpus={processes}"
    )


def _error(lines: Sequence[str]) -> str:
    errors = [line.strip() for line in lines if ERROR.match(line)]
    return (errors or [line for line in lines if line.strip()] or ["no log"])[-1]
