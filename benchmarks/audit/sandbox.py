"""Run an audit inside of bubblewrap: no network but a loopback of its own, and nothing of the user's to write to.

The app runs as code of the user's, in Flower's processes and again where its network is attacked. So the whole audit is
inside, down to its private SuperLink, and what it found comes out as plain values on a pipe. Outside, this module
starts it, watches its disk and its time, and reads the pipe; whatever the app started ends with it.
"""

import base64
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch

from fedmjp.benchmarks.audit.audit import Findings, audit
from fedmjp.benchmarks.audit.running import NETWORK, RunOptions, join_run_config
from fedmjp.benchmarks.audit.walls import build_command, clean_environment
from fedmjp.errors import AppError, FedmjpError

MODULE = "fedmjp.benchmarks.audit.sandbox"
KEPT_AWAY = (
    "no network but a loopback of its own, nothing to write to but temporary files, none of your keys and tokens"
)
READ_ONLY = os.strerror(errno.EROFS)
MOST_BYTES = 2**28  # of what an audit found
DISK_BYTES, FREE_BYTES = 16 * 2**30, 2**30  # that an app may fill, and that it must leave free
ATTACK_SECONDS = 3600.0  # beyond the time limit of the app
WATCH_SECONDS = 1.0
TOO_FULL = "the app fills the disk: it was stopped"
TOO_LATE = "the audit did not end within its time: the app may have stopped it"


