"""`fedmjp list`."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

MORE = {
    "models": "Parameters are those of 224 pixels and 1000 classes, undefended. Besides, timm:NAME is any vision "
    "transformer of timm's with one class token and learned positions, such as timm:vit_base_patch16_224."
}


def catalogue(
    kind: Annotated[str, typer.Argument(help="attacks, defences, models or metrics.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List attacks, defences, models or metrics with what each is and needs."""
    from rich.console import Console
    from rich.padding import Padding

    from fedmjp.errors import UnknownNameError

    kinds = {"attacks": _attacks, "defences": _defences, "models": _models, "metrics": _metrics}
    if kind not in kinds:
        raise UnknownNameError("list", kind, kinds)
    entries = kinds[kind]()
    console = Console()
    if as_json:
        console.print_json(data=entries)
        return
    for entry in entries:
        console.print(f"[bold]{entry.pop('name')}[/]", highlight=False)
        for key, value in entry.items():
            console.print(Padding(f"[dim]{key}:[/] {value}", (0, 0, 0, 2)), highlight=False)
    if kind in MORE:
        console.print(MORE[kind], highlight=False, markup=False)


def _attacks() -> list[dict[str, str]]:
    from attacks import ATTACKS

    told = ("name", "summary", "role", "requires", "exploits")
    return [
        {key: getattr(a, key) for key in told} | {"options": _options(a.options_type), "paper": a.paper}
        for a in map(ATTACKS.get, ATTACKS)
    ]


def _defences() -> list[dict[str, str]]:
    from fedmjp.defences import DEFENCES

    seen = {"tensor": "one tensor", "update": "the whole update", "example": "each picture"}
    return [
        {
            "name": d.name,
            "summary": d.summary,
            "stage": " and ".join(d.stages),
            "sees at once": seen[d.scope],
            "the server is told": d.told,
            "leaves uploads": " and ".join(sorted(d.marks)),
            "options": _options(d.options_type),
            "paper": d.paper,
        }
        for d in map(DEFENCES.get, DEFENCES)
    ]


def _options(options_type: type["BaseModel"]) -> str:
    """Name, default and meaning of each option."""
    found = [
        f"{name}={'none' if field.default is None else field.default} ({field.description})"
        for name, field in options_type.model_fields.items()
    ]
    if options_type.model_config.get("extra") == "allow":
        found.append("any other key is an override of the configuration that the attack wraps")
    return "; ".join(found) or "none"


def _models() -> list[dict[str, str]]:
    from fedmjp.config import ModelConfig
    from fedmjp.models.build import ARCHITECTURES, parameter_count

    return [
        {
            "name": name,
            "timm": a.timm_name,
            "summary": a.summary,
            "parameters": f"{parameter_count(ModelConfig(name=name, patch_size=a.patch_size or 16)):,}",
            "for": a.purpose,
        }
        for name, a in ARCHITECTURES.items()
    ]


def _metrics() -> list[dict[str, str]]:
    from fedmjp.metrics import METRICS

    return [
        {
            "name": name,
            "definition": m.definition,
            "range": m.bounds,
            "reveals more when": "higher" if m.higher_leaks else "lower",
            "available here": "yes" if m.missing() is None else "no",
        }
        for name, m in METRICS.items()
    ]
