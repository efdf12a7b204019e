"""`fedmjp doctor`."""

from pathlib import Path

import fedmjp
from fedmjp.cli.console import tell, wide_console


def doctor() -> None:
    """Tell versions, device, and which weights are found."""
    from fedmjp import provenance
    from fedmjp.benchmarks import private_ray
    from fedmjp.metrics import BACKBONE_FILE, FETCH, backbone_path, missing_backbone

    console = wide_console()
    for name, version in provenance.versions().items():
        tell(console, f"{name:<14}{version}")
    machine = provenance.hardware()
    tell(console, f"\nmachine       {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB")
    tell(console, f"device        {', '.join(machine['gpus']) or 'cpu (torch sees no CUDA device)'}")
    tell(console, f"Ray           {private_ray.weakness() or private_ray.CLOSED}")
    reason = missing_backbone()
    availability = f"available, {backbone_path()}" if reason is None else f"not available: {reason}"
    tell(console, f"\nLPIPS         {availability}")
    if reason:
        tell(console, f"              put {BACKBONE_FILE} into {backbone_path().parent}")
        tell(console, f"              with a network: {FETCH}")
    tell(console, f"\npackage       {Path(fedmjp.__file__).parent}")
