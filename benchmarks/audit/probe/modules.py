"""Modules that an app imports and that are not here: those that Flower has moved, and idle ones, as stubs."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import MagicMock

# Trackers of experiments, loggers and drawings: nothing that a client computes with.
IDLE = frozenset({
    "wandb", "mlflow", "tensorboard", "tensorboardX", "neptune", "comet_ml", "clearml", "aim", "swanlab", "codecarbon",
    "loguru", "dotenv", "matplotlib", "seaborn", "plotly", "prometheus_client", "nvidia_smi", "pynvml", "torchinfo",
    "torchsummary", "hf_transfer", "icecream", "tabulate", "watchtower",
})  # fmt: skip
TENSORBOARD = "torch.utils.tensorboard"  # of torch itself, which needs the package
# Where names are today that modules of earlier Flower had.
PLACES = (
    "flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.client", "flwr.server",
    "flwr.server.strategy", "flwr.compat.client.typing", "flwr.app.user_config", "flwr.common", "flwr.common.typing",
)  # fmt: skip
EMPTIED = ("flwr.common.typing", "flwr.common.logger")  # that are there, without names that they had


class _Idle(ModuleType):
    """A module that has whatever is asked of it, and does nothing."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def _look_up(module_name: str, name: str) -> Any:
    """Look a name of an earlier module up where Flower has it today; AttributeError if it is nowhere."""
    for place in () if name.startswith("__") else PLACES:
        if name in vars(module := importlib.import_module(place)) or name in getattr(module, "__all__", ()):
            return getattr(module, name)
    raise AttributeError(f"module {module_name!r} has no attribute {name!r}")


class _Moved(ModuleType):
    """A module of earlier Flower: its names are looked up where they are today."""

    def __getattr__(self, name: str) -> Any:
        return _look_up(self.__name__, name)


class _AppFinder(MetaPathFinder, Loader):
    """Finds modules that are missing, for the app's own code alone: what is installed is not misled.

    Args:
        code: Folder of the app's code.
        say: Notes what stood in for what; None where nothing may stand in.
    """

    def __init__(self, code: str, say: Callable[[str, str, str], None] | None) -> None:
        self._code, self._say = code, say
        self._idle = {name for name in IDLE if importlib.util.find_spec(name) is None} if say is not None else set()

    def find_spec(self, fullname: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Find a module."""
        top = fullname.partition(".")[0]
        is_idle = top in self._idle or (fullname.startswith(TENSORBOARD) and "tensorboard" in self._idle)
        if is_idle or top == "flwr":
            return ModuleSpec(fullname, self, is_package=True) if self._asks() else None
        return None

    def _asks(self) -> bool:
        """Tell whether it is the app's code that imports."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename.startswith(self._code)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a stub, and say so; or a module of earlier Flower."""
        if spec.name.startswith("flwr."):
            return _Moved(spec.name)
        if self._say is not None and spec.name in (*IDLE, TENSORBOARD):
            self._say("module", spec.name, "a stub that does nothing")
        return _Idle(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing more."""


class _TensorboardFinder(_AppFinder):
    """Finds torch's module of tensorboard before torch does, which fails without the package."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a module of torch's."""
        return super().find_spec(fullname, path, target) if fullname.startswith(TENSORBOARD) else None


def find_missing_modules(code: str, say: Callable[[str, str, str], None] | None) -> None:
    """Let the app's code import what Flower has moved, and stubs of idle modules.

    Args:
        code: Folder of the app's code.
        say: Notes what stood in for what; None where nothing may stand in.
    """
    sys.meta_path.insert(0, _TensorboardFinder(code, say))
    sys.meta_path.append(_AppFinder(code, say))
    for name in EMPTIED:
        vars(importlib.import_module(name)).setdefault("__getattr__", partial(_look_up, name))
