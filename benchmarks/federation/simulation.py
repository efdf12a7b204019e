"""One federated run from configuration to recorded uploads."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedmjp.benchmarks.federation.bundle import as_toml, write_app
from fedmjp.benchmarks.federation.following import follow, join_errors
from fedmjp.benchmarks.federation.superlink import PrivateSuperLink
from fedmjp.config import RunConfig
from fedmjp.errors import ConfigError, RecordError
from fedmjp.files import remove_files
from fedmjp.private import PrivateBatch
from fedmjp.provenance import hardware
from fedmjp.records import Upload, load_fields, record_name
from fedmjp.scenario import Scenario, make_run_config
from fedmjp.server.events import Event, EventReader
from fedmjp.server.uploads import UploadFolder
from fedmjp.wire import EVENTS, RECORD_FILES

RECORDS = "round-*.safetensors"
NAME = re.compile(r"round-(\d+)-node-(\d+)\.safetensors")


@dataclass(frozen=True)
class RunFolder:
    """Records of one federated run: what the server kept, and what clients left for the evaluator.

    The two lie side by side, a folder per scenario in each, and share file names (round and client), which is how a
    score finds its private picture; of clients whose updates are summed, the upload has the name of the first.
    Server-side code is given ``uploads`` alone.
    """

    root: Path

    @property
    def uploads(self) -> Path:
        """Return the folder of the server's records."""
        return self.root / "uploads"

    @property
    def evaluator(self) -> Path:
        """Return the folder of the evaluator's records."""
        return self.root / "evaluator"

    @property
    def events(self) -> Path:
        """Return the file to which the server's app appends its events."""
        return self.root / EVENTS

    @property
    def completed(self) -> Path:
        """Return the file that names the trials whose records are whole."""
        return self.root / "completed.json"

    def clear(self) -> None:
        """Remove former records, by their names alone."""
        for path in (self.events, self.completed):
            path.unlink(missing_ok=True)
        for folder in (self.uploads, self.evaluator):
            remove_files(folder, RECORD_FILES)
        with suppress(OSError):  # what lies there is not ours
            self.root.rmdir()

    def upload_folder(self, folder: str) -> UploadFolder:
        """Return the server's records of a scenario.

        Args:
            folder: Name of the scenario's folder.
        """
        return UploadFolder(self.uploads / folder)

    def index(self, scenario: Scenario) -> dict[tuple[str, ...], list[Path]]:
        """Map the pictures behind each upload to their readable private records, in the order of rounds.

        For clients whose updates are summed, the path is that of the first client's record.

        Args:
            scenario: Of the records.
        """
        paths: dict[tuple[str, ...], list[Path]] = {}
        for path in sorted((self.evaluator / scenario.folder).glob(RECORDS)):
            try:
                fields = [load_fields(member) for member in _group(path, scenario)]
                names = tuple(str(name) for record in fields for name in record["pictures"])
            except (RecordError, KeyError, TypeError):
                continue
            if names:
                paths.setdefault(names, []).append(path)
        return paths

    def record(self, scenario: Scenario, private: Path) -> tuple[PrivateBatch, Upload]:
        """Load a private record and the upload that was computed from it.

        Args:
            scenario: Of the records.
            private: Path of the private record.

        Raises:
            RecordError: If one is missing or damaged.
        """
        return self.private(scenario, private), Upload.load(self.uploads / scenario.folder / private.name)

    def private(self, scenario: Scenario, path: Path) -> PrivateBatch:
        """Load the private batch behind an upload, joined with those of the clients that it is summed with.

        Args:
            scenario: Of the records.
            path: Of the (first client's) private record.

        Raises:
            RecordError: If one is damaged.
        """
        return PrivateBatch.joined([PrivateBatch.load(member) for member in _group(path, scenario)])

    def stands_for_group(self, scenario: Scenario, path: Path) -> bool:
        """Tell whether a record is that of the first of the clients that are summed.

        Args:
            scenario: Of the records.
            path: Of a private record.
        """
        return bool(_group(path, scenario))

    def count(self) -> int:
        """Count the uploads of all scenarios."""
        return len(list(self.uploads.glob(f"*/{RECORDS}")))


