"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import fedmjp

PACKAGES = ("fedmjp", "fedmjp.defences", "fedmjp.metrics")
MODULES = sorted(
    f"{package}.{module.name}"
    for package in PACKAGES
    for module in pkgutil.iter_modules([str(Path(fedmjp.__file__).parents[1].joinpath(*package.split(".")))])
    if not module.ispkg and module.name != "__main__"
)
# Modules whose docstrings must hold an example: what users call.
INTERNAL = ("accounting", "base", "clipping", "noise", "privacy", "testing")
EXEMPLARY = {"fedmjp.jigsaw", "fedmjp.scenario", *(name for name in MODULES if name.startswith("fedmjp.defences."))}
EXEMPLARY -= {f"fedmjp.defences.{name}" for name in INTERNAL}


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted or name not in EXEMPLARY, "it has no example"
