"""Apps that mean harm, in the sandbox of an audit: nothing of theirs reaches the machine, and nothing remains."""

import hashlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from fedmjp.benchmarks.audit import sandbox
from fedmjp.benchmarks.audit.running import said_of
from fedmjp.benchmarks.audit.walls import build_command, clean_environment, find_obstacle
from fedmjp.cli import app
from fedmjp.errors import AppError
from tests.apps import write_app
from tests.processes import wait_until

NEEDLES = ("fedmjp", "audit", "probe")
DAEMON = "86399.25"  # seconds of a sleep, which nobody else sleeps
OBSTACLE = find_obstacle()
needs_sandbox = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))

# Where a name is looked for, in an app as in a process that nobody watches.
SEARCH = """
import os, sys
from pathlib import Path
def search(needles):
    places = [f"module {name}" for name in sys.modules]
    places += [f"environment {name}={value}" for name, value in os.environ.items()]
    places += [f"argument {word}" for word in sys.argv] + [f"path {place}" for place in sys.path]
    frame = sys._getframe()
    while frame is not None:
        places.append(f"frame {frame.f_code.co_filename}")
        frame = frame.f_back
    for folder in {os.getcwd(), *sys.path} - UNWATCHED:
        if os.path.isdir(folder) and not folder.startswith((sys.prefix, sys.base_prefix)):
            places += [f"file {path}" for path in Path(folder).rglob("*")]
    return [place for place in places if any(needle in place.lower() for needle in needles)]
"""
HOSTILE = """
import signal, socket, subprocess, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
UNWATCHED = set({unwatched!r})
{search}
sys.modules["planted_probe"] = sys
named = search({needles!r})
import fedmjp.clients.mods
client, server = ClientApp(), ServerApp()


def succeeds(attempt):
    try:
        attempt()
    except Exception:
        return 0
    return 1


def start_daemon():
    command = "sleep {daemon} >/dev/null 2>&1 & setsid -f sleep {daemon}"
    subprocess.run(["sh", "-c", command], check=True)


@client.train()
def train(message, context):
    tried = {{
        "writes": succeeds(lambda: Path({home!r}, "notes.txt").write_text("changed")),
        "shell": 1 - bool(subprocess.call(["sh", "-c", "echo changed >> {owner}/pyproject.toml"])),
        "reads": succeeds(lambda: Path({home!r}, ".ssh", "id_rsa").read_text()),
        "variable": int("SOME_API_KEY" in os.environ),
        "connects": succeeds(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=2)),
        "session": succeeds(lambda: socket.socket(socket.AF_UNIX).connect({session!r})),
        "daemon": succeeds(start_daemon),
        "new": succeeds(lambda: Path({home!r}, "new.txt").write_text("new")),
        "library": int(hasattr(fedmjp.clients.mods, "defence_mod")),
    }}
    for _ in range(30):
        os.write(1, b"x" * 99_999 + b"\\n")
    named_by_server = list(message.content["server"]["named"])
    return Message(RecordDict({{"tried": ConfigRecord({{f"{{name}} {{end}}": 1 for name, end in tried.items()}}),
        "named": ConfigRecord({{name: 1 for name in [*named, *named_by_server]}})}}), reply_to=message)


@server.main()
def main(grid, context):
    content = RecordDict({{"server": ConfigRecord({{"named": [f"server: {{name}}" for name in named]}})}})
    nodes = []
    while len(nodes) < 2:
        nodes = list(grid.get_node_ids())
    list(grid.send_and_receive([Message(content, dst_node_id=nodes[0], message_type="train")]))
"""


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Open a port of this machine's loopback and a socket in the file system."""
    (tmp_path / "session").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as session:
        session.bind(str(tmp_path / "session" / "bus"))
        session.listen()
        yield port, session


def sleeping() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if DAEMON in (process.info["cmdline"] or ())]