def audit_inside(
    folder: Path,
    *,
    stand_in: bool,
    rounds: int,
    options: RunOptions,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Audit a Flower app in a sandbox.

    Args:
        folder: Of the app.
        stand_in: Whether bundled pictures and drawn weights stand in for data and weights that cannot be loaded.
        rounds: That are watched.
        options: How it is run.
        on_stage: Called with what begins.

    Raises:
        AppError: If the folder holds no app, the app fills the disk, or the audit ends without an answer.
    """
    place = folder.resolve()
    options = replace(options, run_config=(join_run_config(options.run_config),))
    question = {"folder": str(place), "stand_in": stand_in, "rounds": rounds, "options": asdict(options)}
    scratch = Path(tempfile.mkdtemp(prefix="sandbox-"))
    try:
        command = [*build_command(scratch, [place]), sys.executable, "-P", "-m", MODULE]
        answer = _ask(command, question, scratch, options.limit + ATTACK_SECONDS, on_stage)
    finally:
        _remove(scratch)
    report, pictures = answer["report"], answer["pictures"]
    report["problem"] = explain(report["problem"])
    return Findings(report, tuple(answer["log"]), [(title, [*map(_decode, strip)]) for title, strip in pictures])


def explain(problem: str | None) -> str | None:
    """Add to a problem of an app that it may be one of the sandbox, and what its owner does then.

    Args:
        problem: As the report has it; None where there is none.
    """
    if problem is None:
        return None
    if NETWORK.search(problem):
        return f"{problem}; the sandbox has no network, --no-sandbox gives the app yours"
    if READ_ONLY in problem:
        return f"{problem}; in the sandbox it writes to its working folder and /tmp alone, --no-sandbox lifts that"
    return problem


def describe(obstacle: str | None) -> dict[str, Any]:
    """Describe for a report whether an audit ran in a sandbox, and what that kept from the app.

    Args:
        obstacle: Why there was no sandbox; None where there was.
    """
    if obstacle is None:
        sentence = f"Sandbox: bubblewrap, with {KEPT_AWAY}."
        limit = "what the app does where it has a network and a home that it can write to: the sandbox had neither"
    else:
        sentence = f"No sandbox ({obstacle}): the app has your rights, your files and your network."
        limit = "what the app did on this machine meanwhile: it ran with its user's rights, outside of a sandbox"
    return {"used": obstacle is None, "said": sentence, "limit": limit}


def _ask(
    command: Sequence[str],
    question: Mapping[str, Any],
    scratch: Path,
    seconds: float,
    on_stage: Callable[[str], None],
) -> dict[str, Any]:
    """Run the audit inside, hand on its stages, and return what it found.

    Raises:
        AppError: If it fails of the app, or ends without an answer.
    """
    reasons: list[str] = []
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C reaches us alone
        )
        watch = threading.Thread(target=_watch, args=(process, scratch, errors, seconds, reasons), daemon=True)
        watch.start()
        try:
            answer = _converse(process, question, on_stage)
        finally:
            process.kill()  # the first process of the namespace dies with it, and everything else with that
            process.wait()
            watch.join()
        if answer is None:
            errors.seek(max(errors.seek(0, os.SEEK_END) - 2000, 0))
            words = errors.read().decode(errors="replace").strip().splitlines()
            reason = f"{words[-1][:200]!a}" if words else f"exit code {process.returncode}"
            raise AppError((reasons or [f"the audit ended without an answer, as where the app ends it ({reason})"])[0])
    if "error" in answer:
        raise AppError(str(answer["error"]))
    if "crash" in answer:
        crash = RuntimeError(str(answer["crash"]))
        crash.add_note(str(answer["traceback"]))
        raise crash
    return answer


def _converse(
    process: "subprocess.Popen[bytes]", question: Mapping[str, Any], on_stage: Callable[[str], None]
) -> dict[str, Any] | None:
    """Write the question and read answers, of which the last one that is no stage counts; None if there is none."""
    assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 (pipes were asked for)
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(question).encode())
        process.stdin.close()
    while line := process.stdout.readline(MOST_BYTES):
        try:
            answer = json.loads(line)
        except ValueError:
            return None
        if not isinstance(answer, dict):
            return None
        if "stage" not in answer:
            return answer
        on_stage(str(answer["stage"])[:200])
    return None


def _watch(
    process: "subprocess.Popen[bytes]", scratch: Path, errors: IO[bytes], seconds: float, reasons: list[str]
) -> None:
    """End an audit whose app fills the disk, or that takes longer than it may, and note the reason."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        filled = sum(_sizes(scratch)) + os.fstat(errors.fileno()).st_size
        if filled > DISK_BYTES or shutil.disk_usage(scratch).free < FREE_BYTES:
            reasons.append(TOO_FULL)
        elif time.monotonic() > deadline:
            reasons.append(TOO_LATE)
        if reasons:
            process.kill()
            return
        time.sleep(WATCH_SECONDS)


def _sizes(folder: Path) -> Iterator[int]:
    """Yield the bytes that each file of a folder takes on the disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield Path(place, name).lstat().st_blocks * 512


def _remove(folder: Path) -> None:
    """Remove a folder, also what its owner took the rights from."""
    for place, folders, _ in os.walk(folder):
        for name in folders:
            path = Path(place, name)
            if not path.is_symlink():
                with suppress(OSError):
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _encode(picture: torch.Tensor) -> dict[str, Any]:
    values = picture.detach().cpu().float().contiguous()
    return {"shape": list(values.shape), "values": base64.b64encode(values.numpy().tobytes()).decode()}


def _decode(picture: Mapping[str, Any]) -> torch.Tensor:
    content = bytearray(base64.b64decode(picture["values"]))
    return torch.frombuffer(content, dtype=torch.float32).reshape(picture["shape"])


def main() -> None:
    """Answer the question on standard input: audit, and write stages and findings to standard output, a line each."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)  # what the app's own classes print is no answer

        def answer(**values: Any) -> None:
            output.write(json.dumps(values) + "\n")
            output.flush()

        question = json.load(sys.stdin)
        try:
            findings = audit(
                Path(question["folder"]),
                stand_in=question["stand_in"],
                rounds=question["rounds"],
                options=RunOptions(**question["options"]),
                on_stage=lambda sentence: answer(stage=sentence),
            )
            pictures = [(title, [*map(_encode, strip)]) for title, strip in findings.strips]
            answer(report=findings.report, log=findings.log, pictures=pictures)
        except FedmjpError as error:
            answer(error=str(error))
        except Exception as error:  # noqa: BLE001 (of the audit itself: said outside, with its traceback)
            answer(crash=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


if __name__ == "__main__":
    main()
