"""The walls around an audited app, as bubblewrap builds them.

Inside, the system is read-only, the network is a loopback of its own, and temporary folders and the user's home are
empty but for what an app reads there: data, caches and packages.
"""

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import fedmjp

PROGRAM = "bwrap"
WALLS = (
    "--die-with-parent", "--new-session", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc",
    "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL", "--ro-bind", "/", "/", "--dev", "/dev",
    "--proc", "/proc",
)  # fmt: skip
TEMPORARY = "/tmp"  # noqa: S108 (inside: a folder of the audit's own)
EMPTIED = ("/var/tmp", "/run")  # noqa: S108 (sockets of the user's session are there)
# What of a home's hidden files an app may read: caches of data and weights, and packages. Keys and tokens stay hidden.
READ_IN_HOME = (".cache", ".keras", ".medmnist", ".local/lib")
CACHES = ("HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "TORCH_HOME", "XDG_CACHE_HOME", "KERAS_HOME")
TOKENS = ("token", "stored_tokens")  # of Hugging Face, in its cache
HUGGING_FACE = "/run/huggingface"  # where the cache lies that links lead to
SECRET = re.compile(
    r"TOKEN(?!IZERS)|SECRET|PASSW|API_?KEY|ACCESS_KEY|CREDENTIAL|AUTH_SOCK|DBUS|DATABASE|RUNTIME_DIR|^_$|^TMPDIR$"
)
TRY_SECONDS = 20


def find_obstacle() -> str | None:
    """Say why no app can be run in a sandbox on this machine; None where one can."""
    if shutil.which(PROGRAM) is None:
        return f"bubblewrap ({PROGRAM}) is not installed"
    with tempfile.TemporaryDirectory() as scratch:
        command = [*build_command(Path(scratch), ()), "true"]
        try:
            trial = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TRY_SECONDS)
        except subprocess.TimeoutExpired:
            return f"bubblewrap does not end here within {TRY_SECONDS} s"
    reason = (trial.stderr.strip().splitlines() or ["it gives no reason"])[-1]
    return None if trial.returncode == 0 else f"bubblewrap does not work here ({reason})"


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what holds secrets, or leads to the user's session."""
    return {name: value for name, value in os.environ.items() if not SECRET.search(name.upper())}


def build_command(scratch: Path, readable: Sequence[Path]) -> list[str]:
    """Build the command of the sandbox: everything read-only, homes and temporary folders replaced by empty ones.

    Args:
        scratch: Folder on the disk for what is written inside.
        readable: What must be seen inside, wherever it lies.
    """
    (scratch / "tmp").mkdir(exist_ok=True)
    command = [PROGRAM, *WALLS, "--bind", str(scratch / "tmp"), TEMPORARY]
    command += [word for place in EMPTIED for word in ("--tmpfs", place)]
    homes = {Path.home(), Path(pwd.getpwuid(os.getuid()).pw_dir)}
    homes = {home.resolve() for home in homes if os.access(home, os.R_OK) and home.resolve() != Path("/")}
    for number, home in enumerate(sorted(homes)):
        empty = scratch / f"home-{number}"
        empty.mkdir(exist_ok=True)
        command += ["--bind", str(empty), str(home)]
        entries = [path for path in home.iterdir() if not path.name.startswith(".")]
        entries += [path for name in READ_IN_HOME if (home / name).is_dir() for path in (home / name).iterdir()]
        command += _read_only(entries)
    hidden = {*map(Path, (TEMPORARY, *EMPTIED)), *homes}
    needed = [*_python(), *(Path(os.environ[name]) for name in CACHES if os.environ.get(name)), *readable]
    command += _read_only(
        path
        for path in sorted({path.absolute() for path in needed} | {path.resolve() for path in needed})
        # Nothing that holds a hidden folder shows it again.
        if path.exists() and not any(folder.is_relative_to(path) for folder in hidden)
    )
    command += _linked_cache(scratch)
    for path in sorted(Path("/dev").glob("nvidia*")):
        command += ["--dev-bind-try", str(path), str(path)]
    for path in _sockets():
        if not any(path.is_relative_to(folder) for folder in hidden):
            command += ["--ro-bind", "/dev/null", str(path)]
    return [*command, "--chdir", "/", "--"]


def _read_only(paths: Iterable[Path]) -> list[str]:
    return [word for path in paths for word in ("--ro-bind-try", str(path), str(path))]


def _python() -> list[Path]:
    """List where this Python, its packages and this project lie."""
    project = Path(fedmjp.__file__).parents[1]  # an editable installation is not in the path
    return [project, *(Path(place) for place in (sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path) if place)]


def _linked_cache(scratch: Path) -> list[str]:
    """Show Hugging Face's cache as a folder of links that can be written to: its libraries make lock files in it."""
    homes = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("HF_HOME") or Path(homes, "huggingface")).absolute()
    if not cache.is_dir():
        return []
    view = scratch / "huggingface"
    for place, folders, names in os.walk(cache):
        inside = Path(place).relative_to(cache)
        (view / inside).mkdir(parents=True, exist_ok=True)
        links = [name for name in folders if Path(place, name).is_symlink()]
        for name in [*links, *(name for name in names if name not in TOKENS and not name.endswith(".lock"))]:
            path, link = Path(place, name), view / inside / name
            with suppress(FileExistsError):
                link.symlink_to(path.readlink() if path.is_symlink() else Path(HUGGING_FACE, inside, name))
    command = ["--ro-bind", str(cache), HUGGING_FACE, "--bind", str(view), str(cache)]
    tokens = [name for name in TOKENS if (cache / name).exists()]
    return command + [word for name in tokens for word in ("--ro-bind", "/dev/null", f"{HUGGING_FACE}/{name}")]


def _sockets() -> list[Path]:
    """List the sockets in the file system that this user may connect to: a read-only folder does not close them."""
    table = Path("/proc/net/unix")
    lines = table.read_text(errors="replace").splitlines() if table.exists() else []
    paths = {Path(fields[7]).resolve() for line in lines if len(fields := line.split(maxsplit=7)) == 8}
    return sorted(path for path in paths if path.is_absolute() and os.access(path, os.W_OK) and path.is_socket())
