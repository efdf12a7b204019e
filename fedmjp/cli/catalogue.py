"""`fedmjp list`."""

from typing import TYPE_CHECKING, Annotated

import typer

import fedmjp

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

MORE = {
    "attacks": """Which one to take:
  one picture, no MJP           patch_embedding
  with noise or rounding        patch_embedding_wiener
  MJP, one upload               mjp_prior (seconds), then mjp_span (a search)
  MJP, the picture comes again  mjp_intersection
  several pictures per upload   gradient_matching; labels tells what they show""",
    "defences": "Several act in the order in which they are named: --defence mjp --defence round.",
    "servers": "",  # fedmjp.threat says it
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

    if kind not in MORE:
        raise UnknownNameError("list", kind, MORE)
    names = list(getattr(fedmjp, kind.upper()))
    if name is not None and name not in names:
        raise UnknownNameError(kind.removesuffix("s"), name, names)
    if name is None and not as_json:
        _show_table(kind, names)
    else:
        _show_whole(kind, names if name is None else [name], as_json=as_json)


def _show_whole(kind: str, names: list[str], *, as_json: bool) -> None:
    from rich.console import Console

    from fedmjp.cli.console import tell

    whole = {"attacks": _attack, "defences": _defence, "servers": _server, "models": _model, "metrics": _metric}
    entries, console = [whole[kind](name) for name in names], Console()
    if as_json:
        console.print_json(data=entries)
    else:
        tell(console, *(f"{key}: {value}" for entry in entries for key, value in entry.items()))


def _show_table(kind: str, names: list[str]) -> None:
    from rich.console import Console

    from fedmjp.cli.console import tell
    from fedmjp.threat import SCOPE

    console = Console()
    _print_table([_row(kind, name) for name in names], console)
    console.print(MORE[kind] or SCOPE, highlight=False, markup=False)
    tell(console, f"\n`fedmjp list {kind} NAME` tells all of one, --json all of all.")


def _print_table(rows: list[dict[str, str]], console: "Console") -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in rows[0]:
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row.values()))
    console.print(table)


def _row(kind: str, name: str) -> dict[str, str]:
    """Summarise an entry for a table, without importing what computes."""
    if kind == "attacks":
        return fedmjp.ATTACKS.state(name, "name", "role", "summary")
    if kind == "defences":
        stated = fedmjp.DEFENCES.state(name, "name", "stages", "summary")
        return {"name": stated["name"], "stage": " and ".join(stated["stages"]), "summary": stated["summary"]}
    if kind == "servers":
        return fedmjp.SERVERS.state(name, "name", "summary")
    if kind == "models":
        model = _model(name)
        return {column: model[column] for column in ("name", "parameters", "summary")}
    metric = fedmjp.METRICS[name]
    return {"name": name, "range": metric.bounds, "definition": metric.definition}


def _attack(name: str) -> dict[str, str]:
    attack = fedmjp.ATTACKS.get(name)
    columns = ("name", "summary", "role", "requires", "exploits")
    return {
        **{column: getattr(attack, column) for column in columns},
        "options": _options(attack.options_type),
        "paper": attack.paper,
    }


def _defence(name: str) -> dict[str, str]:
    defence = fedmjp.DEFENCES.get(name)
    scopes = {"tensor": "one tensor", "update": "the whole update", "example": "each picture"}
    return {
        "name": defence.name,
        "summary": defence.summary,
        "stage": " and ".join(defence.stages),
        "sees at once": scopes[defence.scope],
        "the server is told": defence.told,
        "leaves uploads": " and ".join(sorted(defence.marks)),
        "options": _options(defence.options_type),
        "paper": defence.paper,
    }


def _server(name: str) -> dict[str, str]:
    from fedmjp.threat import SCOPE

    server = fedmjp.SERVERS.get(name)
    return {
        "name": server.name,
        "summary": server.summary,
        "options": _options(server.options_type),
        "paper": server.paper,
        "scope": SCOPE,
    }


def _options(options_type: type["BaseModel"]) -> str:
    """List name, default and meaning of each option."""
    texts = [
        f"{name}={'none' if field.default is None else field.default} ({field.description})"
        for name, field in options_type.model_fields.items()
    ]
    if options_type.model_config.get("extra") == "allow":
        texts.append("any other key is an override of the configuration that the attack wraps")
    return "; ".join(texts) or "none"


def _model(name: str) -> dict[str, str]:
    from fedmjp.models.architectures import PARAMETERS

    model = fedmjp.MODELS[name]
    return {
        "name": name,
        "timm": model.timm_name,
        "summary": model.summary,
        "parameters": f"{PARAMETERS[name]:,}",
        "for": model.purpose,
    }


def _metric(name: str) -> dict[str, str]:
    metric = fedmjp.METRICS[name]
    return {
        "name": name,
        "definition": metric.definition,
        "range": metric.bounds,
        "reveals more when": "higher" if metric.higher_leaks else "lower",
        "available here": "yes" if metric.missing() is None else "no",
    }
