"""Imports timm and torchvision without torch's compiler: they name it, nothing here uses it, and it takes longer.

Functions of theirs that must not be compiled import it when they are first called. Where another release asks it for
more, the import fails here, and comes again as it is. Torch's initialisers would import it for tensors without numbers:
a second and a half in each command that plans.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode

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


class Undrawn(TorchFunctionMode):
    """Where tensors have no numbers, leaves out what initialisers draw and calculate."""

    LEFT_OUT = (
        torch.nn.init.normal_, torch.Tensor.normal_, torch.Tensor.erfinv_, torch.Tensor.mul_, torch.Tensor.add_,
        torch.Tensor.clamp_,
    )  # fmt: skip

    def __torch_function__(
        self, function: Any, _types: object, arguments: Any = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function in self.LEFT_OUT:
            tensor = arguments[0] if arguments else (options or {})["tensor"]
            if tensor.is_meta:
                return tensor
        return function(*arguments, **(options or {}))


if COMPILER not in sys.modules:
    _import_without_compiler("torchvision.transforms.v2", "timm")

import timm  # noqa: E402

__all__ = ["Undrawn", "timm"]