def digests(folder: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


UNWATCHED = f"""
import flwr.clientapp, flwr.serverapp, json, ray, sys, torch
UNWATCHED = set(sys.path)
{SEARCH}
print(json.dumps([sorted(UNWATCHED), search({NEEDLES})]))
"""


@pytest.mark.slow
@needs_sandbox
def test_a_hostile_app_gets_nowhere_and_finds_no_name_of_its_watcher(
    tmp_path: Path, listeners: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_rsa").write_text("private")
    (home / "notes.txt").write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SOME_API_KEY", "1")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    answered = subprocess.run([sys.executable, "-c", UNWATCHED], capture_output=True, text=True, check=True, cwd=home)
    paths, names_of_others = json.loads(answered.stdout.splitlines()[-1])
    folder = tmp_path / "app"
    values = {
        "unwatched": paths, "search": SEARCH, "needles": NEEDLES, "home": str(home), "owner": folder,
        "port": listeners[0].getsockname()[1], "session": listeners[1].getsockname(), "daemon": DAEMON,
    }  # fmt: skip
    write_app(folder, HOSTILE.format(**values))
    before = digests(folder), digests(home)
    command = ["audit", str(folder), "--output", str(tmp_path / "out"), "--rounds", "1", "--sandbox"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2, done.output
    assert "Sandbox: bubblewrap, with no network" in done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["problem"] is None
    assert report["sandbox"]["used"]
    names: dict[str, set[str]] = {"tried": set(), "named": set()}
    for entry in report["leaves"]:
        names[entry["record"]].add(entry["name"])
    assert names["tried"] == {
        "writes 0", "shell 0", "reads 0", "variable 0", "connects 0", "session 0", "daemon 1", "new 1", "library 1"
    }  # fmt: skip
    unusual = {name.removeprefix("server: ") for name in names["named"]} - set(names_of_others)
    assert unusual == {"module planted_probe"}  # the app's own
    assert (digests(folder), digests(home)) == before
    assert not sleeping()


def ask(tmp_path: Path, code: str, *, seconds: float = 60.0) -> object:
    """Run code in place of an audit, within the same walls."""
    (tmp_path / "scratch").mkdir()
    command = [*build_command(tmp_path / "scratch", ()), sys.executable, "-c", code]
    return sandbox._ask(command, {}, tmp_path / "scratch", seconds, lambda _: None)


START_DAEMON = f"import os, subprocess; subprocess.run(['setsid', '-f', 'sleep', '{DAEMON}'], stdout=2); "


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os._exit(0)", "the audit ended without an answer"),
        ("print('nonsense')", "the audit ended without an answer"),
        ("import time; time.sleep(3600)", sandbox.TOO_LATE),
        ("file = open('/tmp/large', 'wb')\nwhile True: file.write(bytes(2**20))", sandbox.TOO_FULL),
        ("while True: os.write(2, bytes(2**20))", sandbox.TOO_FULL),
    ],
)
def test_whatever_ends_an_audit_inside_is_one_line_and_leaves_nothing(
    tmp_path: Path, code: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "DISK_BYTES", 2**28)
    monkeypatch.setattr(sandbox, "WATCH_SECONDS", 0.1)
    with pytest.raises(AppError, match=reason) as raised:
        ask(tmp_path, START_DAEMON + "\n" + code, seconds=2 if "sleep(" in code else 60)
    assert "\n" not in str(raised.value)
    assert not sleeping()


@needs_sandbox
def test_the_sandbox_ends_with_its_owner_however_that_ends(tmp_path: Path) -> None:
    command = [*build_command(tmp_path, ()), "sh", "-c", f"setsid -f sleep {DAEMON}; sleep {DAEMON}"]
    owner = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"])
    wait_until(lambda: len(sleeping()) == 2, seconds=30)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not sleeping(), seconds=30)


@needs_sandbox
def test_an_app_that_needs_the_network_is_told_of_the_sandbox(tmp_path: Path) -> None:
    code = "import urllib.request; urllib.request.urlopen('http://example.org')"
    command = [*build_command(tmp_path, ()), sys.executable, "-c", code]
    failed = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())
    name, _, text = failed.stderr.splitlines()[-1].partition(": ")
    explained = sandbox.explain(said_of("client", [{"type": name, "text": text}]))
    assert "the app needs the network" in str(explained)
    assert "--stand-in" in str(explained)
    assert "--no-sandbox" in str(explained)


def test_without_bubblewrap_the_sandbox_is_refused_or_its_want_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    obstacle = find_obstacle()
    assert obstacle == "bubblewrap (bwrap) is not installed"
    assert "your rights" in sandbox.describe(obstacle)["said"]
    folder = write_app(tmp_path / "app", "")
    done = CliRunner().invoke(app, ["audit", str(folder), "--output", str(tmp_path / "out"), "--sandbox"])
    assert isinstance(done.exception, AppError)
    assert "--sandbox: bubblewrap (bwrap) is not installed" in str(done.exception)
    assert "unsandboxed" in CliRunner().invoke(app, ["audit", "--help"]).output


@needs_sandbox
def test_a_cache_of_hugging_face_can_be_locked_and_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    (cache / "datasets" / "one").mkdir(parents=True)
    (cache / "datasets" / "one" / "data.arrow").write_text("rows")
    (cache / "datasets" / "one.lock").touch()
    (cache / "token").write_text("secret")
    (cache / "link").symlink_to("datasets/one")
    monkeypatch.setenv("HF_HOME", str(cache))
    before = digests(cache)
    code = f"""
import pathlib
from filelock import FileLock
cache = pathlib.Path({str(cache)!r})
with FileLock(cache / "datasets" / "one.lock"):
    print((cache / "link" / "data.arrow").read_text())
for file in ("datasets/one/data.arrow", "token"):
    for cache in (cache, pathlib.Path("/run/huggingface")):
        try:
            print((cache / "token").read_text() if file == "token" else (cache / file).write_text("changed"))
        except OSError as error:
            pass
"""
    (tmp_path / "scratch").mkdir()
    command = [*build_command(tmp_path / "scratch", ()), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["rows"], done.stderr
    assert digests(cache) == before
