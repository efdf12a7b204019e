"""A Flower app's folder: what it names as its components, and the copy of it that is watched."""

import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fedmjp.benchmarks.audit.probe import settings
from fedmjp.errors import AppError

ADDED = "fedmjp_audit"  # the package that the copy has more than the app
# What Flower takes into a bundle; anything else does not reach clients.
CARRIED = ("*.py", "*.toml", "*.md", "*.yaml", "*.yml", "*.json", "*.jsonl", "LICENSE")
LEFT_OUT = frozenset({".git", ".venv", "venv", "env", "__pycache__", "node_modules", ".flwr"})
ENLARGES = re.compile(r"Resize|ImageProcessor|\.transforms\(\)")
QUOTED = re.compile(r"""["']([A-Za-z_][\w-]{0,40})["']""")


@dataclass(frozen=True)
class App:
    """An app as its pyproject.toml describes it."""

    folder: Path
    name: str
    server: str  # module:attribute
    client: str

    @property
    def code(self) -> str:
        """Join all of the app's Python."""
        return "\n".join(
            path.read_text(errors="replace") for path in sorted(_files(self.folder)) if path.suffix == ".py"
        )

    @property
    def literals(self) -> list[str]:
        """List words that its code has in quotes, such as the columns of its data set."""
        return sorted(set(QUOTED.findall(self.code)))

    @property
    def enlarges(self) -> bool:
        """Tell whether its code may make pictures larger than in its data set, so that each costs more."""
        return ENLARGES.search(self.code) is not None


def read_app(folder: Path) -> App:
    """Read an app's folder; AppError, in one line, if it is none that Flower runs.

    Args:
        folder: With the app's pyproject.toml.
    """
    path = folder / "pyproject.toml"
    if not path.is_file():
        raise AppError(f"{folder} is no Flower app: it has no pyproject.toml")
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise AppError(f"{path} cannot be read: {error}") from None
    flower = project.get("tool", {}).get("flwr", {}).get("app", {})
    components: Mapping[str, Any] = flower.get("components", {})
    missing = [key for key in ("serverapp", "clientapp") if ":" not in str(components.get(key, ""))]
    if missing:
        raise AppError(f"{path}: [tool.flwr.app.components] names no {' and no '.join(missing)} as module:attribute")
    name = str(project.get("project", {}).get("name", folder.resolve().name))
    return App(folder, name, components["serverapp"], components["clientapp"])


def copy_with_probe(app: App, target: Path, server: Mapping[str, Any], client: Mapping[str, Any]) -> Path:
    """Copy what Flower carries of an app, and add the package that watches it.

    Args:
        app: That is copied; nothing in it is changed.
        target: The copy, which is made here.
        server: Settings of the server's half.
        client: Settings of the clients' half; the server's half is not told them.
    """
    for path in _files(app.folder):
        place = target / path.relative_to(app.folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    probe = target / ADDED
    with resources.as_file(resources.files("fedmjp.benchmarks.audit.probe")) as source:
        shutil.copytree(source, probe, ignore=shutil.ignore_patterns("__pycache__"))
    (probe / settings.SERVER).write_text(json.dumps({**server, "component": app.server}), encoding="utf-8")
    (probe / settings.CLIENT).write_text(json.dumps({**client, "component": app.client}), encoding="utf-8")
    project = target / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    for key in ("server", "client"):
        text = re.sub(rf"(?m)^(\s*[\"']?{key}app[\"']?\s*=\s*).*$", rf'\g<1>"{ADDED}.{key}:app"', text)
    text = re.sub(r"(?m)^(\s*fab-include\s*=\s*\[)", rf'\g<1>"{ADDED}/*", ', text)
    project.write_text(text, encoding="utf-8")
    return target


def _files(folder: Path) -> list[Path]:
    paths = {path for pattern in CARRIED for path in folder.rglob(pattern) if path.is_file()}
    return sorted(path for path in paths if not LEFT_OUT & set(path.relative_to(folder).parts))
