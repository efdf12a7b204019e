"""Imports timm and torchvision without torch's compiler: they name it, nothing here uses it, and it takes longer.

Functions of theirs that must not be compiled import it when they are first called. Where another release asks it for
more, the import fails here, and comes again as it is.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from torch._compile import _disable_dynamo

COMPILER = "torch._dynamo"
UTILITIES = f"{COMPILER}.utils"


def _disable(function: Any = None, recursive: bool = True, **_: object) -> Any:
    return _disable_dynamo(function, recursive)


def _is_compile_supported(device: Any) -> Any:
    return importlib.import_module(UTILITIES).is_compile_supported(device)


def _import_without_compiler(*names: str) -> None:
    stubs = {COMPILER: ModuleType(COMPILER), UTILITIES: ModuleType(UTILITIES)}
    vars(stubs[COMPILER])["disable"] = _disable
    vars(stubs[UTILITIES])["is_compile_supported"] = _is_compile_supported
    sys.modules.update(stubs)
    try:
        for name in names:
            importlib.import_module(name)
    except (AttributeError, ImportError):
        return
    finally:
        for name in stubs:
            del sys.modules[name]


if COMPILER not in sys.modules:
    _import_without_compiler("torchvision.transforms.v2", "timm")

import timm  # noqa: E402

__all__ = ["timm"]
