"""`fedmjp doctor`."""

import importlib.machinery
import sys
from pathlib import Path

import typer

from fedmjp.cli.console import tell, wide_console

PACKAGES = ("attacks", "benchmarks", "clients", "fedmjp", "server")
UNHEALTHY = 1


def doctor() -> None:
    """Tell versions, device, which weights are found, and whether another package shadows ours."""
    from fedmjp import provenance
    from fedmjp.metrics.backbone import BACKBONE_FILE, FETCH, backbone_path, missing_backbone

    console = wide_console()
    for name, version in provenance.versions().items():
        tell(console, f"{name:<14}{version}")
    machine = provenance.hardware()
    tell(console, f"\nmachine       {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB")
    tell(console, f"device        {', '.join(machine['gpus']) or 'cpu (torch sees no CUDA device)'}")
    reason = missing_backbone()
    availability = f"available, {backbone_path()}" if reason is None else f"not available: {reason}"
    tell(console, f"\nLPIPS         {availability}")
    if reason:
        tell(console, f"              put {BACKBONE_FILE} into {backbone_path().parent}")
        tell(console, f"              with a network: {FETCH}")
    shadows = shadowed()
    for package, (ours, other) in shadows.items():
        tell(console, f"SHADOWED      package {package!r}: {other} comes before ours in {ours}")
    if shadows:
        tell(console, "Remove or rename the other package, or run from another folder.")
        raise typer.Exit(UNHEALTHY)
    tell(console, "\npackages      attacks, benchmarks, clients, fedmjp and server are ours")


def refuse_shadows(command: str | None) -> None:
    """BadInputError if other packages hide ours, which no command but this one can work with."""
    from fedmjp.errors import BadInputError

    others = ", ".join(str(other) for _, other in shadowed().values())
    if others and command != "doctor":
        raise BadInputError(
            f"{others}: has the name of a package of fedmjp, and is found first; rename it, run elsewhere, or "
            "take its folder out of PYTHONPATH"
        )


def shadowed() -> dict[str, tuple[Path, Path]]:
    """Packages of ours that an import would not reach: name to (our path, the path that wins)."""
    root = Path(__file__).resolve().parents[2]
    shadows: dict[str, tuple[Path, Path]] = {}
    for package in PACKAGES:
        spec = importlib.machinery.PathFinder.find_spec(package, sys.path)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is not None and origin.parent != root / package:
            shadows[package] = (root / package, origin)
    return shadows
