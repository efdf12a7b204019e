"""Settings that the audit leaves beside these modules, one file for each side, and how the app is imported.

The app runs from its copy, which is its working folder. It may not write into its owner's folder, and what it prints
is cut off.
"""

import importlib
import json
import os
import sys
import time
import traceback
from functools import reduce
from pathlib import Path
from typing import Any, TextIO

from .modules import find_missing_modules

SERVER, CLIENT = "server.json", "client.json"
# Asks a client to import the app, before the app's own first message: imports are slow, and apps have time limits.
WARM = "query.warm"
# The record of a message that a client got before: which time it is asked again, from 0.
REPEAT = "repeated"
PRINTED = 2**20  # letters of each stream of a process that are passed on
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events of Python that change files, by their arguments that are paths.
CHANGES = {
    "os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.link": 2, "os.symlink": 2,
    "shutil.rmtree": 1, "shutil.move": 2, "sqlite3.connect": 1,
}  # fmt: skip

_contained = False


def read(name: str) -> dict[str, Any]:
    """Read the settings of one side.

    Args:
        name: Of the file.
    """
    settings: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return settings


def load(component: str) -> Any:
    """Import the app's own object.

    Args:
        component: Its name in pyproject.toml, ``module:attribute``.
    """
    module, _, attribute = component.partition(":")
    return reduce(getattr, attribute.split("."), importlib.import_module(module))


class _CutOff:
    """A stream of text that passes on its first million letters.

    Args:
        stream: That they go to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._left = stream, PRINTED

    def write(self, text: str) -> int:
        """Pass on what is left to pass on."""
        if self._left > 0:
            self._stream.write(text[: self._left])
        self._left -= len(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def contain(side: dict[str, Any]) -> None:
    """Make the copy of the app its working folder and the first place of imports, once; keep it off its owner's files.

    Args:
        side: Settings of a side.
    """
    global _contained
    if _contained:
        return
    _contained = True
    sys.path.insert(0, side["code"])
    os.chdir(side["code"])
    if not side["stand_in"]:
        find_missing_modules(side["code"], None)
    sys.stdout, sys.stderr = (_CutOff(stream) for stream in (sys.stdout, sys.stderr))
    owner = side["owner"]

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        opens = event == "open" and len(arguments) > 2 and isinstance(arguments[2], int) and arguments[2] & WRITES
        for path in arguments[: 1 if opens else CHANGES.get(event, 0)]:
            if isinstance(path, str | bytes | os.PathLike):
                place = Path(os.fsdecode(path)).resolve()
                if place.is_relative_to(owner):
                    raise PermissionError(f"the app writes to {place}, in its owner's folder, which is refused")

    sys.addaudithook(refuse)


def note(folder: Path, name: str, line: dict[str, Any]) -> None:
    """Append a line of JSON to a file that several processes write.

    Args:
        folder: Of the side.
        name: Of the file.
        line: Values by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, default=str) + "\n")


def note_problem(folder: Path, where: str, error: BaseException) -> None:
    """Keep what the app failed of, with what caused it, outermost last.

    Args:
        folder: Of the side.
        where: Side that failed.
        error: That it raised.
    """
    trace = "".join(traceback.format_exception(error))[-100_000:]
    chain: list[dict[str, str]] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 10:
        frames = traceback.extract_tb(cause.__traceback__)
        about = {"type": type(cause).__name__, "text": str(cause)[:2000], "module": str(getattr(cause, "name", ""))}
        chain.append({**about, "line": frames[-1].line or "" if frames else ""})
        cause = cause.__cause__ or cause.__context__
    note(folder, "problems.jsonl", {"where": where, "chain": chain, "traceback": trace, "time": time.time()})
