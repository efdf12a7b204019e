"""`fedmjp list`."""

from typing import TYPE_CHECKING, Annotated

import typer

from fedmjp.servers import SCOPE

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

# What a table has room for; the rest is told of one by its name.
COLUMNS = {
    "attacks": ("name", "role", "summary"),
    "defences": ("name", "stage", "summary"),
    "servers": ("name", "summary"),
    "models": ("name", "parameters", "summary"),
    "metrics": ("name", "range", "definition"),
}
MORE = {
    "attacks": """Which one to take:
  one picture, no MJP           patch_embedding
  with noise or rounding        patch_embedding_wiener
  MJP, one upload               mjp_prior (seconds), then mjp_span (a search)
  MJP, the picture comes again  mjp_intersection
  several pictures per upload   gradient_matching; labels tells what they show""",
    "defences": "Several act in the order in which they are named: --defence mjp --defence round.",
    "servers": SCOPE,
    "models": "Parameters are those of 224 pixels and 1000 classes, undefended. Besides, timm:NAME is any vision "
    "transformer of timm's with one class token and learned positions, such as timm:vit_base_patch16_224.",
    "metrics": "A value belongs to one picture; means and intervals are the leaderboard's.",
}


def catalogue(
    kind: Annotated[str, typer.Argument(help="attacks, defences, servers, models or metrics.")],
    name: Annotated[
        str | None, typer.Argument(help="One of them: what it needs, its options, its paper.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All that is known, machine-readable.")] = False,
) -> None:
    """List attacks, defences, malicious servers, models or metrics, and which one to take; or tell all of one."""
    from fedmjp.errors import UnknownNameError

    kinds = {"attacks": _attacks, "defences": _defences, "servers": _servers, "models": _models, "metrics": _metrics}
    if kind not in kinds:
        raise UnknownNameError("list", kind, kinds)
    entries = kinds[kind]()
    if name is not None:
        names = [entry["name"] for entry in entries]
        if name not in names:
            raise UnknownNameError(kind.removesuffix("s"), name, names)
        entries = [entry for entry in entries if entry["name"] == name]
    _show(kind, entries, as_json=as_json, whole=name is not None)


def _show(kind: str, entries: list[dict[str, str]], *, as_json: bool, whole: bool) -> None:
    from rich.console import Console

    from fedmjp.cli.console import tell

    console = Console()
    if as_json:
        console.print_json(data=entries)
    elif whole:
        tell(console, *(f"{key}: {value}" for entry in entries for key, value in entry.items()))
    else:
        _print_table(entries, COLUMNS[kind], console)
        console.print(MORE[kind], highlight=False, markup=False)
        tell(console, f"\n`fedmjp list {kind} NAME` tells all of one, --json all of all.")


def _print_table(entries: list[dict[str, str]], columns: tuple[str, ...], console: "Console") -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for entry in entries:
        table.add_row(*(escape(entry[column]) for column in columns))
    console.print(table)


def _attacks() -> list[dict[str, str]]:
    from attacks import ATTACKS

    columns = ("name", "summary", "role", "requires", "exploits")
    return [
        {key: getattr(a, key) for key in columns} | {"options": _options(a.options_type), "paper": a.paper}
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


def _servers() -> list[dict[str, str]]:
    from fedmjp.servers import SERVERS

    return [
        {
            "name": s.name,
            "summary": s.summary,
            "options": _options(s.options_type),
            "paper": s.paper,
            "scope": SCOPE,
        }
        for s in map(SERVERS.get, SERVERS)
    ]


def _options(options_type: type["BaseModel"]) -> str:
    """Name, default and meaning of each option."""
    texts = [
        f"{name}={'none' if field.default is None else field.default} ({field.description})"
        for name, field in options_type.model_fields.items()
    ]
    if options_type.model_config.get("extra") == "allow":
        texts.append("any other key is an override of the configuration that the attack wraps")
    return "; ".join(texts) or "none"


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
