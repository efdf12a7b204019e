"""`fedmjp list`."""

from typing import Annotated

import typer


def catalogue(
    kind: Annotated[str, typer.Argument(help="attacks, models or metrics.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List attacks, models or metrics with what each is and needs."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from fedmjp.errors import UnknownNameError  # noqa: PLC0415

    kinds = {"attacks": _attacks, "models": _models, "metrics": _metrics}
    if kind not in kinds:
        raise UnknownNameError("list", kind, kinds)
    entries = kinds[kind]()
    console = Console()
    if as_json:
        console.print_json(data=entries)
        return
    table = Table(*entries[0], title=kind, title_justify="left")
    for entry in entries:
        table.add_row(*map(str, entry.values()))
    console.print(table)


def _attacks() -> list[dict[str, str | bool]]:
    from attacks import ATTACKS  # noqa: PLC0415

    found = [ATTACKS.get(name) for name in ATTACKS]
    return [
        {"name": a.name, "summary": a.summary, "requires": a.requires, "paper": a.paper, "floor": a.floor} for a in found
    ]


def _models() -> list[dict[str, str | bool]]:
    from fedmjp.models.build import ARCHITECTURES  # noqa: PLC0415

    return [{"name": name, "timm": a.timm_name, "summary": a.summary} for name, a in ARCHITECTURES.items()]


def _metrics() -> list[dict[str, str | bool]]:
    from fedmjp.metrics import METRICS  # noqa: PLC0415

    return [
        {
            "name": name,
            "definition": m.definition,
            "range": m.bounds,
            "reveals more when": "higher" if m.higher_leaks else "lower",
            "available": m.missing() is None,
        }
        for name, m in METRICS.items()
    ]
