"""The Flower app as a folder, made from the installed packages: works from a wheel and from a clone."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import fedmjp
from fedmjp.config import RunConfig

# Code that no federation runs, and pages for people, stay at home.
OMITTED = ("__pycache__", "benchmarks", "cli", "__main__.py", "*.md")


def as_toml(values: Mapping[str, str | int | float | bool]) -> str:
    """Write scalars as TOML lines (their JSON spelling is TOML).

    Args:
        values: By key.
    """
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


def write_app(folder: Path) -> Path:
    """Write the app that `flwr run` takes, the package and a pyproject.toml, and return its folder.

    Args:
        folder: Made here; Flower accepts letters, digits and hyphens in its name.
    """
    source = Path(fedmjp.__file__).parent
    shutil.copytree(source, folder / "fedmjp", ignore=shutil.ignore_patterns(*OMITTED))
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "fedmjp"\nversion = "{fedmjp.__version__}"\ndependencies = []\n\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["fedmjp"]\n\n'
        '[tool.flwr.app]\npublisher = "fedmjp"\n\n'
        '[tool.flwr.app.components]\nserverapp = "fedmjp.server_app:app"\nclientapp = "fedmjp.client_app:app"\n\n'
        f"[tool.flwr.app.config]\n{as_toml(RunConfig().flat())}"
    )
    return folder
