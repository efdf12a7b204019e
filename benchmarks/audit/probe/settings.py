"""Settings that the audit leaves beside these modules, one file for each side, and how the app is imported."""

import importlib
import json
from functools import reduce
from pathlib import Path
from typing import Any

SERVER, CLIENT = "server.json", "client.json"
# Asks a client to import the app, before the app's own first message: imports are slow, and apps have time limits.
WARM = "query.fedmjp_warm"
# The record of a message that a client got before: which time it is asked again, from 0.
REPEAT = "fedmjp_repeat"


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
    chain: list[dict[str, str]] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 10:
        chain.append(
            {"type": type(cause).__name__, "text": str(cause)[:2000], "module": str(getattr(cause, "name", ""))}
        )
        cause = cause.__cause__ or cause.__context__
    note(folder, "problems.jsonl", {"where": where, "chain": chain})
