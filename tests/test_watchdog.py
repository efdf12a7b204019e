"""A SuperNode's process ends with its loop, in one line, and whenever it is asked to."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse, RegisterNodeFleetResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse

from fedmjp.benchmarks.deployment import checking
from fedmjp.benchmarks.deployment.creating import create
from fedmjp.benchmarks.deployment.layout import DeploymentConfig, as_yaml
from fedmjp.benchmarks.federation.connection import environment, free_port
from tests.processes import wait_until
from tests.test_cli import run

SECONDS = 60  # in which a supervisor must hear of the end
NOWHERE = "fl.nowhere.invalid"


@contextmanager
def stub_superlink(pulls: threading.Event, *, fails: bool) -> Iterator[int]:
    """Answer a SuperNode that there are no messages, or by HTTP 500, as where the database is locked."""
    answers = {
        "register-node": RegisterNodeFleetResponse(node_id=7),
        "activate-node": ActivateNodeResponse(node_id=7),
        "send-node-heartbeat": SendNodeHeartbeatResponse(success=True),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            name = self.path.rpartition("/")[2]
            is_pull = name == "pull-messages"
            content = answers.get(name, PullMessagesResponse()).SerializeToString()
            self.send_response(500 if is_pull and fails else 200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            if is_pull:
                pulls.set()

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("fails", [True, False])
def test_a_supernode_ends_with_its_loop_and_when_it_is_asked(tmp_path: Path, fails: bool) -> None:
    (tmp_path / "policy.yaml").write_text("ledger: gate.jsonl\n")
    pulls, log = threading.Event(), tmp_path / "node.log"
    command = [sys.executable, "-P", "-m", "fedmjp", "supernode", "--policy", str(tmp_path / "policy.yaml"), "--"]
    with stub_superlink(pulls, fails=fails) as port, log.open("wb") as output:
        command += ["--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(tmp_path / "home"), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            assert pulls.wait(SECONDS), log.read_text()
            started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            if not fails:
                process.terminate()
            assert process.wait(SECONDS) == (1 if fails else 0), log.read_text()
            wait_until(lambda: not any(child.is_running() for child in started), seconds=SECONDS)
        finally:
            process.kill()
            process.wait()
    errors = [line for line in log.read_text().splitlines() if line.startswith("Error: ")]
    assert len(errors) == fails
    assert not fails or "the SuperNode's loop ended by the error that its log names" in errors[0]
    assert ("Server error '500" in log.read_text()) == fails


LOOP = """
import signal, socket, sys, threading, time
from fedmjp.clients.gate import watchdog
watchdog.STUCK_SECONDS, watchdog.STOP_SECONDS, watchdog.POLL_SECONDS = 2.0, 1.0, 0.2
threading.Thread(target=threading.Event().wait).start()  # another thread that keeps the process
def deaf(): signal.signal(signal.SIGTERM, lambda *_: None); print("here", flush=True)
def stuck(): print("here", flush=True); ends = socket.socketpair(); ends[0].recv(1)
def idle():
    deaf()
    while True: time.sleep(0.3)
def runtime():
    threading.Thread(target=time.sleep, args=(1,), name=watchdog.RUNTIME_THREAD).start()
    idle()
def fails(): print("here", flush=True); raise ValueError("first\\nsecond \\x1b[31m")
def leaves(): print("here", flush=True); sys.exit(3)
watchdog.run_to_the_end({loop})
"""


@pytest.mark.parametrize(
    ("loop", "is_stopped", "code", "words"),
    [
        ("stuck", False, 1, "did nothing for 2 s"),
        ("idle", True, 1, "did not stop within 1 s of a signal"),
        ("runtime", False, 1, "server for its apps ended"),
        ("fails", False, 1, "loop failed (ValueError: first)"),
        ("leaves", False, 3, ""),
    ],
)
def test_whatever_becomes_of_the_loop_the_process_ends(loop: str, is_stopped: bool, code: int, words: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP.replace("{loop}", loop)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        if is_stopped:
            time.sleep(3)  # longer than what counts as stuck: it sleeps, and looks now and then
            process.send_signal(signal.SIGSTOP)
            time.sleep(2.5)  # a process that was stopped is not stuck
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            assert process.poll() is None
            process.terminate()
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, errors
    lines = [line for line in errors.splitlines() if "Error" in line]
    assert len(lines) == bool(words), errors
    assert words in errors


def test_a_server_whose_name_does_not_resolve_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = create(tmp_path / "hospital", DeploymentConfig(sites=("a",), host=NOWHERE, state=tmp_path / "state"))
    (tmp_path / "policy.yaml").write_text(as_yaml({"ledger": "gate.jsonl"}))
    (tmp_path / "pictures").mkdir()
    for arguments in (
        ["supernode", "--policy", str(tmp_path / "policy.yaml"), "--", "--insecure", "--superlink", f"{NOWHERE}:8443"],
        ["deploy", "node", str(deployment.site("a").root), "--data", str(tmp_path / "pictures")],
    ):
        assert run(monkeypatch, *arguments) == 1
        printed = capsys.readouterr().err
        assert f"the server's name '{NOWHERE}' does not resolve" in " ".join(printed.split())
        assert printed.count("\n") == 1
    intrusion = next(checking._intrusions(deployment))
    assert intrusion.outcome == "could not be tried"
    assert f"'{NOWHERE}' does not resolve" in intrusion.line
