"""An audit at the site: training messages of one client are watched inside the app, and examined beside it.

Flower may start a process for every message, so all that is known between two of them is in files. They hold private
batches, stay at the site, readable by their owner alone, and are deleted after the last watched round.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedmjp.benchmarks.audit.audit import examine
from fedmjp.benchmarks.audit.probe import settings, wire
from fedmjp.benchmarks.audit.probe.watching import MessageWatch, watch_torch
from fedmjp.benchmarks.audit.report import write_report
from fedmjp.benchmarks.audit.running import AppRun, Records
from fedmjp.errors import OutputError

RECORDS = "records"
NODE = "node"  # file that says which client is watched, where several share a folder
SECONDS = 900  # that an examination may take
FAILED = "audit-failed.txt"


def begin(output: Path) -> None:
    """Put the patches of torch in place before the app trains.

    Args:
        output: Folder of the report.

    Raises:
        OutputError: If it holds files of somebody else's.
    """
    if output.exists() and not (output / NODE).exists() and any(output.iterdir()):
        raise OutputError(f"{output} holds files that are not from an audit at a site; name another output")
    watch_torch()


def answer_watched(output: Path, rounds: int, message: Message, context: Context, call: ClientAppCallable) -> Message:
    """Answer a training message as the app does, and write the report of the rounds so far.

    Args:
        output: Folder of the report.
        rounds: That are watched.
        message: Of the server.
        context: Of the client.
        call: The app.
    """
    records, node = Records(output / RECORDS), message.metadata.dst_node_id
    number = _count_rounds(output, records, node) + 1
    if number > rounds:
        return call(message, context)
    down = wire.describe_message(message, "down", number, node)
    wire.write_arrays(records.server / f"down-{number}.npz", message)  # before the app, which may change it
    with MessageWatch(records.evaluator, records.model, message) as watch:
        reply = call(message, context)
    watch.keep(reply)
    up = {**wire.describe_message(reply, "up", number, node), "reply_to": message.metadata.message_id}
    settings.note(records.server, wire.FILE, {**down, "file": f"down-{number}.npz"})
    if not reply.has_error():
        wire.write_arrays(records.server / f"up-{number}.npz", reply)
        up["file"] = f"up-{number}.npz"
    settings.note(records.server, wire.FILE, up)
    _examine_apart(output)
    if number == rounds:
        shutil.rmtree(records.root)
    return reply


def _count_rounds(output: Path, records: Records, node: int) -> int:
    """Count this client's watched rounds; so many that none is left where another client is watched, or all are."""
    output.mkdir(parents=True, exist_ok=True)
    try:
        with (output / NODE).open("x", encoding="utf-8") as file:
            file.write(str(node))
        for folder in (records.root, records.server, records.evaluator):
            folder.mkdir(mode=0o700)
    except FileExistsError:
        if (output / NODE).read_text(encoding="utf-8") != str(node) or not records.root.exists():
            return sys.maxsize
    return sum(line["way"] == "down" for line in records.wire())


def _examine_apart(output: Path) -> None:
    """Examine in a process of its own: it can neither disturb the app's training nor end it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    command = [sys.executable, "-m", __spec__.name, str(output)]
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
        reason = process.stderr if process.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        (output / FAILED).write_text(reason, encoding="utf-8")


def _report(output: Path) -> None:
    """Examine what was watched so far and write the report."""
    run = AppRun(clients=1, seconds=0.0, problem=None)
    findings = examine(output.resolve().name, Records(output / RECORDS), run, stand_in=False)
    findings.report["run_config"] = []
    write_report(findings, output, command=f"AuditMod(output={str(output)!r})")


if __name__ == "__main__":
    _report(Path(sys.argv[1]))
