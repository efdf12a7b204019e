"""Load the scripts of studies, which lie beside their results and belong to no package."""

import importlib.util
import sys
from types import ModuleType

from tests.conftest import ROOT


def load_study(path: str) -> ModuleType:
    """Load a script of results/, such as ``order/study.py``, once."""
    name = "results." + path.removesuffix(".py").replace("/", ".")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "results" / path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look for their module there
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