def _group(path: Path, scenario: Scenario) -> list[Path]:
    """List the private records of the clients that a record's client is summed with; none if it is not the first."""
    matched, size = NAME.fullmatch(path.name), scenario.pipeline.clients
    if matched is None or int(matched[2]) % size:
        return []
    first = int(matched[2])
    return [path.with_name(record_name(int(matched[1]), client)) for client in range(first, first + size)]


def simulate(
    scenarios: Sequence[Scenario],
    folder: RunFolder,
    *,
    upload_tensors: Sequence[str] = (),
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Play scenarios of single batches on this machine and record them.

    Args:
        scenarios: Played with one Flower run for those that have as many clients.
        folder: Gets uploads, private batches and events.
        upload_tensors: Names of the tensors to keep of every upload; empty keeps all.
        on_round: Called after every round.

    Raises:
        ConfigError: If two scenarios would leave their records in one folder.
        FederationError: If the run failed, with the client's or server's error. Uploads of the
            clients that did not fail are there.
    """
    for name, count in Counter(scenario.folder for scenario in scenarios).items():
        if count > 1:
            raise ConfigError(f"{count} scenarios would leave their records in {name}; play them in runs of their own")

    def on_event(event: Event) -> None:
        if event.kind == "round done":
            on_round()

    groups: dict[tuple[int, str], list[Scenario]] = {}
    for scenario in scenarios:
        groups.setdefault((scenario.clients, scenario.device), []).append(scenario)
    jobs = []
    for (clients, device), played in groups.items():
        run = make_run_config(
            played,
            uploads_folder=str(folder.uploads.resolve()),
            evaluator_folder=str(folder.evaluator.resolve()),
            events_file=str(folder.events.resolve()),
            upload_tensors=tuple(upload_tensors),
        )
        processes = min(hardware()["cores"], clients)
        jobs.append((run, Resources(clients, processes, cores=1, gpus=1 / clients if device == "cuda" else 0)))
    run_app(jobs, on_event)


@dataclass(frozen=True)
class Resources:
    """The share of this machine that a simulation takes; cores and GPUs are those of each process."""

    clients: int
    processes: int  # clients that work at the same time; each process holds a model
    cores: int
    gpus: float

    def sentence(self) -> str:
        """Describe the resources for the user."""
        where = f"on CPU ({_plural(self.cores, 'core')} each)"
        if self.gpus:
            where = f"on {_plural(math.ceil(self.processes * self.gpus), 'GPU')}, {self.gpus:g} GPU each"
        return f"{_plural(self.clients, 'client')}, {self.processes} at a time, {where}"

    def __str__(self) -> str:
        return (
            f"num-supernodes={self.clients} client-resources-num-cpus={self.cores} "
            f"client-resources-num-gpus={self.gpus} init-args-num-cpus={self.processes * self.cores}"
        )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count > 1 else "")


def run_app(jobs: Sequence[tuple[RunConfig, Resources]], on_event: Callable[[Event], None]) -> None:
    """Run our Flower app once per job, one after another in one SuperLink.

    Args:
        jobs: Configuration and resources of each run; the configuration names its file of events.
        on_event: Called with every event of the runs.

    Raises:
        FederationError: If a run failed, with the client's or server's error, after the other runs.
    """
    errors = []
    with PrivateSuperLink() as superlink:
        app = write_app(superlink.home / "app" / "fedmjp")
        path = superlink.home / "run-config.toml"
        for run_config, resources in jobs:
            path.write_text(as_toml(run_config.flat()), encoding="utf-8")
            Path(run_config.events_file).parent.mkdir(parents=True, exist_ok=True)
            events = EventReader(Path(run_config.events_file))
            if error := follow(superlink, superlink.submit(app, path, str(resources)), events, on_event):
                errors.append(error)
    if errors:
        raise join_errors("the federated run failed", errors)
