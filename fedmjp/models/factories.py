"""Get a user's own module from the code that makes it, by name."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedmjp.errors import BadInputError, suggestion


def load_module(target: str) -> nn.Module:
    """Run the user's code that a text names, and give the module that it makes.

    Args:
        target: ``package:factory``, ``package.module:factory`` or ``FILE.py:factory``. Packages are looked for in the
            working directory too. The factory is called without arguments and returns the module with its weights; it
            may also be the module itself.

    Raises:
        BadInputError: If there is no such thing, if its code fails (with its own message), or if it is no module.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise BadInputError(f"{target!r} is not of the form package:factory or FILE.py:factory")
    owner = _guarded(target, lambda: _file(Path(place)) if place.endswith(".py") else _package(place))
    if not hasattr(owner, name):
        public = [attribute for attribute in vars(owner) if not attribute.startswith("_")]
        raise BadInputError(f"{place} has no {name!r}; {suggestion(name, public)}")
    module = getattr(owner, name)
    if not isinstance(module, nn.Module):
        if not callable(module):
            raise BadInputError(
                f"{target} is a {type(module).__name__}: name a function that returns a torch.nn.Module"
            )
        module = _guarded(target, module)
    if not isinstance(module, nn.Module):
        raise BadInputError(f"{target} returned a {type(module).__name__}, which is no torch.nn.Module")
    return module


def _guarded(target: str, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except BadInputError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's own code)
        reason = (str(error).splitlines() or ["no message"])[0]
        raise BadInputError(f"{target} failed: {type(error).__name__}: {reason}") from None


def _package(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: nothing of the user's hides what is installed
    return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInputError(f"there is no file {path}")
    if str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))  # for what lies beside it
    name = f"_module_of_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # noqa: S101 (the name ends in .py)
    assert spec.loader is not None  # noqa: S101
    owner = importlib.util.module_from_spec(spec)
    sys.modules[name] = owner  # as an import has it: dataclasses look there
    spec.loader.exec_module(owner)
    return owner
