"""What a listing reads from sources, or of other packages' classes, is what the classes state."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from fedmjp.attacks import ATTACKS
from fedmjp.defences import DEFENCES
from fedmjp.registry import Registry, named_classes, read_literal
from fedmjp.threat import SERVERS

LISTED = [
    (ATTACKS, ("name", "role", "summary")),
    (DEFENCES, ("name", "stages", "summary")),
    (SERVERS, ("name", "summary")),
]
MODULE = """
from typing import Generic, TypeVar
from fedmjp.registry import Registry as Renamed
T = TypeVar("T")

class Base(Generic[T]):
    summary: str
    name = "base"
    role: str = "floor"

class Listed(Base[int]):
    name: str = "listed"
    computed = "a" + "b"

class Alias(Renamed[int]):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "listed_elsewhere.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "listed_elsewhere", raising=False)
    return "listed_elsewhere"


@pytest.mark.parametrize(("registry", "attributes"), LISTED, ids=lambda value: getattr(value, "kind", ""))
def test_what_is_read_of_our_classes_is_what_they_state(registry: Registry[Any], attributes: tuple[str, ...]) -> None:
    for name in registry:
        made = registry.get(name)
        assert registry.state(name, *attributes) == {attribute: getattr(made, attribute) for attribute in attributes}


def test_literals_of_a_class_and_of_its_bases_are_read_without_an_import(module: str) -> None:
    assert read_literal(f"{module}:Listed", "name") == "listed"
    assert read_literal(f"{module}:Listed", "role") == "floor"
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("name", "attribute"), [("Listed", "computed"), ("Listed", "summary"), ("Alias", "kind"), ("No", "name")]
)
def test_what_no_source_says_is_not_guessed(module: str, name: str, attribute: str) -> None:
    with pytest.raises(ValueError, match=r"gives \w+ no value|malformed node"):
        read_literal(f"{module}:{name}", attribute)


def test_classes_of_other_packages_are_asked_themselves(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", f"{module}:Listed", "of a test")
    monkeypatch.setattr("fedmjp.registry.entry_points", lambda group: [point])
    registry: Registry[Any] = Registry("attack", {"ours": f"{module}:Listed"}, entry_points="of a test")
    assert registry.state("ours", "name") == {"name": "listed"}
    assert module not in sys.modules
    assert registry.state("theirs", "name", "computed") == {"name": "listed", "computed": "ab"}
    assert registry.state("ours", "computed") == {"computed": "ab"}, "where the source does not say, ours are, too"


def test_names_are_found_in_classes_alone(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "one.py").write_text(
        'class One:\n    name: ClassVar[str] = "one"\n\n    def run(self):\n        name = "inner"\n\n\n'
        'def outside():\n    name = "local"\n'
    )
    (tmp_path / "deep" / "two.py").write_text('name = "module"\n\n\nclass Two:\n    name = "two"\n')
    assert named_classes("somewhere", tmp_path) == {"one": "somewhere.one:One", "two": "somewhere.deep.two:Two"}


def test_a_name_that_two_classes_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('class One:\n    name = "one"\n')
    (tmp_path / "two.py").write_text('class Two:\n    name = "one"\n')
    with pytest.raises(ValueError, match=r"(One|Two) and somewhere\.(one|two):(One|Two) both state the name 'one'"):
        named_classes("somewhere", tmp_path)
