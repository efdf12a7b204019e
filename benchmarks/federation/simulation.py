"""One federated run from configuration to recorded uploads."""

import math
import re
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmjp import provenance
from fedmjp.benchmarks.federation.bundle import as_toml, write_app
from fedmjp.benchmarks.federation.connection import GRACE, Connection
from fedmjp.benchmarks.federation.superlink import PrivateSuperLink
from fedmjp.errors import KILLED, OUT_OF_MEMORY, ConfigError, FederationError, QuorumError, RecordError, out_of_memory
from fedmjp.private import PrivateBatch
from fedmjp.records import Upload, load_fields, record_name
from fedmjp.scenario import Scenario, make_run_config
from fedmjp.server.uploads import UploadFolder
from fedmjp.wire import FAILED, PLAYED

ANSI = re.compile(r"\x1b\[[0-9;]*m")
ROUND = re.compile(r"\[ROUND \d+/\d+\] done")
ERROR = re.compile(r"^\s*[\w.]*(Error|Exception)\b: ")
DEAD = re.compile(r"The actor (is dead|died|never ran)\b.*")  # Ray tells at length what may have been
QUORUM = f"{QuorumError.__module__}.{QuorumError.__name__}: "
COMPLETED = "finished:completed"
POLL_SECONDS = 1.0
RECORDS = "round-*.safetensors"
NAME = re.compile(r"round-(\d+)-node-(\d+)\.safetensors")
RunValues = Mapping[str, str | int | float | bool]


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
        """The server's records."""
        return self.root / "uploads"

    @property
    def evaluator(self) -> Path:
        """The evaluator's records."""
        return self.root / "evaluator"

    def clear(self) -> None:
        """Remove former records."""
        for folder in (self.uploads, self.evaluator):
            if folder.exists():
                shutil.rmtree(folder)

    def upload_folder(self, folder: str) -> UploadFolder:
        """The server's records of a scenario, by the name of its folder."""
        return UploadFolder(self.uploads / folder)

    def index(self, scenario: Scenario) -> dict[tuple[str, ...], list[Path]]:
        """Readable private records of a scenario by the pictures behind an upload, in the order of their rounds.

        Of clients whose updates are summed, the path is that of the first one's record.
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
        """A private record and the upload that was computed from it; RecordError if one is missing or damaged."""
        return self.private(scenario, private), Upload.load(self.uploads / scenario.folder / private.name)

    def private(self, scenario: Scenario, path: Path) -> PrivateBatch:
        """What is behind one upload, with that of the clients it is summed with; RecordError if one is damaged."""
        return PrivateBatch.joined([PrivateBatch.load(member) for member in _group(path, scenario)])

    def stands_for_group(self, scenario: Scenario, path: Path) -> bool:
        """Whether a record is that of the first of the clients that are summed."""
        return bool(_group(path, scenario))

    def count(self) -> int:
        """Number of uploads, of all scenarios."""
        return len(list(self.uploads.glob(f"*/{RECORDS}")))


def _group(path: Path, scenario: Scenario) -> list[Path]:
    """Private records of the clients that a record's client is summed with; nothing if it is not the first."""
    matched, together = NAME.fullmatch(path.name), scenario.pipeline.clients
    if matched is None or int(matched[2]) % together:
        return []
    first = int(matched[2])
    return [path.with_name(record_name(int(matched[1]), client)) for client in range(first, first + together)]


def simulate(
    scenarios: Sequence[Scenario],
    folder: RunFolder,
    *,
    upload_tensors: Sequence[str] = (),
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Play scenarios of single batches on this machine and record them.

    Args:
        scenarios: What to play, with one Flower run for those that have as many clients.
        folder: Where uploads and private batches go.
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

    def on_line(line: str) -> None:
        if ROUND.search(line):
            on_round()

    alike: dict[tuple[int, str], list[Scenario]] = {}
    for scenario in scenarios:
        alike.setdefault((scenario.clients, scenario.device), []).append(scenario)
    jobs = []
    for (clients, device), played in alike.items():
        run = make_run_config(
            played,
            uploads_folder=str(folder.uploads.resolve()),
            evaluator_folder=str(folder.evaluator.resolve()),
            upload_tensors=tuple(upload_tensors),
        )
        processes = min(provenance.hardware()["cores"], clients)
        jobs.append((run.flat(), Resources(clients, processes, cores=1, gpus=1 / clients if device == "cuda" else 0)))
    run_app(jobs, on_line)


@dataclass(frozen=True)
class Resources:
    """What a simulation takes of this machine; cores and GPUs are those of each process."""

    clients: int
    processes: int  # clients that work at the same time; each process holds a model
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


def run_app(jobs: Sequence[tuple[RunValues, Resources]], on_line: Callable[[str], None]) -> None:
    """Run our Flower app with each run-config and resources, in one SuperLink, telling every line of the server's log.

    Raises:
        FederationError: If a run failed, with the client's or server's error, after the others.
    """
    failures = []
    with PrivateSuperLink() as superlink:
        app = write_app(superlink.home / "app" / "fedmjp")
        path = superlink.home / "run-config.toml"
        for run_config, resources in jobs:
            path.write_text(as_toml(run_config), encoding="utf-8")
            if failure := follow(superlink, superlink.submit(app, path, str(resources)), on_line):
                failures.append(failure)
    if failures:
        raise failed_of("the federated run failed", failures)


def failed_of(what: str, failures: Sequence[str]) -> FederationError:
    """The error of runs that failed; a QuorumError where one did for want of updates."""
    said = f"{what}: {'; '.join(failure.removeprefix(QUORUM) for failure in failures)}"
    return (QuorumError if any(failure.startswith(QUORUM) for failure in failures) else FederationError)(said)


def follow(connection: Connection, run: str, on_line: Callable[[str], None], *, patience: float = 0) -> str | None:
    """Tell every line of a run's log until it ends; what it failed of, if it did.

    A run that has not ended a minute after its server's last word is over: a client of it hangs.

    Raises:
        FederationError: If the SuperLink does not answer for longer than ``patience`` seconds.
    """
    tail: deque[str] = deque(maxlen=200)
    told, heard = 0, time.monotonic()
    over: float | None = None  # since when
    while True:
        for number, line in enumerate(connection.log(run)):  # from the first one, whenever it is asked for
            if number >= told:
                told, heard = number + 1, time.monotonic()
                tail.append(ANSI.sub("", line))
                on_line(tail[-1])
                if FAILED in line:
                    tail.append(line.partition(FAILED)[2])
                over = heard if FAILED in line or PLAYED in line else over
        try:
            status, heard = connection.status(run), time.monotonic()
        except FederationError:
            if time.monotonic() - heard > patience:
                raise FederationError("the run's SuperLink does not answer any more") from None
            status = "unknown"
        if status.startswith("finished"):
            return None if status == COMPLETED else _error(tail)
        if over is not None and time.monotonic() - over > GRACE:
            return None if any(PLAYED in line for line in tail) else _error(tail)
        time.sleep(POLL_SECONDS)


def _error(lines: Sequence[str]) -> str:
    """What a run failed of: the last error of its log, in words where Ray's or torch's are none."""
    if any(out_of_memory(line) for line in lines):
        return f"a client was {OUT_OF_MEMORY}"
    errors = [line.strip() for line in lines if ERROR.match(line)]
    if not errors:
        last = next((line.strip() for line in reversed(lines) if line.strip()), "none")
        return f"the server's app ended without an error; the last line of its log: {last}"
    error = errors[-1]
    return DEAD.sub(f"its process {KILLED}", error.removeprefix("fedmjp.errors.FederationError: "))
