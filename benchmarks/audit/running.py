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
from fedmjp.benchmarks.audit.app import CODE, App, copy_with_probe, read_values
from fedmjp.benchmarks.federation.simulation import Resources
from fedmjp.benchmarks.federation.superlink import PrivateSuperLink
from fedmjp.errors import FederationError

ANSI = re.compile(r"\x1b\[[0-9;]*m")
# In the log of somebody else's app; lines of source and docstrings, which a log may quote, are indented.
ERROR = re.compile(r"^[\w.]*(Error|Exception)\b: \S")
BUSY = "timed out during startup"
TOO_BUSY = "Flower's simulation did not start within Ray's 30 s: this machine is too busy, run the audit again"
STARTS = 3
GENERIC = "Ending simulation"  # Flower's last words, whatever went wrong
HANGS = "the app hangs"
RUN_CONFIG = "run-config.toml"
LOG = "flower.log"  # in the report's folder
PLACE = re.compile(r"\s\(/[^)]*\)")  # where a module was found, in Python's words
POLL_SECONDS = 0.5
# Clients that are tried first, and where an app waits for more without a word of how many; Flower's simulation has ten.
FEW, MANY = 2, 10
MOST = 100  # clients of an app that says how many it waits for
WAITING_SECONDS = 60  # that an app may ask for clients before it sends anything
NETWORK = re.compile(
    r"ConnectionError|OfflineModeIsEnabled|URLError|getaddrinfo|gaierror|Name or service not known|"
    r"Temporary failure in name resolution|Network is unreachable|Max retries exceeded|LocalEntryNotFound|"
    r"couldn't connect|Couldn't reach|offline|HfHubHTTPError|ProxyError|Connection refused",
    re.IGNORECASE,
)
COUNTS = re.compile(r"supernode|\b(node|client|participant|partition|part(y|ie)|silo|site)s?\b", re.IGNORECASE)
INTEGER = re.compile(r"(?<![\w.])\d{1,3}(?!\w|\.\d)")
WANTED = re.compile(r"\b(node|run)_config\[")  # in the line of the app that failed
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

    @property
    def code(self) -> Path:
        """Return the folder of the app's copy."""
        return self.root / "app" / CODE

    def wire(self) -> list[dict[str, Any]]:
        """Read every message that crossed the wire, in order."""
        return lines(self.server / "wire.jsonl")

    def stand_ins(self) -> list[dict[str, str]]:
        """List what stood in for data and weights, each once, on whatever side."""
        noted = lines(self.evaluator / "stand-ins.jsonl") + lines(self.server / "stand-ins.jsonl")
        return [dict(pairs) for pairs in dict.fromkeys(tuple(sorted(line.items())) for line in noted)]


@dataclass(frozen=True)
class RunOptions:
    """How an app is run, as its owner asks for it."""

    limit: float = 900.0  # seconds, after which it is stopped
    clients: int | None = None  # None takes two, or as many as the app waits for
    run_config: Sequence[str] = ()  # KEY=VALUE or files of TOML, as of `flwr run`
    node_config: Sequence[str] = ()  # KEY=VALUE that every client finds in its node's config


@dataclass(frozen=True)
class AppRun:
    """How a run went."""

    clients: int
    seconds: float
    problem: str | None  # in one line: why the app could not be seen to the end
    log: tuple[str, ...] = ()  # where there is a problem: the app's traceback, and the end of Flower's log


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
    options: RunOptions,
) -> AppRun:
    """Run a copy of an app with two clients, or with as many as it waits for.

    Args:
        superlink: That runs it.
        app: The app.
        records: Where everything goes that is seen.
        settings: ``rounds``, ``stand_in``, ``pictures`` of the probe.
        options: How it is run.

    Raises:
        AppError: If a value of the node's config has no key.
    """
    started, owned = time.monotonic(), _states(app.folder)
    (superlink.home / RUN_CONFIG).write_text(join_run_config(options.run_config), encoding="utf-8")
    tail: deque[str] = deque(maxlen=200)
    number, requested, played = options.clients or FEW, 0, set[int]()
    while True:
        tail.clear()
        shutil.rmtree(records.root, ignore_errors=True)
        for folder in (records.server, records.evaluator):
            folder.mkdir(parents=True)
        shared = {
            **settings,
            "node_config": read_values(options.node_config),
            "clients": number,
            "waiting": WAITING_SECONDS,
            "literals": app.literals,
            "enlarges": app.enlarges,
        }
        copied = copy_with_probe(
            app,
            records.code.parent,
            {**shared, "folder": str(records.server)},
            {**shared, "folder": str(records.evaluator), "model": str(records.model)},
        )
        ended = _once(superlink, copied.bundle, records, number, options.limit - (time.monotonic() - started), tail)
        played.add(number)
        waits = lines(records.server / "waiting.jsonl")
        requested = max((int(line["wanted"]) for line in waits), default=0)
        another = None if options.clients else _another_number(records, app, number, requested, ended)
        if another is None or another in played:
            break
        number = another
    seconds = time.monotonic() - started
    if waits:
        count = f"{requested} clients and {number} are there" if requested else f"more than {number} clients"
        return AppRun(number, seconds, f"the app waits for {count}: name their number by --clients")
    problem = _why_not(records, ended)
    if problem is None and _states(app.folder) != owned:
        problem = f"files of {app.folder} changed while the audit ran: the app writes there, or somebody else did"
    traces = [line["traceback"] for line in _problems(records)[:3]]
    if problem and traces:
        problem = f"{problem} (the app's traceback is in {LOG})"
    return AppRun(number, seconds, problem, (*traces, *tail) if problem else ())


