"""Which mods an app's ClientApp has, noted as Flower puts them around its functions."""

from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from flwr.clientapp import client_app

from . import settings

FILE = "mods.jsonl"
_folders: list[Path] = []


def watch_mods(folder: Path) -> None:
    """Note every mod of an app that is imported from now on, once for each process.

    Args:
        folder: The evaluator's.
    """
    if _folders:
        return
    _folders.append(folder)
    flower: Any = client_app
    make = flower.make_ffn

    @wraps(make)
    def make_ffn(function: Any, mods: Sequence[Any]) -> Any:
        for mod in mods:
            settings.note(folder, FILE, _describe(mod))
        return make(function, mods)

    flower.make_ffn = make_ffn


def _describe(mod: Any) -> dict[str, Any]:
    """Describe a mod by its name, and those of fedmjp by the defences that they apply to every update."""
    name = str(getattr(mod, "__name__", type(mod).__name__))
    if hasattr(mod, "defence"):
        defence = mod.defence
        return {"mod": defence.name, "defences": [{"name": defence.name, **defence.options.model_dump(mode="json")}]}
    policy = getattr(mod, "policy", None)
    always = getattr(policy, "defend", None) == "always"
    defences = [config.model_dump(mode="json") for config in policy.defences] if policy is not None and always else []
    return {"mod": name, "defences": defences}
