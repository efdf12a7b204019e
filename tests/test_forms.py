"""What a repository is met by: how it is cited, the forms of its issues, the page for those who contribute."""

import importlib
import re
import tomllib
from typing import Any, get_args

import pytest
import typer
import yaml

from fedmjp.cli import app
from fedmjp.defences.base import Stage
from tests.conftest import ROOT
from tests.test_readme import CODE, parse

README = (ROOT / "README.md").read_text(encoding="utf-8")
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
# GitHub's syntax for issue forms: what each kind of field must have among its attributes.
FIELDS = {"markdown": "value", "input": "label", "textarea": "label", "dropdown": "options", "checkboxes": "options"}


def forms() -> dict[str, dict[str, Any]]:
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in FORMS if path.stem != "config"}


def test_the_citation_the_readme_and_the_package_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    preferred = citation["preferred-citation"]
    bibtex = dict(re.findall(r"(\w+) = \{+([^{}]*)\}", README))
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == preferred["title"] == bibtex["title"]
    assert citation["version"] == preferred["version"] == bibtex["version"] == project["version"]
    assert citation["authors"] == preferred["authors"] == [{"name": bibtex["author"]}]
    assert str(preferred["year"]) == bibtex["year"]
    assert citation["license"] == project["license"]


def test_there_is_a_form_for_an_attack_a_defence_and_an_entry() -> None:
    assert set(forms()) == {"attack", "defence", "entry"}
    for form in forms().values():
        assert {"name", "description", "body"} <= set(form)
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        ids = [field["id"] for field in fields]
        assert len(set(ids)) == len(ids)
        assert any(field.get("validations", {}).get("required") for field in fields)
        for field in form["body"]:
            assert FIELDS[field["type"]] in field["attributes"]
    (stages,) = [field for field in forms()["defence"]["body"] if field["type"] == "dropdown"]
    assert tuple(stages["attributes"]["options"]) == get_args(Stage)


def named() -> list[str]:
    """What the texts of the forms name in backticks, and what stands in a field already."""
    found: set[str] = set()
    for form in forms().values():
        for field in form["body"]:
            attributes = field["attributes"]
            said = [
                attributes.get("description", ""),
                *(each["label"] for each in attributes.get("options", []) if isinstance(each, dict)),
            ]
            if field["type"] == "markdown":
                said.append(attributes["value"])
            elif "value" in attributes:
                found.add(attributes["value"])
            found.update(span for text in said for span in CODE.findall(" ".join(text.split())))
    return sorted(found)


@pytest.mark.parametrize("name", named())
def test_what_a_form_names_is_there(name: str) -> None:
    if name.startswith("fedmjp "):
        one = name.replace("--attack NAME", "--attack grey").replace("--defence NAME", "--defence clip")
        parse(typer.main.get_command(app), one.split()[1:])
    elif "/" in name:
        assert (ROOT / name).exists()
    elif name.endswith("CHECKS"):
        assert importlib.import_module(name.removesuffix(".CHECKS")).CHECKS
    else:
        assert name in {"uploads", "evaluator"}, "the folders of a recording"


def test_headings_that_forms_name_exist() -> None:
    texts = " ".join(path.read_text(encoding="utf-8") for path in FORMS)
    quoted = re.findall(r'`([\w/]+\.md)`,\s+"([^"]+)"', texts)
    assert len(quoted) == 3
    for page, heading in quoted:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"## {' '.join(heading.split())}\n" in text or f"**{' '.join(heading.split())}.**" in text


def test_contributing_is_a_screen() -> None:
    assert len((ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 45