def _another_number(records: Records, app: App, number: int, requested: int, ended: str | None) -> int | None:
    """Choose how many clients an app is run with once more; None where its run was not short of them.

    It is the number that it waits for or that its error names beside the given one, else the one of its own README
    where it failed of itself, else ten where it asked nobody.
    """
    if lines(records.server / "waiting.jsonl"):
        more = min(requested, MOST) if requested else MANY
        return more if more > number else None
    if replies(records) or (ended or "").startswith(HANGS):
        return None
    if problems := _problems(records):
        return count_in_error(problems[0]["chain"][0]["text"], number) or _stated_clients(app, problems[0]["chain"])
    # A client that only evaluates was not drawn for training, of which there may be too few.
    return None if ended or answers_with_data(records) or number >= MANY else MANY


def _stated_clients(app: App, chain: Sequence[Mapping[str, str]]) -> int | None:
    """Return the number of clients that an app's README names, where the app failed of itself with another one."""
    if not said_of("", chain).startswith("the app fails"):  # but of a missing import, value, network or GPU
        return None
    return app.stated_clients if (app.stated_clients or MOST) <= MANY else None


def count_in_error(text: str, number: int) -> int | None:
    """Read the number of clients that an error names beside the given one; None if it names none, or several.

    Args:
        text: Of the error, as "the number of splits must equal the number of nodes (got 3 vs. 2)".
        number: Of clients that were there.
    """
    counts = {int(digits) for digits in INTEGER.findall(text)}
    if COUNTS.search(text) is None or number not in counts or len(counts) != 2:
        return None
    count = sum(counts) - number
    return count if 0 < count <= MOST else None


def join_run_config(texts: Sequence[str]) -> str:
    """Join texts of a run config, files of TOML among them, as `flwr run` takes them.

    Args:
        texts: ``KEY=VALUE``, or paths of files of TOML.
    """
    return "\n".join(
        Path(text).read_text(encoding="utf-8") if text.endswith(".toml") and Path(text).is_file() else text
        for text in texts
    )


def _states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of every file of an app, by its path."""
    return {
        str(path): (state.st_size, state.st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_symlink() and path.is_file()
        for state in (path.stat(),)
    }


def _why_not(records: Records, ended: str | None) -> str | None:
    """Explain why a run is not complete; a client that failed while others answered does not make it so."""
    if ended is not None and ended.startswith(HANGS):
        return f"{ended}, {_waiting(records)}"
    if not replies(records) and _empty(records):
        return "the app sends nothing: answers to training hold no records"
    if (ended is not None or not replies(records)) and (problems := _problems(records)):
        reason = said_of(problems[0]["where"], problems[0]["chain"])
        is_of_clients = COUNTS.search(problems[0]["chain"][0]["text"]) is not None
        return f"{reason}; if it needs another number of clients, name it by --clients" if is_of_clients else reason
    if ended is not None or replies(records) or answers_with_data(records):
        return ended
    reasons = [str(line.get("reason")) for line in records.wire() if line["way"] == "up" and "error" in line]
    if reasons:
        because = f"clients answer with errors, {one_line(reasons[0])}"
    elif lines(records.server / "ended.jsonl"):
        return "no client was asked to train: answers to other messages are listed, and no update was seen"
    else:
        because = "its server's process ended before anything was sent, as by an exit in its code"
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


def answers_with_data(records: Records) -> bool:
    """Tell whether an answer to a message of another kind than training and evaluation holds records.

    Args:
        records: Folders of the watched run.
    """
    answered = [line for line in records.wire() if line["way"] == "up" and line.get("records")]
    return any(line["type"].partition(".")[0] not in ("train", "evaluate") for line in answered)


def _problems(records: Records) -> list[dict[str, Any]]:
    problems = lines(records.server / "problems.jsonl") + lines(records.evaluator / "problems.jsonl")
    return sorted(problems, key=lambda problem: float(problem["time"]))  # a server may fail of what a client did


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
    errors = [line.strip() for line in reversed(tail) if ERROR.match(line) and GENERIC not in line]
    if any(BUSY in line for line in errors):
        return TOO_BUSY
    return (
        f"the app does not start: {one_line((errors or ['a process of it ended without an error, as by an exit'])[0])}"
    )


def said_of(where: str, chain: Sequence[Mapping[str, str]]) -> str:
    """Describe an error and its causes in a line: a missing import, the network, a GPU, or its own text.

    Args:
        where: Side that failed.
        chain: Errors with type and text, the outermost first.
    """
    error = chain[0]
    description = f"{error['type']}: {one_line(error['text'], last=False)}" if error["text"] else error["type"]
    everything = " ".join(f"{link['type']} {link['text']}" for link in chain)
    for link in chain:
        if link["type"] in ("ModuleNotFoundError", "ImportError"):
            missing = one_line(PLACE.sub("", link["text"]))
            return f"the app does not install here: its {where} imports what is missing, {missing}"
    if missing_key := WANTED.search(error.get("line", "")) if error["type"] == "KeyError" else None:
        option = f"--{missing_key[1]}-config {error['text'].strip(chr(39))}=VALUE"
        return f"the app wants a value that its owner gives ({where}: {description}): give it by {option}"
    if NETWORK.search(everything):
        return f"the app needs the network ({where}: {description}); --stand-in replaces data sets and weights"
    if GPU.search(everything):
        return f"the app needs a GPU ({where}: {description})"
    return f"the app fails ({where}: {description})"


def one_line(text: str, *, last: bool = True) -> str:
    """Return a line of a text that says something, no longer than a terminal shows.

    Args:
        text: Of any length.
        last: Whether it is the last one, as of a traceback; else the first one, as of an error's text.
    """
    sentences = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason"]
    flat = sentences[-1 if last else 0]
    return flat if len(flat) <= 240 else f"{flat[:237]}..."
