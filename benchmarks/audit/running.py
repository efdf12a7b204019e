"""Run the watched copy of an app on the private SuperLink, within a time limit, and say in one line why it did not."""

import json
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmjp import provenance
from fedmjp.benchmarks.audit.app import App, copy_with_probe
from fedmjp.benchmarks.federation.simulation import Resources
from fedmjp.benchmarks.federation.superlink import PrivateSuperLink
from fedmjp.errors import FederationError

ANSI = re.compile(r"\x1b\[[0-9;]*m")
ERROR = re.compile(r"^\s*[\w.]*(Error|Exception)\b: ")  # in the log of somebody else's app
BUSY = "timed out during startup"
TOO_BUSY = "Flower's simulation did not start within Ray's 30 s: this machine is too busy, run the audit again"
STARTS = 3
GENERIC = "Ending simulation"  # Flower's last words, whatever went wrong
HANGS = "the app hangs"
RUN_CONFIG = "run-config.toml"
PLACE = re.compile(r"\s\(/[^)]*\)")  # where a module was found, in Python's words
POLL_SECONDS = 0.5
# Clients that are tried, one after the other, with how long an app may wait for more of them before it sends anything.
# Flower's own simulation has ten.
TRIED = {2: 20, 10: 120}
NETWORK = re.compile(
    r"ConnectionError|OfflineModeIsEnabled|URLError|getaddrinfo|gaierror|Name or service not known|"
    r"Temporary failure in name resolution|Network is unreachable|Max retries exceeded|LocalEntryNotFound|"
    r"couldn't connect|Couldn't reach|offline|HfHubHTTPError|ProxyError|Connection refused",
    re.IGNORECASE,
)
GPU = re.compile(r"not compiled with CUDA|no NVIDIA driver|CUDA (error|driver)|No CUDA GPUs|nvidia", re.IGNORECASE)


@dataclass(frozen=True)
class Records:
    """What a run left: the server's folder, the evaluator's, and the network as the server knows it."""

    root: Path

    @property
    def server(self) -> Path:
        """Return the folder of what crossed the wire."""
        return self.root / "server"

    @property
    def evaluator(self) -> Path:
        """Return the folder of what hooks saw in clients; no attack is given it."""
        return self.root / "evaluator"

    @property
    def model(self) -> Path:
        """Return the file of the network."""
        return self.root / "model" / "model.pt"

    def wire(self) -> list[dict[str, Any]]:
        """Read every message that crossed the wire, in order."""
        return lines(self.server / "wire.jsonl")

    def stand_ins(self) -> list[dict[str, str]]:
        """List what stood in for data and weights, each once, on whatever side."""
        noted = lines(self.evaluator / "stand-ins.jsonl") + lines(self.server / "stand-ins.jsonl")
        return [dict(pairs) for pairs in dict.fromkeys(tuple(sorted(line.items())) for line in noted)]


@dataclass(frozen=True)
class AppRun:
    """How a run went."""

    clients: int
    seconds: float
    problem: str | None  # in one line: why the app could not be seen to the end
    log: tuple[str, ...] = ()  # the end of Flower's log, where there is a problem


def lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with a line of JSON for each entry.

    Args:
        path: Of the file; it may be missing.
    """
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def play(
    superlink: PrivateSuperLink,
    app: App,
    records: Records,
    settings: Mapping[str, Any],
    *,
    limit: float,
    run_config: Sequence[str] = (),
) -> AppRun:
    """Run a copy of an app with two clients, or with ten where it waits for more.

    Args:
        superlink: That runs it.
        app: The app.
        records: Where everything goes that is seen.
        settings: ``rounds``, ``stand_in``, ``pictures`` of the probe.
        limit: Seconds, after which it is stopped.
        run_config: ``KEY=VALUE`` of the app's run config.
    """
    started = time.monotonic()
    (superlink.home / RUN_CONFIG).write_text("\n".join(run_config), encoding="utf-8")
    tail: deque[str] = deque(maxlen=200)
    for clients, waiting in TRIED.items():
        tail.clear()
        shutil.rmtree(records.root, ignore_errors=True)
        for folder in (records.server, records.evaluator):
            folder.mkdir(parents=True)
        shared = {
            **settings,
            "clients": clients,
            "waiting": waiting,
            "literals": app.literals,
            "enlarges": app.enlarges,
        }
        copy = copy_with_probe(
            app,
            records.root / "app" / "audited",
            {**shared, "folder": str(records.server)},
            {**shared, "folder": str(records.evaluator), "model": str(records.model)},
        )
        ended = _once(superlink, copy, records, clients, limit - (time.monotonic() - started), tail)
        waits = bool(lines(records.server / "waiting.jsonl"))
        if not waits and (replies(records) or ended or _problems(records)):
            break
    seconds = time.monotonic() - started
    if waits:
        return AppRun(clients, seconds, f"the app waits for more than {clients} clients")
    problem = _why_not(records, ended)
    return AppRun(clients, seconds, problem, tuple(tail) if problem else ())


def _why_not(records: Records, ended: str | None) -> str | None:
    """Explain why a run is not complete; a client that failed while others answered does not make it so."""
    if ended is not None and ended.startswith(HANGS):
        return f"{ended}, {_waiting(records)}"
    if not replies(records) and _empty(records):
        return "the app sends nothing: answers to training hold no records"
    if (ended is not None or not replies(records)) and (problems := _problems(records)):
        return said_of(problems[0]["where"], problems[0]["chain"])
    if ended is not None or replies(records):
        return ended
    reasons = [str(line.get("reason")) for line in records.wire() if line["way"] == "up" and "error" in line]
    because = f"clients answer with errors, {one_line(reasons[0])}" if reasons else "no client was asked to train"
    return f"the app sends nothing: {because}"


def _waiting(records: Records) -> str:
    """Describe what an app that hangs was waiting for."""
    answered = {line["reply_to"] for line in records.wire() if line["way"] == "up"}
    open_ones = [line for line in records.wire() if line["way"] == "down" and line["id"] not in answered]
    if not open_ones:
        return "and no client had been asked for anything that was not answered"
    last = open_ones[-1]
    return f"waiting for clients to answer {last['type']} of round {last['round']}"


def _empty(records: Records) -> bool:
    """Tell whether clients answered training, with nothing."""
    return any(line["way"] == "up" and _trains(line) and line.get("records") == {} for line in records.wire())


def _problems(records: Records) -> list[dict[str, Any]]:
    return lines(records.server / "problems.jsonl") + lines(records.evaluator / "problems.jsonl")


def replies(records: Records) -> list[dict[str, Any]]:
    """List answers to training messages that hold something.

    Args:
        records: Folders of the watched run.
    """
    return [line for line in records.wire() if line["way"] == "up" and _trains(line) and line.get("records")]


def _trains(line: Mapping[str, Any]) -> bool:
    return str(line["type"]).partition(".")[0] == "train"


def _once(
    superlink: PrivateSuperLink, copy: Path, records: Records, clients: int, limit: float, tail: deque[str]
) -> str | None:
    """Run until the end, again where Ray alone was too slow; return why the run ended early, else None."""
    deadline = time.monotonic() + limit
    for _ in range(STARTS):
        ended = _started(superlink, copy, records, clients, deadline, tail)
        if ended != TOO_BUSY:
            break
    return ended


def _started(
    superlink: PrivateSuperLink, copy: Path, records: Records, clients: int, deadline: float, tail: deque[str]
) -> str | None:
    cores = min(provenance.hardware()["cores"], clients)
    try:
        run = superlink.submit(copy, superlink.home / RUN_CONFIG, str(Resources(clients, cores, cores=1, gpus=0)))
    except FederationError as error:
        return f"the app does not start: {one_line(str(error))}"
    ended = threading.Event()

    def follow() -> None:
        tail.extend(ANSI.sub("", line) for line in superlink.log(run))
        ended.set()

    threading.Thread(target=follow, daemon=True).start()
    while not ended.wait(POLL_SECONDS):
        if any((records.server / name).exists() for name in ("ended.jsonl", "waiting.jsonl")):
            return None
        if time.monotonic() > deadline:
            return f"{HANGS}: it was stopped at the time limit"
    if superlink.status(run).endswith("completed"):
        return None
    errors = [line.strip() for line in tail if ERROR.match(line) and GENERIC not in line]
    if any(BUSY in line for line in errors):
        return TOO_BUSY
    return f"the app does not start: {one_line((errors or ['its log holds no error'])[0])}"


def said_of(where: str, chain: Sequence[Mapping[str, str]]) -> str:
    """Describe an error and its causes in a line: a missing import, the network, a GPU, or its own text.

    Args:
        where: Side that failed.
        chain: Errors with type and text, the outermost first.
    """
    error = chain[0]
    description = f"{error['type']}: {one_line(error['text'])}" if error["text"] else error["type"]
    everything = " ".join(f"{link['type']} {link['text']}" for link in chain)
    for link in chain:
        if link["type"] in ("ModuleNotFoundError", "ImportError"):
            missing = one_line(PLACE.sub("", link["text"]))
            return f"the app does not install here: its {where} imports what is missing, {missing}"
    if NETWORK.search(everything):
        return f"the app needs the network ({where}: {description}); --stand-in replaces data sets and weights"
    if GPU.search(everything):
        return f"the app needs a GPU ({where}: {description})"
    return f"the app fails ({where}: {description})"


def one_line(text: str) -> str:
    """Return the last line of a text that says something, no longer than a terminal shows.

    Args:
        text: Of any length.
    """
    flat = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason")
    return flat if len(flat) <= 240 else f"{flat[:237]}..."
