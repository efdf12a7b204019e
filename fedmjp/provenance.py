"""The provenance of numbers: versions, hardware, revision."""

import hashlib
import importlib
import inspect
import os
import platform
import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

import fedmjp
from fedmjp.arithmetic import cuda_settings

PACKAGES = (
    "torch", "torchvision", "timm", "flwr", "ray", "breaching", "hydra-core", "lpips", "scikit-image", "scipy", "numpy",
    "pandas", "matplotlib", "pillow", "safetensors", "sqlalchemy",
)  # fmt: skip
# Parts of the package that lie in folders of their own, in a clone.
PARTS = ("attacks", "benchmarks", "clients", "server")
COMMIT = "# branch.oid "  # before it, in what git says of a checkout
# Folders that only summarise and show numbers.
SHOWS = {"cli", "leaderboard", "performance", "report"}


def environment() -> dict[str, Any]:
    """Collect versions, revision and hardware of this process; with a GPU, how exactly it computes in float32."""
    facts = {"versions": versions(), "revision": revision(), "hardware": hardware()}
    return facts | ({"cuda": cuda_settings()} if facts["hardware"]["gpus"] else {})


def code_digest() -> str:
    """Compute the SHA-256 over the source files that determine a trial's numbers, as hex: changed code, new trials."""
    digest = hashlib.sha256()
    _add_source(digest, Path(fedmjp.__file__).parent, "fedmjp")
    for package in PARTS:
        (folder,) = (importlib.import_module(f"fedmjp.{package}")).__path__
        _add_source(digest, Path(folder), f"fedmjp/{package}")
    return digest.hexdigest()


def package_digest(module: str) -> str:
    """Compute the SHA-256 over the top-level package (or single file) that a module belongs to, as hex.

    Args:
        module: Its dotted name.
    """
    top = module.partition(".")[0]
    origin = Path(inspect.getfile(importlib.import_module(top))).resolve()
    digest = hashlib.sha256()
    if origin.name == "__init__.py":
        _add_source(digest, origin.parent, "")
    else:
        digest.update(origin.read_bytes())
    return digest.hexdigest()


def _add_source(digest: "hashlib._Hash", folder: Path, name: str) -> None:
    """Add the files that determine numbers under a name that does not depend on where, and how, they are installed."""
    outside = SHOWS | set(PARTS if name == "fedmjp" else ())
    for path in sorted(folder.resolve().rglob("*")):
        inside = path.relative_to(folder.resolve())
        if path.suffix in (".py", ".json", ".safetensors") and outside.isdisjoint(inside.parts[:-1]):
            digest.update(f"{name}/{inside.as_posix()}".encode() + path.read_bytes())


def versions() -> dict[str, str]:
    """Collect the versions of Python, fedmjp and every package that numbers depend on."""
    own_versions = {"python": platform.python_version(), "fedmjp": fedmjp.__version__}
    return own_versions | {package: _version(package) for package in PACKAGES}


@cache  # a campaign asks for each of its parts, and parsing takes milliseconds
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def hardware() -> dict[str, Any]:
    """Describe the machine as far as it bears on numbers and times: ``cores`` are those that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:(.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return {
        "processor": next((model.strip() for model in models), platform.processor() or platform.machine()),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
    }


def revision() -> dict[str, Any]:
    """Read the git ``commit`` of the running source tree, and whether it was ``modified``; None outside a checkout."""
    root = Path(fedmjp.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return {"commit": None, "modified": None}
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch"]
    try:
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {"commit": None, "modified": None}
    commit = next(line.removeprefix(COMMIT) for line in lines if line.startswith(COMMIT))
    return {
        "commit": None if commit == "(initial)" else commit,
        "modified": any(not line.startswith("#") for line in lines),
    }
