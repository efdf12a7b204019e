"""A Flower app's folder: what it names as its components, and the copy of it that is watched."""

import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmjp.benchmarks.audit.disguise import DrawnNames, copy_probe, draw_name
from fedmjp.benchmarks.audit.probe import settings
from fedmjp.benchmarks.federation.bundle import as_toml
from fedmjp.errors import AppError

BUNDLE, CODE = "bundle", "code"
COPIED_BYTES = 2**30  # of all files of an app but its Python; larger ones stay where they are
LEFT_OUT = frozenset({".git", ".venv", "venv", "env", "__pycache__", "node_modules", ".flwr"})
# Calls of Flower's first API that connect, with the side whose script makes them.
CONNECTS = {
    "client": re.compile(r"\bstart_(?:numpy_)?client\s*\("),
    "server": re.compile(r"\bstart_server\s*\("),
    "both": re.compile(r"\bstart_simulation\s*\("),
}
ENLARGES = re.compile(r"Resize|ImageProcessor|\.transforms\(\)")
SUPERNODES = re.compile(r"num[-_]supernodes\s*[=:]\s*[\"']?(\d+)")
QUOTED = re.compile(r"""["']([A-Za-z_][\w-]{0,40})["']""")


@dataclass(frozen=True)
class App:
    """An app as its pyproject.toml describes it."""

    folder: Path
    name: str
    server: str  # module:attribute; empty where it is a script
    client: str
    config: Mapping[str, Any] = field(default_factory=dict)  # of a run, as pyproject.toml has it
    scripts: Mapping[str, str] = field(default_factory=dict)  # by side, of an app of Flower's first API

    @property
    def code(self) -> str:
        """Join all of the app's Python."""
        return "\n".join(path.read_text(errors="replace") for path in _files(self.folder) if path.suffix == ".py")

    @property
    def literals(self) -> list[str]:
        """List words that its code has in quotes, such as the columns of its data set."""
        return sorted(set(QUOTED.findall(self.code)))

    @property
    def stated_clients(self) -> int | None:
        """Return how many simulated clients its own pyproject.toml or README runs it with; None if neither says."""
        paths = [path for name in ("pyproject.toml", "README.md") if (path := self.folder / name).is_file()]
        texts = "\n".join(path.read_text(errors="replace") for path in paths)
        return min(map(int, SUPERNODES.findall(texts)), default=None)

    @property
    def enlarges(self) -> bool:
        """Tell whether its code may make pictures larger than in its data set, so that each costs more."""
        return ENLARGES.search(self.code) is not None


def read_app(folder: Path) -> App:
    """Read an app's folder; AppError, in one line, if it is none that Flower runs.

    Args:
        folder: With the app's pyproject.toml, or with scripts that call ``start_client`` and ``start_server``.
    """
    path = folder / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise AppError(f"{path} cannot be read: {error}") from None
    tool = project.get("tool", {}).get("flwr", {})
    flower = tool.get("app", {})
    # The latter two are of Flower 1.8 and 1.9.
    components: Mapping[str, Any] = (
        flower.get("components") or tool.get("components") or project.get("flower", {}).get("components", {})
    )
    name = str(project.get("project", {}).get("name", folder.resolve().name))
    missing = [key for key in ("serverapp", "clientapp") if ":" not in str(components.get(key, ""))]
    if not missing:
        return App(folder, name, components["serverapp"], components["clientapp"], flower.get("config", {}))
    if scripts := _find_scripts(folder):
        return App(folder, name, "", "", {}, scripts)
    if not path.is_file():
        raise AppError(
            f"{folder} is no Flower app: it has no pyproject.toml, and no script in it calls start_client or "
            "start_simulation; name the folder that has one of them"
        )
    raise AppError(f"{path}: [tool.flwr.app.components] names no {' and no '.join(missing)} as module:attribute")


def read_values(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``KEY=VALUE`` texts, values as TOML has them; what is no TOML is a text.

    Args:
        texts: Of a node's config.

    Raises:
        AppError: If a text has no key.
    """
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals):
            raise AppError(f"--node-config {text}: it must be KEY=VALUE, as in --node-config site=3")
        try:
            values[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = value
    return values


def _find_scripts(folder: Path) -> dict[str, str]:
    """Find an app's scripts of Flower's first API by side, those nearest to its folder; empty without a client's."""
    scripts: dict[str, str] = {}
    paths = [path for path in _files(folder) if path.suffix == ".py"]
    for path in sorted(paths, key=lambda path: (len(path.parts), path.name)):
        text = path.read_text(errors="replace")
        sides = [side for side, call in CONNECTS.items() if call.search(text)]
        for side in ("client", "server") if "both" in sides else sides:
            scripts.setdefault(side, path.relative_to(folder).as_posix())
    return scripts if "client" in scripts else {}


@dataclass(frozen=True)
class WatchedCopy:
    """A copy of an app with the bundle that Flower runs."""

    bundle: Path
    names: DrawnNames  # of the probe in it


def copy_with_probe(app: App, target: Path, server: Mapping[str, Any], client: Mapping[str, Any]) -> WatchedCopy:
    """Copy an app, and write the bundle that Flower runs beside the copy: the package that watches it.

    The bundle's name, version and dependencies are its own, since Flower refuses some and installs others.

    Args:
        app: That is copied; nothing in it is changed.
        target: Folder of both, which is made here.
        server: Settings of the server's half.
        client: Settings of the clients' half; the server's half is not told them.
    """
    _copy(app.folder, target / CODE)
    names, bundle = DrawnNames(), target / BUNDLE
    copy_probe(bundle / names.package, names)
    shared = {"code": str(target / CODE), "owner": str(app.folder.resolve()), "scripts": dict(app.scripts)}
    for side, file, values, component in (
        ("server", settings.SERVER, server, app.server),
        ("client", settings.CLIENT, client, app.client),
    ):
        content = {**values, **shared, "component": component or names.component("scripts", side)}
        (bundle / names.package / names[file]).write_text(json.dumps(content), encoding="utf-8")
    (bundle / "pyproject.toml").write_text(
        f'[project]\nname = "{draw_name()}"\nversion = "1.0.0"\ndependencies = []\n\n'
        f'[tool.flwr.app]\npublisher = "{draw_name()}"\n\n[tool.flwr.app.components]\n'
        f'serverapp = "{names.component("server", "app")}"\nclientapp = "{names.component("client", "app")}"\n\n'
        f"[tool.flwr.app.config]\n{as_toml(dict(_flat(app.config)))}",
        encoding="utf-8",
    )
    return WatchedCopy(bundle, names)


def _flat(values: Mapping[str, Any], *before: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by their whole keys, quoted as TOML has them."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, *before, key)
        else:
            yield ".".join(json.dumps(part) for part in (*before, key)), value


def _copy(folder: Path, target: Path) -> None:
    """Copy an app's files, its Python first, as long as they are no gigabyte together."""
    copied_bytes = 0
    target.mkdir(parents=True)
    for path in sorted(_files(folder), key=lambda path: (path.suffix != ".py", path.stat().st_size)):
        copied_bytes += path.stat().st_size
        if path.suffix == ".py" or copied_bytes <= COPIED_BYTES:
            place = target / path.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def _files(folder: Path) -> list[Path]:
    """List the files of an app, but those of environments and version control, nor what is no plain file."""
    paths: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        paths += [Path(place, name) for name in sorted(names)]
    return [path for path in paths if path.is_file()]
