"""The Flower app as a folder, made from the installed packages: works from a wheel and from a clone."""

import importlib.util
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import fedmjp
from fedmjp.config import RunConfig
from fedmjp.errors import FederationError

PACKAGES = ("attacks", "clients", "fedmjp", "server")
LEFT_OUT = ("__pycache__", "cli", "__main__.py", "*.md")  # the command line, and what only people read, stay at home


def as_toml(values: Mapping[str, str | int | float | bool]) -> str:
    """Scalars as TOML lines (their JSON spelling is TOML)."""
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


def write_app(folder: Path) -> Path:
    """Write the app that `flwr run` takes, the four packages and a pyproject.toml, into a folder that is made here.

    Its name must be one that Flower accepts (letters, digits, hyphens). FederationError if a package cannot be found.
    """
    folder.mkdir(parents=True)
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FederationError(f"package {package!r} is not installed; reinstall fedmjp")
        source = Path(next(iter(spec.submodule_search_locations)))
        shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "fedmjp"\nversion = "{fedmjp.__version__}"\ndependencies = []\n\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["fedmjp"]\n\n'
        '[tool.flwr.app]\npublisher = "fedmjp"\n\n'
        '[tool.flwr.app.components]\nserverapp = "server.app:app"\nclientapp = "clients.app:app"\n\n'
        f"[tool.flwr.app.config]\n{as_toml(RunConfig().flat())}"
    )
    return folder
