"""`fedmjp doctor`."""

import importlib.machinery
import sys
from pathlib import Path

import typer

PACKAGES = ("attacks", "benchmarks", "clients", "fedmjp", "server")
UNHEALTHY = 1


def doctor() -> None:
    """Tell versions, device, which weights are found, and whether another package shadows ours."""
    from rich.console import Console

    from fedmjp import provenance
    from fedmjp.metrics.perceptual import BACKBONE_FILE, FETCH, backbone_path, missing_backbone

    console = Console(soft_wrap=True, highlight=False, markup=False)
    for name, version in provenance.versions().items():
        console.print(f"{name:<14}{version}")
    machine = provenance.hardware()
    console.print(f"\nmachine       {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB")
    console.print(f"device        {', '.join(machine['gpus']) or 'cpu (torch sees no CUDA device)'}")
    reason = missing_backbone()
    console.print(
        f"\nLPIPS         {'available, ' + str(backbone_path()) if reason is None else 'not available: ' + reason}"
    )
    if reason:
        console.print(f"              put {BACKBONE_FILE} into {backbone_path().parent}")
        console.print(f"              with a network: {FETCH}")
    shadows = shadowed()
    for package, (ours, other) in shadows.items():
        console.print(f"SHADOWED      package {package!r}: {other} comes before ours in {ours}")
    if shadows:
        console.print("Remove or rename the other package, or run from another folder.")
        raise typer.Exit(UNHEALTHY)
    console.print("\npackages      attacks, benchmarks, clients, fedmjp and server are ours")


def shadowed() -> dict[str, tuple[Path, Path]]:
    """Packages of ours that an import would not reach: name to (our path, the path that wins)."""
    root = Path(__file__).resolve().parents[2]
    found: dict[str, tuple[Path, Path]] = {}
    for package in PACKAGES:
        spec = importlib.machinery.PathFinder.find_spec(package, sys.path)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is not None and origin.parent != root / package:
            found[package] = (root / package, origin)
    return found
