"""A Ray that a command starts for itself: it listens on this machine alone, and answers those who know its secret.

Ray by itself listens on every interface and runs the code of whoever connects, as the user that started it.
"""

import secrets
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from fedmjp.errors import FedmjpError

FIRST = Version("2.52")  # Ray with token authentication
SOCKET_BYTES = 107  # that Linux has for the path of a socket
SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # what Ray puts below a folder
USUAL = "/tmp"  # noqa: S108 (mkdtemp makes a private folder in it)
CLOSED = "simulate, record, audit and campaign --workers start it on 127.0.0.1 alone, with a secret of the run"


class RayError(FedmjpError):
    """Ray cannot be started, or ended under a run. Remedy: see the message; what was finished is kept."""


def environment() -> dict[str, str]:
    """Build the variables with which Ray closes itself off, with a secret that nobody had before.

    The secret is in the environment of the processes of one run, and ends with them.

    Raises:
        RayError: If the installed Ray would ignore them.
    """
    if reason := weakness():
        raise RayError(reason)
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # this machine's address is then 127.0.0.1, on Linux as well
    }


def weakness() -> str:
    """Say why a Ray of this installation cannot be closed off; empty if it can."""
    try:
        installed = version("ray")
    except PackageNotFoundError:
        return "Ray is not installed; pip install 'flwr[simulation]'"
    if Version(installed) < FIRST:
        return f"Ray {installed} runs the code of whoever connects; pip install 'ray>={FIRST}'"
    return ""


def socket_folder(prefix: str) -> Path:
    """Make a folder that this user alone reads, with a path that leaves room for the sockets of Ray.

    Args:
        prefix: Of its name.

    Raises:
        RayError: If no temporary folder can be written that has such a path.
    """
    for parent in (USUAL, tempfile.gettempdir()):
        try:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except OSError:
            continue
        if len(f"{folder}{SOCKET}") <= SOCKET_BYTES:
            return folder
        folder.rmdir()
    room = SOCKET_BYTES - len(SOCKET) - len(prefix) - len("/12345678")
    raise RayError(
        f"Ray's sockets need a folder to write into whose path has {room} letters at most, as neither {USUAL} "
        f"nor {tempfile.gettempdir()} is; set TMPDIR"
    )
